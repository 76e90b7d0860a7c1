"""Sessions with the real OpenCode and the real Claude Code, driven by a model with a script."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from skerry.agents.sessions.programs import command
from tests.agents.conftest import HOST, KEY
from tests.agents.model import Model, call, fail, hang, say
from tests.agents.search import nothing_inside
from tests.agents.sessions.conftest import Desk, desk_of
from tests.agents.sessions.kinds import KINDS, Kind
from tests.agents.test_config import SERVER, TOOL


@pytest.fixture(scope="module")
async def desk() -> AsyncIterator[Desk]:
    home = Path(tempfile.mkdtemp(prefix="skerry-sessions-"))
    os.chmod(home, 0o711)
    async with desk_of(home, agent=command) as desk:
        yield desk
    shutil.rmtree(home)


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
async def session(desk: Desk, scripted: Model, kind: Kind) -> str:
    return await desk.session(
        agent=kind.name,
        config=kind.config(scripted),
        egress={"mode": "allowlist", "allow": [f"{HOST}:{scripted.port}"]},
    )


async def test_what_is_two_and_two(desk: Desk, session: str, model: Model, kind: Kind) -> None:
    model.when("2+2", say("It is 4"))
    message = await desk.ask(session, "What is 2+2?")
    assert message["status"] == "completed", message
    events = await desk.events(session, messageId=message["id"])
    assert [event["type"] for event in events] == ["step_start", "token", "step_finish", "execution_complete"]
    assert events[1]["data"]["content"] == "It is 4"
    assert (await desk.info(session))["agent"] == kind.name
    sandbox = desk.live(session).row.sandbox_id
    assert sandbox is not None
    async with desk.registry.use(sandbox) as runtime:
        await nothing_inside(runtime, KEY)


async def test_a_prompt_has_a_model_and_attachments_of_its_own(
    desk: Desk, session: str, model: Model, kind: Kind
) -> None:
    model.when("read it", say("I have"))
    more = {
        "model": kind.other_model,
        "attachments": [
            {"name": "notes.txt", "content": "the word is xyzzy"},
            {"name": "more.md", "content": "YW5kIHBsdWdo", "encoding": "base64"},
        ],
    }
    answer = await desk.http.post(f"/sessions/{session}/prompt", json={"content": "read it", **more})
    assert (await desk.done(session, answer.json()["messageId"]))["status"] == "completed"
    asked = next(asked for asked in model.asked if asked.tools and "read it" in str(asked.body["messages"][-1]))
    other = kind.other_model.partition("/")[2]
    assert asked.body["model"] == other
    assert all(words in str(asked.body["messages"][-1]) for words in ("the word is xyzzy", "and plugh"))
    model.when("and now", say("the first again"))
    await desk.ask(session, "and now")
    assert model.wait_until_asked("and now").body["model"] != other


async def test_three_prompts_one_after_the_other(desk: Desk, session: str, model: Model, kind: Kind) -> None:
    for number in range(3):
        append = call(kind.shell, command=f"echo {number} >> order", description="x")
        model.when(f"number {number}", append, say(f"did {number}"))
    sent = [await desk.prompt(session, f"number {number}") for number in range(3)]
    for id in sent:
        assert (await desk.done(session, id))["status"] == "completed"
    assert (await desk.inside(session, "cat /workspace/order")).split() == ["0", "1", "2"]


async def test_what_its_commands_leave_behind_is_no_zombie(desk: Desk, session: str, model: Model, kind: Kind) -> None:
    model.when("leave it", call(kind.shell, command="(sleep 0.2 >/dev/null 2>&1 &)", description="x"), say("left"))
    assert (await desk.ask(session, "leave it"))["status"] == "completed"

    async def gone() -> bool:
        return not await desk.inside(session, "pgrep -x sleep; true")

    await desk.until(gone, 20)


async def test_what_it_asks_is_answered(desk: Desk, session: str, model: Model, kind: Kind) -> None:
    for number, reply in enumerate(("once", "reject")):
        await desk.inside(session, "touch /workspace/rubbish")
        model.when(f"tidy {number}", call(kind.shell, command="rm /workspace/rubbish", description="x"), say("tidied"))
        message = await desk.prompt(session, f"tidy {number}")
        asked = (await desk.event(session, "permission", messageId=message))["data"]
        assert (asked["tool"], asked["patterns"]) == (kind.shell, ["rm /workspace/rubbish"])
        place = f"/sessions/{session}/permissions"
        unknown = await desk.http.post(f"{place}/per_nothing", json={"reply": reply})
        assert unknown.json()["error"]["code"] == "question_not_found"
        assert (await desk.http.post(f"{place}/{asked['permissionId']}", json={"reply": reply})).status_code == 200
        await desk.done(session, message)
        left = await desk.inside(session, "ls /workspace/rubbish 2>/dev/null; true")
        assert bool(left) is (reply == "reject")


async def test_stop(desk: Desk, session: str, model: Model) -> None:
    model.when("wait", hang())
    message = await desk.prompt(session, "wait for ever")
    await desk.until(lambda: _asked(model, "wait"))
    await desk.http.post(f"/sessions/{session}/stop")
    assert (await desk.done(session, message))["status"] == "failed"
    ended = await desk.event(session, "execution_complete", messageId=message)
    assert ended["data"]["code"] == "aborted"
    model.when("after that", say("there"))
    assert (await desk.ask(session, "after that"))["status"] == "completed"


async def _asked(model: Model, words: str) -> bool:
    return any(asked.tools and words in asked.prompt for asked in list(model.asked))


async def test_a_model_that_fails_is_asked_again_and_one_that_refuses_the_key_is_not(
    desk: Desk, session: str, model: Model
) -> None:
    model.when("unlucky", fail(500, times=1, then=say("better now")))
    lucky = await desk.ask(session, "unlucky")
    assert lucky["status"] == "completed", lucky
    assert await desk.events(session, messageId=lucky["id"], type="retry")
    model.when("let me in", fail(401))
    refused = await desk.ask(session, "let me in")
    ended = await desk.event(session, "execution_complete", messageId=refused["id"])
    assert (refused["status"], ended["data"]["code"]) == ("failed", "model_denied")


async def test_a_killed_bridge(desk: Desk, session: str, model: Model, kind: Kind) -> None:
    words = " ".join(f"w{number}" for number in range(30))
    model.when("count", call(kind.shell, command="echo one", description="x"), say(words, pause=0.1))
    message = await desk.prompt(session, "please count")
    await desk.event(session, "token", messageId=message)
    await desk.kill(session, "session/bridge.py")
    assert (await desk.done(session, message))["status"] == "completed"
    events = await desk.events(session, messageId=message)
    types = [event["type"] for event in events]
    assert (types.count("execution_complete"), types.count("step_finish")) == (1, kind.finishes)
    calls = [(event["data"]["callId"], event["data"]["status"]) for event in events if event["type"] == "tool_call"]
    assert len(calls) == len(set(calls)) == kind.states
    assert [event["data"]["content"] for event in events if event["type"] == "token"][-1] == words


async def test_a_killed_agent(desk: Desk, session: str, model: Model, kind: Kind) -> None:
    for number, program in enumerate(kind.programs):
        model.when(f"die {number}", call(kind.shell, command="echo one", description="x"), hang())
        message = await desk.prompt(session, f"die {number}")

        async def answered(message: str = message) -> bool:
            told = await desk.events(session, type="tool_call", messageId=message)
            return any(event["data"]["status"] == "completed" for event in told)

        await desk.until(answered)
        await desk.kill(session, program)
        assert (await desk.done(session, message))["status"] == "failed"
        events = await desk.events(session, messageId=message)
        assert events[-1]["data"]["code"] == "agent_died"
        calls = [event["data"]["status"] for event in events if event["type"] == "tool_call"]
        assert len(calls) == kind.states, "what it had done is told once"
        model.when("alive", say("yes"))
        assert (await desk.ask(session, "are you alive?"))["status"] == "completed"


async def test_restored_after_a_stop_it_knows_what_was_said(desk: Desk, session: str, model: Model) -> None:
    await desk.status(session, "ready")
    live = desk.live(session)
    live.row.active_at = (live.row.active_at or 0) - 601
    await desk.status(session, "stopped")
    model.when("remember", say("I do"))
    assert (await desk.ask(session, "do you remember?"))["status"] == "completed"
    assert (await desk.inside(session, "cat /workspace/order")).split() == ["0", "1", "2"]
    assert any("2+2" in str(asked.body["messages"]) for asked in model.asked)


async def test_it_has_what_it_was_configured_with(desk: Desk, model: Model, kind: Kind) -> None:
    given = kind.config(model) | {"agents_md": "Always be kind."}
    given["mcp"] = {"times": {"type": "local", "command": ["python3", "-c", SERVER], "enabled": True}}
    calls = [call(kind.served.format(server="times", tool="multiply"), a=6, b=7)]
    if kind.name == "opencode":  # the other has no tools of this kind
        given["files"] = [{"type": "tool", "name": "adder", "extension": "ts", "content": TOOL}]
        calls.append(call("adder", a=2, b=3))
    model.when("count", *calls, say("counted"))
    reach = {"mode": "allowlist", "allow": [f"{HOST}:{model.port}"]}
    session = await desk.session(agent=kind.name, config=given, egress=reach)
    message = await desk.ask(session, "count")
    assert message["status"] == "completed", message
    told = [event["data"] for event in await desk.events(session, type="tool_call")]
    assert [each["output"] for each in told if each["status"] == "completed"] == ["forty-two", "5"][: len(calls)]
    assert "Always be kind." in str(model.wait_until_asked("count").body)
    await desk.http.delete(f"/sessions/{session}")


async def test_a_claude_code_that_was_ended_before_it_had_begun_does_not_spoil_the_session(
    desk: Desk, model: Model
) -> None:
    claude = KINDS[1]
    reach = {"mode": "allowlist", "allow": [f"{HOST}:{model.port}"]}
    session = await desk.session(agent=claude.name, config=claude.config(model), egress=reach)
    assert (await desk.ask(session, "hello"))["status"] == "completed"
    transcript = "$(ls ~/.claude/projects/*/$(cat /tmp/opencode-session-id).jsonl)"
    await desk.inside(session, f"f={transcript}; grep -v user $f | head -n 2 > /tmp/kept; cat /tmp/kept > $f")
    for content in ("hello again", "and again"):
        message = await desk.ask(session, content)
        assert message["status"] == "completed", message
    assert "hello again" in str(model.asked[-1].body["messages"]), "it remembers what came after"
    await desk.http.delete(f"/sessions/{session}")
