"""`skerry task`, `tasks`, `team` and `schedule`, against a server whose only agent is a scripted one."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import shutil
import signal
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from skerry.agents.task_models import TaskEvent
from skerry.cli import watching
from skerry.client._async.connection import AsyncStream
from skerry.models import now
from tests.agents.tasks.scripted import script
from tests.agents.tasks.serving import SCRIPTED
from tests.cli.conftest import Skerry
from tests.server.conftest import ServerProcess

OPTIONS = ("--agent", "scripted", "--afterwards", "destroy")
HANG = script({"run": "true"}, {"hang": True})
WORK = script({"say": "Done: "}, {"run": "echo new > new.txt"}, {"run": "false"}, {"say": "four."}, {"cost": 0.25})


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    home = Path(tempfile.mkdtemp(prefix="skerry-cli-tasks-"))
    process = ServerProcess(home, first=SCRIPTED)
    yield process
    assert process.stop() == 0
    shutil.rmtree(home)


@pytest.fixture
def ask(skerry: Skerry, server: ServerProcess) -> Skerry:
    return lambda *arguments, **options: skerry("--url", server.url, *arguments, **options)


def said(ask: Skerry, *arguments: str | Path) -> str:
    done = ask(*arguments)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def test_a_task_shows_what_the_agent_does_and_ends_with_the_patch(ask: Skerry) -> None:
    done = ask("task", WORK, *OPTIONS, "--provider", "local")
    out, err = done.stdout.decode(), done.stderr.decode()
    assert done.returncode == 0, err
    assert "Done: " in out
    assert "four.\ndiff --git a/new.txt b/new.txt" in out
    assert out.endswith("+new\n")
    assert "▸ bash: echo new > new.txt" in err
    assert "✗ bash" in err
    assert "1 file changed (+1 -0), 13 tokens, 0.2500 USD" in err


def test_as_json_there_is_nothing_but_the_task(ask: Skerry) -> None:
    done = ask("task", WORK, *OPTIONS, "--json")
    assert (done.returncode, done.stderr) == (0, b"")
    task = json.loads(done.stdout)
    assert (task["status"], task["response"], task["changedFiles"]) == ("completed", "Done: four.", 1)


def test_a_task_that_fails_fails_the_command(ask: Skerry) -> None:
    done = ask("task", script({"fail": "model_denied"}), *OPTIONS)
    assert done.returncode == 1
    assert b"error: The model said no. (model_denied)" in done.stderr
    refused = ask("task", "x", "--agent", "nobody")
    assert refused.returncode == 1
    assert b"There is no agent 'nobody'" in refused.stderr
    assert ask("task").returncode == 2


def test_tasks_are_listed_and_looked_at(ask: Skerry, tmp_path: Path) -> None:
    id = said(ask, "task", WORK, *OPTIONS, "--detach").strip()
    followed = ask("tasks", id, "--follow")
    assert followed.returncode == 0
    assert b"four.\n" in followed.stdout
    line = next(line for line in said(ask, "tasks").splitlines() if line.startswith(id))
    assert line.split("\t")[1:3] == ["completed", "scripted"]
    looked = said(ask, "tasks", id)
    assert "Done: four." in looked
    assert "A new.txt" in looked
    (tmp_path / "patch").write_text(said(ask, "tasks", id, "--diff"))
    subprocess.run(["git", "apply", "patch"], cwd=tmp_path, check=True)
    assert (tmp_path / "new.txt").read_text() == "new\n"
    broken = said(ask, "task", script({"run": "git init -q; rm -rf /home/user/workspace"}), *OPTIONS, "--json")
    lacking = ask("tasks", json.loads(broken)["id"], "--diff")
    assert (lacking.returncode, lacking.stdout) == (1, b"")
    assert b"warning: There is no diff" in lacking.stderr
    total = said(ask, "tasks", "--usage").splitlines()[-1].split("\t")
    assert (total[0], float(total[5]) >= 0.25) == ("total", True)
    assert said(ask, "tasks", "--usage", "--user", "nobody") == "total\t0\t0\t0\t0\t0.0000\n"
    assert said(ask, "tasks", "--user", "nobody") == ""
    again = said(ask, "tasks", id, "--retry").strip()
    assert json.loads(said(ask, "tasks", again, "--json"))["retryOf"] == id
    assert ask("tasks", "task-nothing").returncode == 1


def test_providers_are_listed_with_why_some_are_not_there(ask: Skerry) -> None:
    rows = {row.split("\t")[0]: row.split("\t")[1:] for row in said(ask, "providers").splitlines()}
    assert rows["local"][0] == "yes"
    assert rows["cloudflare"] == ["no", "Cloudflare worker URL not configured"]
    listed = json.loads(said(ask, "providers", "--json"))
    assert [one["name"] for one in listed if one["available"]][:1] == ["local"]


def test_a_team_is_planned_in_yaml(ask: Skerry, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        f"""
        agent: scripted
        afterwards: destroy
        agents:
          - role: writer
            message: '{script({"say": "written"}, {"run": "echo w > w"})}'
          - role: breaker
            message: '{script({"fail": "model_failed"})}'
        """
    )
    done = ask("team", plan)
    out, err = done.stdout.decode(), done.stderr.decode()
    assert done.returncode == 1
    assert "== writer\nwritten\ndiff --git a/w b/w" in out
    assert "writer ▸ bash: echo w > w" in err
    assert "model_failed" in err
    assert ": partial," in err
    found = json.loads(ask("team", plan, "--json").stdout)
    assert [agent["status"] for agent in found["agents"]] == ["completed", "failed"]
    plan.write_text("agents: [")
    assert ask("team", plan).returncode == 2
    plan.write_text("- a list")
    assert ask("team", plan).returncode == 2


def test_what_the_command_line_says_goes_before_the_plan(ask: Skerry, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    member = {"role": "one", "message": script({"say": "x"})}
    elsewhere = {"gitUrl": "https://127.0.0.1:1/plan.git", "gitBranch": "old", "provider": "docker", "detach": True}
    plan.write_text(json.dumps({"agents": [member], "agent": "scripted", "afterwards": "destroy", **elsewhere}))
    options = ("--repo", "https://127.0.0.1:1/mine.git", "--branch", "new", "--provider", "local")
    team = json.loads(ask("team", plan, *options, "--json").stdout)
    (agent,) = team["agents"]
    assert (agent["gitUrl"], agent["gitBranch"]) == ("https://127.0.0.1:1/mine.git", "new")
    assert (agent["status"], agent["errorCode"]) == ("failed", "git_network_error"), "it is watched to its end"
    made = json.loads(said(ask, "schedule", "add", "@yearly", "--plan", plan, *options, "--json"))
    assert made["request"]["team"]["gitBranch"] == "new"
    said(ask, "schedule", "remove", made["id"])


def test_schedules_on_the_command_line(ask: Skerry, tmp_path: Path) -> None:
    id = said(ask, "schedule", "add", "0 9 * * mon-fri", WORK, "--name", "morning", "-z", "Europe/Berlin", *OPTIONS)
    id = id.strip()
    columns = said(ask, "schedule", "list").split("\t")
    assert columns[:4] == [id, "morning", "0 9 * * mon-fri", "Europe/Berlin"]
    task = said(ask, "schedule", "run", id).strip()
    assert ask("tasks", task, "--follow").returncode == 0
    history = said(ask, "schedule", "history", id).split("\t")
    assert history[1:4] == ["started", "completed", task]
    said(ask, "schedule", "pause", id)
    assert "paused" in said(ask, "schedule", "list")
    said(ask, "schedule", "resume", id)
    assert said(ask, "schedule", "remove", id) == f"{id}\n"
    assert said(ask, "schedule", "list") == ""
    (plan := tmp_path / "nightly.yaml").write_text("agent: scripted\nagents: [{role: one, message: '[]'}]")
    id = said(ask, "schedule", "add", "@daily", "--plan", plan).strip()
    assert said(ask, "schedule", "list").split("\t")[1:3] == ["nightly", "@daily"]
    task = said(ask, "schedule", "run", id).strip()
    assert said(ask, "tasks", task, "--follow") == ""
    said(ask, "schedule", "remove", id)
    assert ask("schedule", "add", "@daily").returncode == 2
    wrong = ask("schedule", "add", "61 * * * *", "x", *OPTIONS)
    assert wrong.returncode == 1
    assert b"is not a minute" in wrong.stderr


def test_a_schedule_that_cannot_be_begun_says_why(ask: Skerry, server: ServerProcess) -> None:
    id = said(ask, "schedule", "add", "@yearly", WORK, *OPTIONS).strip()
    with closing(sqlite3.connect(server.home / "skerry.db")) as store, store:  # as an older server may have left it
        store.execute("UPDATE schedules SET request = ? WHERE id = ?", ('{"message": "x", "colour": "red"}', id))
    done = ask("schedule", "run", id)
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr == b"error: It could not be begun: colour: Extra inputs are not permitted.\n"
    shown = ask("schedule", "run", id, "--json")
    assert (shown.returncode, json.loads(shown.stdout)["outcome"]) == (1, "failed")
    said(ask, "schedule", "remove", id)


class Terminal:
    """The command in a terminal of its own, which somebody types into."""

    def __init__(self, program: list[str], environment: dict[str, str], *arguments: str) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.execvpe(program[0], [*program, *arguments], environment)
        self.shown = ""

    def until(self, text: str, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        os.set_blocking(self._fd, False)
        while text not in self.shown:
            assert time.monotonic() < deadline, self.shown
            try:
                data = os.read(self._fd, 4096)
            except BlockingIOError:
                time.sleep(0.02)
                continue
            except OSError:
                break
            self.shown += data.decode(errors="replace")
        assert text in self.shown, self.shown

    def type(self, text: bytes) -> None:
        os.write(self._fd, text)

    def ended(self) -> int:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                os.close(self._fd)
                return os.waitstatus_to_exitcode(status)
            try:
                self.shown += os.read(self._fd, 4096).decode(errors="replace")
            except (BlockingIOError, OSError):
                time.sleep(0.02)
        raise AssertionError(self.shown)


@pytest.fixture
def terminal(
    program: list[str], environment: dict[str, str], server: ServerProcess
) -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def open_terminal(*arguments: str) -> Terminal:
        opened.append(Terminal(program, environment, "--url", server.url, *arguments))
        return opened[-1]

    yield open_terminal
    for one in opened:
        try:
            os.kill(one.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


@pytest.mark.parametrize(
    ("typed", "code", "status"),
    [(b"c\n", 130, "cancelled"), (b"d\n", 0, "running"), (b"\x03", 130, "cancelled"), (b"\n", None, "running")],
)
def test_ctrl_c_asks_what_is_meant(
    terminal: Callable[..., Terminal], ask: Skerry, typed: bytes, code: int | None, status: str
) -> None:
    window = terminal("task", script({"say": "working"}, {"hang": True}), *OPTIONS)
    window.until("working")
    window.type(b"\x03")
    window.until("[d]etach")
    window.type(typed)
    task = json.loads(said(ask, "tasks", "--json", "-n", "1"))["tasks"][0]["id"]
    if code is None:  # it goes on being watched
        time.sleep(0.3)
        assert _status(ask, task) == "running"
        said(ask, "tasks", task, "--cancel")
        assert window.ended() == 130
        return
    assert window.ended() == code
    assert _status(ask, task) == status
    said(ask, "tasks", task, "--cancel")


def test_ctrl_c_where_nobody_can_be_asked_cancels(
    program: list[str], environment: dict[str, str], server: ServerProcess, ask: Skerry
) -> None:
    line = [*program, "--url", server.url, "task", script({"say": "working"}, {"hang": True}), *OPTIONS]
    command = subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, stderr=-1)
    assert command.stdout is not None
    assert command.stdout.read(7) == b"working"
    command.send_signal(signal.SIGINT)
    out: Any = command.communicate(timeout=60)
    assert command.returncode == 130, out
    assert json.loads(said(ask, "tasks", "--json", "-n", "1"))["tasks"][0]["status"] == "cancelled"


@pytest.mark.parametrize("command", ["task", "team"])
def test_one_that_is_told_to_end_ends_without_a_traceback(
    program: list[str], environment: dict[str, str], server: ServerProcess, ask: Skerry, tmp_path: Path, command: str
) -> None:
    rest = (HANG, *OPTIONS) if command == "task" else (_hanging_plan(tmp_path),)
    line = [*program, "--url", server.url, command, *rest]
    watching = subprocess.Popen(line, env=environment, stdin=subprocess.DEVNULL, stdout=-3, stderr=subprocess.PIPE)
    assert watching.stderr is not None
    said_before = b""
    while "▸ bash: true".encode() not in said_before:
        said_before += watching.stderr.readline()
    watching.send_signal(signal.SIGTERM)
    assert watching.stderr.read() == b""
    assert watching.wait(60) == 128 + signal.SIGTERM
    watching.stderr.close()
    said(ask, "tasks", json.loads(said(ask, "tasks", "--json", "-n", "1"))["tasks"][0]["id"], "--cancel")


def test_ctrl_c_while_the_server_is_gone_says_so(
    program: list[str], environment: dict[str, str], tmp_path: Path
) -> None:
    server = ServerProcess(tmp_path / "home", first=SCRIPTED)
    line = [*program, "--url", server.url, "team", _hanging_plan(tmp_path)]
    watching = subprocess.Popen(line, env=environment, stdin=subprocess.DEVNULL, stdout=-3, stderr=subprocess.PIPE)
    assert watching.stderr is not None
    while "▸ bash: true".encode() not in watching.stderr.readline():
        assert watching.poll() is None
    server.stop(signal.SIGKILL)
    time.sleep(0.5)
    watching.send_signal(signal.SIGINT)
    shown = watching.stderr.read().decode()
    assert watching.wait(60) == 1
    watching.stderr.close()
    assert shown.startswith("Cancelling the team.\nerror: No Skerry server answers at "), shown
    assert "Traceback" not in shown


def test_without_a_server_nothing_can_be_left_to_it(skerry: Skerry) -> None:
    done = skerry("task", "x", "--detach")
    assert done.returncode == 1
    assert b"nobody to leave a task to" in done.stderr
    added = skerry("schedule", "add", "@daily", "x", "--json")
    assert added.returncode == 0
    assert added.stderr == b"A server must run for it to be begun: start one with `skerry serve`.\n"
    id = json.loads(added.stdout)["id"]
    assert b"nobody to leave a task to" in skerry("schedule", "run", id).stderr
    assert b"nobody to leave a task to" in skerry("tasks", "task-0", "--retry").stderr


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("task", "x", "-t", "-5"), 1, "The request is not valid. timeout: Input should be greater than 0."),
        (("task", "x", "--config", "CONFIG"), 2, "is no JSON"),
        (("task", "x", "--template", "fix-tests"), 1, "wants a value for command"),
        (("task", "x", "--agent", "opencode", "--model", "gpt"), 1, "Write PROVIDER/MODEL"),
        (("team", "PLAN"), 1, "agents.0.colour: Extra inputs are not permitted"),
        (("team", "NUMBERS"), 2, "is not a plan"),
        (("team", "BYTES"), 2, "cannot be read"),
        (("tasks", "--cancel"), 2, "Say of which task: `skerry tasks TASK --cancel`."),
        (("tasks", "nobody"), 1, "`skerry tasks` lists them"),
    ],
)
def test_a_mistake_is_answered_with_what_to_do_and_not_with_what_was_written(
    skerry: Skerry, tmp_path: Path, arguments: tuple[str, ...], code: int, words: str
) -> None:
    files = {"CONFIG": '{"apiKey": "sk-1", oh', "PLAN": "agents: [{role: a, message: b, colour: sk-1}]"}
    files |= {"NUMBERS": "1: sk-1", "BYTES": "agents: [\xff]"}
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="latin-1")
    done = skerry(*(str(tmp_path / word) if word in files else word for word in arguments))
    assert (done.returncode, done.stdout) == (code, b"")
    assert words in done.stderr.decode()
    assert b"sk-1" not in done.stderr


def _hanging_plan(directory: Path) -> str:
    plan = {"agents": [{"role": "one", "message": HANG}], "agent": "scripted", "afterwards": "destroy"}
    (path := directory / "plan.json").write_text(json.dumps(plan))
    return str(path)


def _status(ask: Skerry, task: str) -> str:
    return str(json.loads(said(ask, "tasks", task, "--json"))["status"])


class Watched:
    """As much of a client as is asked for a task that somebody watches."""

    def __init__(self) -> None:
        self.connection, self.host, self.cancelled = self, None, asyncio.Event()

    async def endpoint(self) -> Watched:
        return self

    async def cancel_task(self, task: str) -> None:
        self.cancelled.set()

    async def __aenter__(self) -> Watched:
        return self

    async def __aexit__(self, *_: object) -> None:
        return


async def test_ctrl_c_at_the_moment_when_something_comes_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[watching.Presses] = []

    class Presses(watching.Presses):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    server: Any = Watched()

    async def events() -> AsyncGenerator[TaskEvent, None]:
        yield TaskEvent(id=1, type="start", task_id="task-1", at=now())
        await asyncio.sleep(0)
        made[0].repeat()
        yield TaskEvent(id=2, type="chunk", task_id="task-1", at=now(), content="x")
        await server.cancelled.wait()
        yield TaskEvent(id=3, type="error", task_id="task-1", at=now(), message="It was cancelled.")

    monkeypatch.setattr(watching, "Presses", Presses)
    async with asyncio.timeout(60):
        assert await watching.watch(server, AsyncStream(events()), watching.View(as_json=True)) == 1
    assert server.cancelled.is_set()


@pytest.mark.parametrize("presses", [1, 2])
async def test_ctrl_c_before_the_first_word_leaves_no_task_at_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], presses: int
) -> None:
    made: list[watching.Presses] = []

    class Presses(watching.Presses):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    server: Any = Watched()

    async def events() -> AsyncGenerator[TaskEvent, None]:
        for _ in range(presses):
            made[0].repeat()
            await asyncio.sleep(0.1)
        yield TaskEvent(id=1, type="start", task_id="task-1", at=now())
        await server.cancelled.wait()
        yield TaskEvent(id=2, type="error", task_id="task-1", at=now(), message="It was cancelled.")

    monkeypatch.setattr(watching, "Presses", Presses)
    async with asyncio.timeout(60):
        code = await watching.watch(server, AsyncStream(events()), watching.View(as_json=False))
    assert (code, server.cancelled.is_set()) == ((1, True) if presses == 1 else (130, False))
    assert capsys.readouterr().err.count("as soon as it has begun") == 1


@pytest.mark.parametrize(("seconds", "said"), [(0.0, 0), (0.4, 1)])
async def test_whoever_waits_for_the_first_word_is_told_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], seconds: float, said: int
) -> None:
    server: Any = Watched()

    async def events() -> AsyncGenerator[TaskEvent, None]:
        await asyncio.sleep(seconds)
        yield TaskEvent(id=1, type="start", task_id="task-1", at=now())
        await asyncio.sleep(0.4)
        yield TaskEvent(id=2, type="error", task_id="task-1", at=now(), message="That was all.")

    monkeypatch.setattr(watching, "SILENCE", 0.1)
    async with asyncio.timeout(60):
        assert await watching.watch(server, AsyncStream(events()), watching.View(as_json=False)) == 1
    assert capsys.readouterr().err.count("Making ready.") == said
