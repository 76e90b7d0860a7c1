"""The real OpenCode in a sandbox, driven by a model with a script."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from skerry.agents.contract import Prompt
from skerry.agents.opencode.agent import OpenCode
from skerry.agents.opencode.running import RunningOpenCode
from skerry.control.registry import Registry
from skerry.errors import AgentUnreadyError
from skerry.models import ExecRequest, SetEgress
from skerry.runtime.runtime import Runtime
from tests.agents.conftest import HOST, KEY, PLACEHOLDER, opencode_setup, sandbox_request, setup_of
from tests.agents.model import Model, call, config, fail, hang, say
from tests.agents.search import nothing_inside

_numbers = itertools.count(1)


@dataclass
class Desk:
    sandbox: str
    runtime: Runtime
    opencode: RunningOpenCode

    async def ask(self, text: str, session: str | None = None, **more: Any) -> list[Any]:
        session = session or await self.opencode.create_session("a test")
        return [event async for event in self.opencode.prompt(session, prompt(text, **more))]


def prompt(text: str, **more: Any) -> Prompt:
    return Prompt(text, f"prompt-{next(_numbers)}", **more)


def kinds(events: list[Any]) -> list[str]:
    return [event.type for event in events]


@pytest_asyncio.fixture(scope="module")
async def desk(agency: Registry, scripted: Model) -> AsyncIterator[Desk]:
    info = await agency.create(sandbox_request(scripted))
    async with agency.use(info.id) as runtime:
        given = config(scripted, key=PLACEHOLDER, permission={"*": "allow", "bash": {"*": "allow", "rm *": "ask"}})
        patient = given["provider"]["scripted"]
        given["provider"]["hasty"] = {**patient, "options": {**patient["options"], "timeout": 500}}
        given["enabled_providers"].append("hasty")
        yield Desk(info.id, runtime, await OpenCode().start(runtime, setup_of(given)))
    await agency.destroy(info.id)


async def test_what_is_two_and_two(desk: Desk, model: Model) -> None:
    model.when("2+2", say("It is 4"))
    events = await desk.ask("What is 2+2?")
    assert kinds(events)[0] == "step_start"
    assert [event.content for event in events if event.type == "token"][-1] == "It is 4"
    assert events[-1].success
    (finish,) = [event for event in events if event.type == "step_finish"]
    assert (finish.tokens.input, finish.tokens.output) == (11, 7)
    assert {event.message_id for event in events} == {f"prompt-{next(_numbers) - 1}"}


async def test_it_writes_files_and_runs_commands_with_its_own_tools(desk: Desk, model: Model) -> None:
    path = f"{desk.opencode.directory}/made.txt"
    model.when(
        "make it",
        call("write", filePath=path, content="by hand\n"),
        call("bash", command="cat made.txt; exit 3", description="Show it"),
        say("Done."),
    )
    events = await desk.ask("Please make it.")
    calls = [(event.tool, event.status) for event in events if event.type == "tool_call"]
    assert calls == [
        *[("write", status) for status in ("pending", "running", "completed")],
        *[("bash", status) for status in ("pending", "running", "completed")],
    ]
    ran = [event for event in events if event.type == "tool_call"][-1]
    assert ran.args["command"] == "cat made.txt; exit 3"
    assert "by hand" in ran.output
    assert (await desk.runtime.files.read(path)).content == "by hand\n"
    assert events[-1].success


async def test_a_session_goes_on_where_it_was(desk: Desk, model: Model) -> None:
    session = await desk.opencode.create_session()
    model.when("again", say("the second answer"))
    await desk.ask("the first question", session)
    events = await desk.ask("and again", session)
    assert events[-1].success
    said = [message["content"] for message in model.asked[-1].body["messages"] if message["role"] == "assistant"]
    assert said == ["ok"], "the model is shown what was said before"


async def test_a_prompt_may_name_its_model(desk: Desk, model: Model) -> None:
    await desk.ask("who are you?", model="scripted/scripted-2")
    assert model.wait_until_asked("who are you?").body["model"] == "scripted-2"


async def test_a_model_that_does_not_exist_is_an_error_that_ends_the_turn(desk: Desk) -> None:
    events = await desk.ask("who are you?", model="scripted/nobody")
    assert kinds(events) == ["error", "execution_complete"]
    assert "nobody" in events[-1].error


async def test_what_is_stopped_says_so_and_the_session_can_be_used_again(desk: Desk, model: Model) -> None:
    model.when("take your time", say("one two three four five six seven eight nine ten", pause=0.5))
    session = await desk.opencode.create_session()
    seen = []
    async for event in desk.opencode.prompt(session, prompt("take your time")):
        seen.append(event)
        if event.type == "token" and "two" in event.content:
            await desk.opencode.abort(session)
    assert (seen[-1].success, seen[-1].code) == (False, "aborted")
    assert kinds(seen).count("execution_complete") == 1
    assert (await desk.ask("still there?", session))[-1].success


async def test_a_model_that_never_answers_can_be_stopped(desk: Desk, model: Model) -> None:
    model.when("hang", hang())
    session = await desk.opencode.create_session()
    asked = asyncio.create_task(desk.ask("hang", session))
    await asyncio.to_thread(model.wait_until_asked, "hang")
    await desk.opencode.abort(session)
    events = await asked
    assert events[-1].code == "aborted"


async def test_a_key_that_is_refused_is_said_to_be(desk: Desk, model: Model) -> None:
    model.when("let me in", fail(401))
    events = await desk.ask("let me in")
    assert kinds(events) == ["error", "execution_complete"]
    assert (events[-1].success, events[-1].code) == (False, "model_denied")
    assert "The key is not known here" in events[-1].error


async def test_a_model_with_a_bad_day_is_asked_again(desk: Desk, model: Model) -> None:
    model.when("unlucky", fail(500, times=1, then=say("better now")))
    events = await desk.ask("unlucky")
    assert [(event.attempt, event.message) for event in events if event.type == "retry"] == [
        (1, "The model has a bad day.")
    ]
    assert [event.content for event in events if event.type == "token"][-1] == "better now"
    assert events[-1].success


async def test_a_model_that_takes_too_long_has_failed(desk: Desk, model: Model) -> None:
    model.when("hang", hang())
    model.when("slowly", say("one two three four five six seven eight nine ten", pause=0.3))
    for text in ("hang", "slowly"):
        events = await desk.ask(text, model="hasty/scripted-1")
        assert (events[-1].success, events[-1].code) == (False, "model_failed")
        assert "timed out" in events[-1].error


async def test_a_network_that_is_lost_is_said_to_be_and_may_come_back(
    desk: Desk, model: Model, agency: Registry
) -> None:
    model.when("far away", say("one two three four five six seven eight nine ten", pause=0.2))
    session = await desk.opencode.create_session()
    events = []
    async for event in desk.opencode.prompt(session, prompt("far away")):
        events.append(event)
        if event.type == "token" and event.content == "one two":
            await agency.set_egress(desk.sandbox, SetEgress(mode="none"))
    assert (events[-1].success, events[-1].code) == (False, "model_unreachable")
    assert "This sandbox has no network" in events[-1].error
    assert next(event.content for event in events if event.type == "token") == "one", "nothing is lost"
    await agency.set_egress(desk.sandbox, SetEgress(mode="allowlist", allow=[f"{HOST}:{model.port}"]))
    assert (await desk.ask("back again?", session))[-1].success


async def test_a_model_that_fails_for_ever_is_given_up_and_opencode_with_it(
    desk: Desk, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skerry.agents.opencode.turn.MOST_RETRIES", 1)
    model.when("hopeless", fail(500))
    session = await desk.opencode.create_session()
    events = await desk.ask("hopeless", session)
    assert (events[-1].success, events[-1].code) == (False, "model_failed")
    assert "The model has a bad day." in events[-1].error
    assert (await desk.ask("and now?", session))[-1].success, "it does not go on with the one before"


async def test_it_waits_for_leave_where_it_needs_it(desk: Desk, model: Model) -> None:
    model.when("clean up", call("bash", command="rm -f made.txt", description="Clean up"), say("cleaned"))
    session = await desk.opencode.create_session()
    for reply, status in (("reject", "error"), ("once", "completed")):
        events = []
        async for event in desk.opencode.prompt(session, prompt("clean up")):
            events.append(event)
            if event.type == "permission":
                assert (event.tool, event.patterns) == ("bash", ["rm -f made.txt"])
                await desk.opencode.answer(event.id, reply)  # type: ignore[arg-type]
        assert [event.status for event in events if event.type == "tool_call"][-1] == status
        assert events[-1].type == "execution_complete"


async def test_leaving_early_lets_it_go_on_and_what_it_did_can_be_heard_later(desk: Desk, model: Model) -> None:
    model.when("slowly", say("a b c d e f", pause=0.1))
    session = await desk.opencode.create_session()
    asked = prompt("slowly")
    events = desk.opencode.prompt(session, asked)
    async for event in events:
        if event.type == "token":
            break
    await events.aclose()  # type: ignore[attr-defined]
    later = [event async for event in desk.opencode.resume(session, asked.message_id)]
    assert [event.content for event in later if event.type == "token"][-1] == "a b c d e f"
    assert later[-1].success


async def test_prompts_in_two_sessions_do_not_hear_each_other(desk: Desk, model: Model) -> None:
    model.when("left", say("l l l l l", pause=0.05))
    model.when("right", say("r r r r r", pause=0.05))
    left, right = await asyncio.gather(desk.ask("left"), desk.ask("right"))
    assert {event.content[0] for event in left if event.type == "token"} == {"l"}
    assert {event.content[0] for event in right if event.type == "token"} == {"r"}


async def test_a_session_that_is_not_there_is_an_error_of_its_own(desk: Desk) -> None:
    events = await desk.ask("hello?", session="ses_nobody")
    assert (events[-1].success, events[-1].code) == (False, "agent_session_not_found")


async def test_a_second_start_finds_the_first(desk: Desk, agency: Registry, scripted: Model) -> None:
    agent = OpenCode()
    agent._running[desk.runtime] = desk.opencode
    assert await agent.start(desk.runtime, opencode_setup(scripted)) is desk.opencode


async def test_the_key_arrives_at_the_model_and_was_never_inside(desk: Desk, model: Model) -> None:
    await desk.ask("who pays?")
    assert model.wait_until_asked("who pays?").headers["authorization"] == f"Bearer {KEY}"
    await nothing_inside(desk.runtime, KEY)
    with pytest.raises(AssertionError, match=r"in the (memory|environment)"):
        await nothing_inside(desk.runtime, PLACEHOLDER)


async def test_one_that_is_killed_ends_its_prompt_and_can_be_started_again(desk: Desk, model: Model) -> None:
    model.when("hang", hang())
    session = await desk.opencode.create_session("before")
    asked = asyncio.create_task(desk.ask("hang", session))
    await asyncio.to_thread(model.wait_until_asked, "hang")
    await desk.runtime.exec(ExecRequest(command="pkill -KILL opencode"))
    events = await asked
    assert kinds(events)[-2:] == ["error", "execution_complete"]
    assert (events[-1].success, events[-1].code) == (False, "agent_died")
    agent = OpenCode()
    again = await agent.start(desk.runtime, opencode_setup(model))
    events = [event async for event in again.prompt(session, prompt("and now?"))]
    assert events[-1].success, "sessions are kept in files"
    await again.stop()
    assert not again.alive


async def test_one_that_is_ended_while_it_starts_says_by_what(agency: Registry, model: Model) -> None:
    info = await agency.create(sandbox_request(model))
    async with agency.use(info.id) as runtime:
        starting = asyncio.ensure_future(OpenCode().start(runtime, opencode_setup(model)))
        until = "until pkill -KILL opencode; do sleep 0.02; done"
        await runtime.exec(ExecRequest(command=until, session=None, timeout=20_000))
        with pytest.raises(AgentUnreadyError, match="SIGKILL"):
            await starting
    await agency.destroy(info.id)
