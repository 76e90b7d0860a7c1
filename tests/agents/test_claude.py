"""The real Claude Code in a sandbox, driven by a scripted model that speaks Anthropic's way."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import pytest
import pytest_asyncio

from skerry.agents.claude import speech
from skerry.agents.claude.agent import ClaudeCode, RunningClaudeCode
from skerry.agents.claude.turn import Turn
from skerry.agents.config import prepare
from skerry.agents.contract import Prompt
from skerry.control.registry import Registry
from skerry.models import ExecRequest, SetEgress
from skerry.runtime.runtime import Runtime
from tests.agents.conftest import HOST, KEY, sandbox_request
from tests.agents.model import Model, call, fail, hang, say
from tests.agents.search import nothing_inside

_numbers = itertools.count(1)


@dataclass
class Desk:
    sandbox: str
    runtime: Runtime
    claude: RunningClaudeCode

    async def ask(self, text: str, session: str | None = None, **more: Any) -> list[Any]:
        session = session or await self.claude.create_session()
        return [event async for event in self.claude.prompt(session, prompt(text, **more))]


def prompt(text: str, **more: Any) -> Prompt:
    return Prompt(text, f"prompt-{next(_numbers)}", **more)


def kinds(events: list[Any]) -> list[str]:
    return [event.type for event in events]


@pytest_asyncio.fixture(scope="module")
async def desk(agency: Registry, scripted: Model) -> AsyncIterator[Desk]:
    options = {"apiKey": KEY, "baseUrl": f"{scripted.url}/v1"}
    wanted = prepare("claude-code", {"provider": {"anthropic": {"options": options}}, "agents_md": "Always be kind."})
    assert list(wanted.secrets) == [f"{HOST}:{scripted.port}"]
    secrets = {host: secret.model_dump(mode="json") for host, secret in wanted.secrets.items()}
    info = await agency.create(sandbox_request(scripted, "claude-code", secrets=secrets))
    async with agency.use(info.id) as runtime:
        yield Desk(info.id, runtime, await ClaudeCode().start(runtime, wanted.setup))
    await agency.destroy(info.id)


async def test_what_is_two_and_two(desk: Desk, model: Model) -> None:
    model.when("2+2", say("It is 4"))
    session = await desk.claude.create_session()
    events = await desk.ask("What is 2+2?", session)
    assert kinds(events)[0] == "step_start"
    assert [event.content for event in events if event.type == "token"][-1] == "It is 4"
    assert (kinds(events)[-2:], events[-1].success) == (["step_finish", "execution_complete"], True)
    assert (events[-2].tokens.input, events[-2].tokens.output) == (11, 7)
    assert "Always be kind." in str(model.wait_until_asked("2+2").body)
    more = await desk.ask("and again: 2+2?", session)
    assert more[-1].success
    assert "It is 4" in str(model.asked[-1].body["messages"]), "the model is shown what was said before"
    assert more[-2].cost < 2 * events[-2].cost, "what a session has cost before is not counted again"


async def test_what_it_is_told_beside_a_prompt_may_be_long(desk: Desk, model: Model) -> None:
    told = "Speak in verse. " * 20_000
    events = await desk.ask("a poem", system=told)
    assert events[-1].success, events[-1]
    assert told.strip() in str(model.wait_until_asked("a poem").body["system"])


async def test_it_writes_files_and_runs_commands_with_its_own_tools(desk: Desk, model: Model) -> None:
    path = "/home/user/workspace/made.txt"
    model.when(
        "make it",
        call("Write", file_path=path, content="by hand\n"),
        call("Bash", command="cat made.txt; exit 3", description="Show it"),
        say("Done."),
    )
    events = await desk.ask("Please make it.")
    calls = [(event.tool, event.status) for event in events if event.type == "tool_call"]
    assert calls == [("Write", "running"), ("Write", "completed"), ("Bash", "running"), ("Bash", "completed")]
    assert "by hand" in [event for event in events if event.type == "tool_call"][-1].output
    assert (await desk.runtime.files.read(path)).content == "by hand\n"
    assert [event.content for event in events if event.type == "token"][-1] == "Done."


async def test_what_is_stopped_says_so_and_the_session_can_be_used_again(desk: Desk, model: Model) -> None:
    model.when("take your time", say("one two three four five six seven eight nine ten", pause=0.5))
    session = await desk.claude.create_session()
    seen = []
    async for event in desk.claude.prompt(session, prompt("take your time")):
        seen.append(event)
        if event.type == "token" and "two" in event.content:
            await desk.claude.abort(session)
    assert (seen[-1].success, seen[-1].code) == (False, "aborted")
    assert (await desk.ask("still there?", session))[-1].success


async def test_a_model_that_never_answers_can_be_stopped(desk: Desk, model: Model) -> None:
    model.when("silence", hang())
    session = await desk.claude.create_session()
    asked = asyncio.create_task(desk.ask("silence", session))
    await asyncio.to_thread(model.wait_until_asked, "silence")
    await desk.claude.abort(session)
    events = await asked
    assert (events[-1].success, events[-1].code) == (False, "aborted")
    assert "token" not in kinds(events), "Claude Code's own words are no answer"


async def test_one_that_is_through_ends_also_where_nobody_hears_it_out(desk: Desk, model: Model) -> None:
    model.when("slowly", say("a b c d e f", pause=0.2))
    session = await desk.claude.create_session()
    for text, last in (("hello", "execution_complete"), ("slowly", "token")):
        async with aclosing(desk.claude.prompt(session, prompt(text))) as events:
            async for event in events:
                if event.type == last:
                    break
    assert await _running(desk) == 1, "the second goes on"
    await desk.claude.abort(session)
    assert await _running(desk) == 0
    assert (await desk.ask("still there?", session))[-1].success


async def _running(desk: Desk) -> int:
    done = await desk.runtime.exec(ExecRequest(command="pgrep -c -f bin/claude", session=None))
    return int(done.stdout)


async def test_a_network_that_is_lost_is_said_to_be_and_may_come_back(
    desk: Desk, model: Model, agency: Registry
) -> None:
    model.when("far away", say("one two three four five six seven eight nine ten", pause=0.2))
    session = await desk.claude.create_session()
    events = []
    async for event in desk.claude.prompt(session, prompt("far away")):
        events.append(event)
        if event.type == "token" and event.content == "one two":
            await agency.set_egress(desk.sandbox, SetEgress(mode="none"))
    assert (events[-1].success, events[-1].code) == (False, "model_unreachable")
    assert "This sandbox has no network" in events[-1].error
    assert next(event.content for event in events if event.type == "token") == "one", "nothing is lost"
    await agency.set_egress(desk.sandbox, SetEgress(mode="allowlist", allow=[f"{HOST}:{model.port}"]))
    assert (await desk.ask("back again?", session))[-1].success


PICTURE = {"type": "base64", "media_type": "image/png", "data": "aGk="}


@pytest.mark.parametrize(
    ("attached", "block"),
    [
        ({"name": "n.txt", "content": "hi"}, {"type": "text", "text": "The file n.txt:\n\nhi"}),
        ({"name": "n", "url": "data:,a%20b"}, {"type": "text", "text": "The file n:\n\na b"}),
        (
            {"name": "n", "url": "data:text/plain;charset=utf-8;base64,aGk="},
            {"type": "text", "text": "The file n:\n\nhi"},
        ),
        ({"name": "a.png", "content": "aGk=", "encoding": "base64"}, {"type": "image", "source": PICTURE}),
        (
            {"type": "file", "mime": "image/png", "url": "data:image/png;base64,aGk="},
            {"type": "image", "source": PICTURE},
        ),
        (
            {"name": "a.pdf", "url": "https://example.com/a.pdf"},
            {"type": "document", "source": {"type": "url", "url": "https://example.com/a.pdf"}},
        ),
        ({"name": "n.txt", "url": "https://x/n.txt"}, {"type": "text", "text": "The file n.txt is at https://x/n.txt"}),
        ({"name": "a.png", "url": "file:///a.png"}, {"type": "text", "text": "The file a.png is at file:///a.png"}),
        ({"type": "text", "text": "hi", "synthetic": True}, {"type": "text", "text": "hi"}),
    ],
)
def test_what_is_attached_is_what_the_models_api_takes(attached: dict[str, Any], block: dict[str, Any]) -> None:
    assert speech.prompt("x", [attached])["message"]["content"] == [{"type": "text", "text": "x"}, block]


@pytest.mark.parametrize(
    ("result", "code", "words"),
    [
        ({"result": "API Error: 500 The model has a bad day."}, "model_failed", "The model failed: The model has"),
        ({"result": "API Error: Connection error.", "terminal_reason": "api_error"}, "model_failed", "Connection"),
        ({"result": "Failed to authenticate. API Error: 403 No."}, "model_denied", "refused the key: No."),
        ({"result": "API Error: 403 x:1 is not on this sandbox's allow-list."}, "model_unreachable", "Allow its host"),
        ({"subtype": "error_max_turns", "errors": ["too many"]}, "agent_failed", "too many"),
        ({"subtype": "error_during_execution", "terminal_reason": "aborted_streaming"}, "aborted", "stopped"),
    ],
)
def test_how_it_ended_is_told_from_its_last_words(result: dict[str, Any], code: str, words: str) -> None:
    *_, last = Turn("prompt-1").feed({"type": "result", "is_error": True, **result})
    assert (last["type"], last["code"]) == ("execution_complete", code)
    assert words in last["error"]


async def test_a_key_that_is_refused_ends_it_at_once(desk: Desk, model: Model) -> None:
    model.when("let me in", fail(401))
    events = await desk.ask("let me in")
    assert (events[-1].success, events[-1].code) == (False, "model_denied")


async def test_a_model_with_a_bad_day_is_asked_again(desk: Desk, model: Model) -> None:
    model.when("unlucky", fail(500, times=1, then=say("better now")))
    events = await desk.ask("unlucky")
    assert [event.attempt for event in events if event.type == "retry"] == [1]
    assert [event.content for event in events if event.type == "token"][-1] == "better now"


async def test_it_waits_for_leave_where_it_is_to_ask(desk: Desk, model: Model) -> None:
    model.when("clean up", call("Bash", command="rm -f made.txt", description="Clean up"), say("cleaned"))
    model.when("put it", call("Write", file_path="/home/user/workspace/x", content="x"), say("put"))
    model.when("make a directory", call("Bash", command="mkdir -p made", description="Make it"), say("made"))
    rules = {"bash": {"*": "allow", "rm *": "ask"}, "edit": "deny"}
    wanted = prepare("claude-code", {"permission": rules}).setup
    setup = replace(desk.claude._setup, files={**desk.claude._setup.files, **wanted.files}, asks=wanted.asks)
    asking = await ClaudeCode().start(desk.runtime, setup)
    session = await asking.create_session()
    for text, status in (("make a directory", "completed"), ("put it", "error")):
        events = [event async for event in asking.prompt(session, prompt(text))]
        assert "permission" not in kinds(events)
        assert [event.status for event in events if event.type == "tool_call"][-1] == status
    for reply, status in (("reject", "error"), ("once", "completed")):
        events = []
        async for event in asking.prompt(session, prompt("clean up")):
            events.append(event)
            if event.type == "permission":
                assert (event.tool, event.patterns) == ("Bash", ["rm -f made.txt"])
                await asking.answer(event.id, reply)  # type: ignore[arg-type]
        assert [event.status for event in events if event.type == "tool_call"][-1] == status


async def test_one_that_is_killed_ends_its_prompt(desk: Desk, model: Model) -> None:
    model.when("hang", hang())
    asked = asyncio.create_task(desk.ask("hang"))
    await asyncio.to_thread(model.wait_until_asked, "hang")
    await nothing_inside(desk.runtime, KEY)
    await desk.runtime.exec(ExecRequest(command="pkill -KILL claude"))
    events = await asked
    assert (events[-1].success, events[-1].code) == (False, "agent_died")
    assert model.wait_until_asked("hang").headers["x-api-key"] == KEY
