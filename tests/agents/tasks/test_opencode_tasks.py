"""Tasks from one end to the other: the real agents, a model with a script, a git server that wants a token."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from skerry import Client
from skerry.agents.task_models import CreateTask, CreateTeam, TaskInfo
from skerry.agents.tasks import Tasks
from skerry.agents.workforce import Workforce
from skerry.control.registry import Registry
from tests.agents.conftest import KEY
from tests.agents.forge import Forge
from tests.agents.model import Answer, Asked, Call, Model, call, config, fail, hang, say
from tests.agents.tasks.test_tasks import events
from tests.server.conftest import ServerProcess

TOKEN = "token-of-the-forge"
FILES = {
    "adding.py": "def add(a, b):\n    return a - b\n",
    "test_adding.py": "from adding import add\n\nassert add(2, 2) == 4, add(2, 2)\nprint('passed')\n",
}
DIRECTORY = "/home/user/workspace"


@pytest.fixture(scope="module")
def forge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forge]:
    with Forge(tmp_path_factory.mktemp("forge"), token=TOKEN) as forge:
        yield forge


@pytest.fixture(scope="module")
def repository(forge: Forge) -> str:
    return forge.repository("adding", FILES)


@pytest_asyncio.fixture
async def workforce(agency: Registry) -> AsyncIterator[Workforce]:
    workforce = Workforce(agency)
    await workforce.open()
    yield workforce
    await workforce.close()


@pytest.fixture
def real(workforce: Workforce) -> Tasks:
    return workforce.tasks


BOTH = pytest.mark.parametrize("agent", ["opencode", "claude-code"])


def shared(model: Model, forge: Forge, agent: str = "opencode", **options: Any) -> dict[str, Any]:
    door = f"{forge.url.removeprefix('http://')}"
    anthropic = {"provider": {"anthropic": {"options": {"baseURL": f"{model.url}/v1", "apiKey": KEY}}}}
    return {
        "agent": agent,
        "config": config(model, key=KEY) if agent == "opencode" else anthropic,
        "egress": {"mode": "allowlist", "allow": [door, model.url.removeprefix("http://")]},
        "secrets": {door: {"value": TOKEN, "username": "x-access-token", "insecure": True}},
        "afterwards": "destroy",
        **options,
    }


def bash(agent: str, command: str) -> Answer:
    return call("bash" if agent == "opencode" else "Bash", command=command, description="Run it")


def edits(agent: str) -> tuple[Answer, ...]:
    """Both read a file before they change it."""
    path = f"{DIRECTORY}/adding.py"
    if agent == "opencode":
        return call("read", filePath=path), call("edit", filePath=path, oldString="a - b", newString="a + b")
    return call("Read", file_path=path), call("Edit", file_path=path, old_string="a - b", new_string="a + b")


def script(model: Model, agent: str = "opencode") -> None:
    """What a model does about a failing test: look, run, edit, run again, say."""
    # Python takes what it compiled within the same second of a file of the same size for up to date.
    test = "python3 -B test_adding.py"
    words = say("The sum was a difference; it passes now.")
    model.when("failing test", bash(agent, test), *edits(agent), bash(agent, test), words)


@BOTH
async def test_a_task_clones_edits_tests_and_brings_back_the_diff(
    real: Tasks, model: Model, forge: Forge, repository: str, agency: Registry, agent: str
) -> None:
    script(model, agent)
    request = CreateTask.model_validate(
        {"message": "Fix the failing test.", "gitUrl": repository, **shared(model, forge, agent)}
    )
    row = await real.create(request)
    told = await events(real, row.id)
    task = await real.get(row.id)
    assert (task.status, task.error) == ("completed", None)
    assert task.response == "The sum was a difference; it passes now."
    assert task.diff is not None
    assert [(file.path, file.status, file.additions, file.deletions) for file in task.diff.files] == [
        ("adding.py", "modified", 1, 1)
    ]
    assert "-    return a - b\n+    return a + b" in (task.diff.patch or "")
    ended = [event.event for event in told if event.type == "tool_call" and event.event]
    outputs = [call["output"] for call in ended if call["tool"].lower() == "bash" and call["status"] == "completed"]
    assert "AssertionError: 0" in outputs[0]
    assert "passed" in outputs[-1]
    assert task.tokens.input > 0
    assert "".join(event.content or "" for event in told).endswith("it passes now.")
    # Neither key is anywhere on record.
    kept = await agency.tasks.get(task.id)
    for secret in (KEY, TOKEN):
        assert secret not in f"{kept!r} {kept and kept.request} {told}"


async def test_a_team_of_three_costs_one_clone_and_one_that_fails_fails_alone(
    workforce: Workforce, model: Model, forge: Forge, repository: str
) -> None:
    script(model)
    model.when("Explain", say("It adds."))
    model.when("Refuse", fail(401))
    forge.clones.clear()
    agents = [
        {"role": "fixer", "message": "Fix the failing test."},
        {"role": "refuser", "message": "Refuse this."},
        {"role": "reader", "message": "Explain adding.py."},
    ]
    request = CreateTeam.model_validate({"agents": agents, "gitUrl": repository, **shared(model, forge)})
    team = await workforce.teams.wait((await workforce.teams.create(request)).team_id)
    fixer, refuser, reader = team.agents
    assert (team.status, team.shared, forge.clones) == ("partial", True, ["/adding.git"])
    assert (fixer.status, fixer.changed_files) == ("completed", 1)
    assert (refuser.status, refuser.error_code) == ("failed", "model_denied")
    assert (reader.status, reader.response, reader.changed_files) == ("completed", "It adds.", 0)


@BOTH
async def test_cancelling_stops_it_in_the_middle(real: Tasks, model: Model, forge: Forge, agent: str) -> None:
    model.when("Wait", bash(agent, "echo half > half"), hang())
    row = await real.create(CreateTask.model_validate({"message": "Wait for me.", **shared(model, forge, agent)}))
    await _asked(model, "Wait", 2)
    task: TaskInfo = await real.cancel(row.id)
    assert (task.status, task.error_code) == ("cancelled", "cancelled")
    assert task.diff is not None
    assert [file.path for file in task.diff.files] == ["half"]


async def test_a_model_that_is_silent_costs_the_task_its_time_and_no_more(
    real: Tasks, model: Model, forge: Forge
) -> None:
    model.when("Wait", hang())
    options = shared(model, forge, "claude-code", timeout=2)
    task = await real.wait((await real.create(CreateTask.model_validate({"message": "Wait.", **options}))).id)
    assert (task.status, task.error_code, task.response) == ("failed", "timeout", None)


async def test_an_agent_that_is_denied_what_it_asks_for_goes_on_without(
    real: Tasks, model: Model, forge: Forge
) -> None:
    both = (Call("bash", {"command": f"rm -f {name}", "description": "Remove it"}, f"call_{name}") for name in "ab")
    model.when("Clean", Answer(calls=tuple(both)), say("I was not allowed to."))
    options = shared(model, forge, permissions="reject")
    options["config"] |= {"permission": {"*": "allow", "bash": "ask"}}
    row = await real.create(CreateTask.model_validate({"message": "Clean up.", **options}))
    told = await events(real, row.id)
    assert sum(event.type == "permission" for event in told) == 2
    task = await real.get(row.id)
    assert (task.status, task.error, task.response) == ("completed", None, "I was not allowed to.")


async def test_a_wrong_token_fails_the_task_before_any_agent_starts(
    real: Tasks, model: Model, forge: Forge, repository: str
) -> None:
    options = shared(model, forge)
    options["secrets"] = {host: {**secret, "value": "wrong"} for host, secret in options["secrets"].items()}
    row = await real.create(CreateTask.model_validate({"message": "x", "gitUrl": repository, **options}))
    task = await real.wait(row.id)
    assert (task.status, task.error_code) == ("failed", "git_auth_failed")
    assert TOKEN not in str(task)


async def _asked(model: Model, words: str, times: int) -> None:
    async with asyncio.timeout(60):
        while _times(model, words) < times:
            await asyncio.sleep(0.02)


def test_a_server_that_is_killed_while_agents_work_is_followed_by_one_that_goes_on(
    model: Model, forge: Forge, repository: str, tmp_path: Path
) -> None:
    agents = ("opencode", "claude-code")
    (home := tmp_path / "home").mkdir()
    server = ServerProcess(home)
    with Client(server.url) as client:
        begun = {}
        for agent in agents:
            model.when(f"Mend it with {agent}", *edits(agent), hang())
            options = shared(model, forge, agent, afterwards="keep")
            begun[agent] = client.start_task(f"Mend it with {agent}.", git_url=repository, **options).id
        deadline = time.monotonic() + 60
        while any(_times(model, f"Mend it with {agent}") < 3 for agent in agents):
            assert time.monotonic() < deadline, client.list_tasks()
            time.sleep(0.05)
    server.stop(signal.SIGKILL)
    model.when("server was restarted", say("It was mended already."))
    server = ServerProcess(home)
    try:
        with Client(server.url) as client:
            for agent, id in begun.items():
                with client.follow_task(id) as told:
                    events = list(told)
                task = events[-1].task
                assert task is not None
                assert (task.status, task.response, task.attempts) == ("completed", "It was mended already.", 2), task
                assert task.diff is not None
                assert [file.path for file in task.diff.files] == ["adding.py"]
                # The session is the one from before: what was said there is what the model is shown again.
                (shown, *_) = [str(asked.body) for asked in model.asked if _goes_on(asked, agent)]
                assert "a + b" in shown
                assert any("takes it up again" in (event.message or "") for event in events)
    finally:
        assert server.stop() == 0


def _goes_on(asked: Asked, agent: str) -> bool:
    return bool(asked.tools) and "server was restarted" in asked.prompt and f"Mend it with {agent}" in asked.prompt


def _times(model: Model, words: str) -> int:
    return sum(words in asked.prompt and bool(asked.tools) for asked in list(model.asked))
