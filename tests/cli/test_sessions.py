"""`skerry session`, against a server whose only agent is a scripted one."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.agents.sessions.conftest import SCRIPTED
from tests.cli.conftest import Skerry
from tests.cli.test_tasks import Terminal
from tests.server.conftest import ServerProcess


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    home = Path(tempfile.mkdtemp(prefix="skerry-cli-sessions-"))
    process = ServerProcess(home, first=SCRIPTED)
    yield process
    assert process.stop() == 0
    shutil.rmtree(home)


@pytest.fixture(scope="module")
def ask(skerry: Skerry, server: ServerProcess) -> Skerry:
    return lambda *arguments, **options: skerry("--url", server.url, "session", *arguments, **options)


def said(ask: Skerry, *arguments: str | Path) -> str:
    done = ask(*arguments)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


@pytest.fixture(scope="module")
def session(ask: Skerry) -> str:
    return said(ask, "start", "a greeting").strip()


def test_a_prompt_shows_what_the_agent_says_and_does(ask: Skerry, session: str) -> None:
    done = ask("prompt", session, "say let me see; tool looked; say it is 4")
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode() == "let me see\nit is 4\n"
    lines = done.stderr.decode().splitlines()
    assert lines[:2] == ["· sandbox spawning", "· sandbox connecting"]
    assert "▸ tool: " in done.stderr.decode()
    piped = ask("prompt", session, "-", stdin=b"fail out of credit")
    assert piped.returncode == 1
    assert b"out of credit" in piped.stderr
    assert ask("prompt", session, " ").returncode == 2


def test_as_json_each_event_is_a_line(ask: Skerry, session: str) -> None:
    done = ask("prompt", session, "say hello", "--json")
    assert (done.returncode, done.stderr) == (0, b"")
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert told[0]["type"] == "subscribed"
    assert told[-1]["event"]["type"] == "execution_complete"


def test_files_are_attached(ask: Skerry, session: str, tmp_path: Path) -> None:
    (tmp_path / "notes.bin").write_bytes(b"\x00\xff")
    said(ask, "prompt", session, "say thanks", "--attach", tmp_path / "notes.bin")
    sent = json.loads(said(ask, "show", "--json", session))["messages"][-1]["attachments"]
    assert sent == [{"name": "notes.bin", "content": "AP8=", "encoding": "base64"}]
    refused = ask("prompt", session, "say no", "--attach", tmp_path / "nothing")
    assert refused.returncode == 2
    assert b"cannot be read" in refused.stderr


def test_sessions_are_listed_and_looked_at(ask: Skerry, session: str) -> None:
    line = next(line for line in said(ask, "list").splitlines() if line.startswith(session))
    assert line.split("\t")[1] == "active"
    assert line.endswith("a greeting")
    assert "a greeting\n" in said(ask, "show", session)
    shown = json.loads(said(ask, "show", session, "--json"))
    assert [each["status"] for each in shown["messages"]].count("failed") == 1
    events = [json.loads(line) for line in said(ask, "show", session, "--events").splitlines()]
    assert [each["number"] for each in events] == sorted({each["number"] for each in events})
    missing = ask("show", "sess-nothing")
    assert missing.returncode == 1
    assert b"There is no session" in missing.stderr


def test_a_question_is_answered_from_elsewhere(
    ask: Skerry, session: str, program: list[str], environment: dict[str, str], server: ServerProcess
) -> None:
    said(ask, "prompt", session, "ask rm -r build; say done", "--detach")
    line = [*program, "--url", server.url, "session", "watch", session, "--after", "0", "--json"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, env=environment) as watching:
        assert watching.stdout is not None
        for each in watching.stdout:
            event = json.loads(each)["event"] or {}
            if event.get("type") == "permission":
                said(ask, "answer", session, event["data"]["permissionId"], "always")
            if event.get("type") == "permission_answered":
                assert event["data"]["reply"] == "always"
                break
        watching.send_signal(signal.SIGINT)
        assert watching.wait(20) == 0


def test_whoever_watches_sees_where_each_prompt_ends_and_which_failed(
    ask: Skerry, program: list[str], environment: dict[str, str], server: ServerProcess
) -> None:
    id = said(ask, "start").strip()
    for content in ("say one", "fail no credit", "say three"):
        ask("prompt", id, content)
    line = [*program, "--url", server.url, "session", "watch", id, "--after", "0"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as watching:
        assert watching.stdout is not None
        assert watching.stderr is not None
        assert watching.stdout.read(8) == b"one\nthre"
        watching.send_signal(signal.SIGINT)
        assert watching.wait(20) == 0
        assert "✗ failed: The model failed: no credit" in watching.stderr.read().decode()
    said(ask, "remove", id)


@pytest.fixture
def terminal(program: list[str], environment: dict[str, str], server: ServerProcess) -> Callable[..., Terminal]:
    return lambda *arguments: Terminal(program, environment, "--url", server.url, "session", *arguments)


def test_on_a_terminal_one_is_asked(terminal: Callable[..., Terminal], session: str) -> None:
    window = terminal("prompt", session, "ask rm -r build; say done")
    window.until("[r]eject? ")
    assert "asks for leave: bash rm -r build" in window.shown
    window.type(b"o\n")
    assert window.ended() == 0
    assert "answered: once" in window.shown
    assert window.shown.rstrip().endswith("done")


def test_ctrl_c_stops_the_prompt(terminal: Callable[..., Terminal], session: str) -> None:
    window = terminal("prompt", session, "say working; hang")
    window.until("working")
    window.type(b"\x03")
    window.until("go on watching? ")
    window.type(b"c\n")
    assert window.ended() == 130
    assert "(aborted)" in window.shown


def test_a_command_that_is_ended_says_nothing_and_leaves_the_prompt(
    ask: Skerry, session: str, program: list[str], environment: dict[str, str], server: ServerProcess
) -> None:
    line = [*program, "--url", server.url, "session", "prompt", session, "say working; hang"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as command:
        assert command.stdout is not None
        assert command.stdout.read(7) == b"working"
        command.terminate()
        _, err = command.communicate(timeout=30)
    assert command.returncode == 143
    assert b"Traceback" not in err
    assert json.loads(said(ask, "show", session, "--json"))["processing"] is True
    said(ask, "stop", session)


def test_commits_are_in_the_name_of_who_began_the_session(ask: Skerry, skerry: Skerry, server: ServerProcess) -> None:
    refused = ask("start", "--author", "nobody")
    assert refused.returncode == 2
    assert b"is not NAME <EMAIL>" in refused.stderr
    session = said(ask, "start", "--author", "Ann B <ann@example.com>").strip()
    said(ask, "prompt", session, "say hello")
    sandbox = json.loads(said(ask, "show", "--json", session))["sandboxId"]
    known = skerry("--url", server.url, "exec", sandbox, "git config user.name; git config user.email")
    assert known.stdout.decode().splitlines() == ["Ann B", "ann@example.com"]
    said(ask, "remove", session)


def test_a_session_is_archived_and_removed(ask: Skerry) -> None:
    id = json.loads(said(ask, "start", "--model", "fake/fake-1", "--json"))["id"]
    assert said(ask, "archive", id).strip() == id
    refused = ask("prompt", id, "say x")
    assert refused.returncode == 1
    assert b"hint: Unarchive it first." in refused.stderr
    assert said(ask, "unarchive", id).strip() == id
    said(ask, "stop", id)
    assert ask("start", "--repo", "no-owner").returncode == 2
    assert said(ask, "remove", id).strip() == id


def test_without_a_server_there_is_nobody_to_leave_a_prompt_to(skerry: Skerry) -> None:
    refused = skerry("session", "prompt", "sess-x", "say x", "--detach")
    assert refused.returncode == 1
    assert b"skerry serve" in refused.stderr


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_configuration_that_is_none_is_refused_in_a_sentence(ask: Skerry, tmp_path: Path, text: str) -> None:
    config = tmp_path / "config.json"
    config.write_text(text)
    done = ask("start", "--config", config)
    assert done.returncode == 2
    assert b"Traceback" not in done.stderr
    assert b"--config" in done.stderr


@pytest.mark.parametrize("wrong", [("--agent", "nobody"), ("--model", "nonsense"), ("--repo", "a/b/c")])
def test_what_makes_no_sense_is_refused_in_a_sentence(ask: Skerry, wrong: tuple[str, str]) -> None:
    done = ask("start", *wrong)
    assert done.returncode == 1
    assert done.stderr.startswith(b"error: The request is not valid. ")
    assert b"pydantic" not in done.stderr
