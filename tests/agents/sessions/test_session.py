"""Sessions from outside: what people send, what the sandbox does about it, and what they see of it."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from datetime import datetime
from itertools import pairwise
from typing import Any

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from skerry import AsyncClient
from skerry.control.session_rows import EventRow
from skerry.errors import StoreError
from skerry.server.inward import MOST_CONNECTIONS
from tests.agents.sessions.conftest import SLOW, Desk


@pytest.fixture(scope="module")
async def session(desk: Desk) -> str:
    """One that several tests use, whose sandbox is there."""
    id = await desk.session(title="shared")
    await desk.ask(id, "say hello")
    return id


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"] for event in events]


async def test_a_prompt_starts_a_sandbox_and_is_answered(desk: Desk) -> None:
    id = await desk.session(title="sums", model="fake/fake-1")
    message = await desk.ask(id, "say let me see; tool looked; say the answer is 4")
    assert message["status"] == "completed"
    events = await desk.events(id, messageId=message["id"])
    assert kinds(events) == [
        *("step_start", "token", "tool_call", "tool_call", "step_finish"),
        *("step_start", "token", "step_finish", "execution_complete"),
    ]
    assert [event["data"]["content"] for event in events if event["type"] == "token"] == [
        "let me see",
        "the answer is 4",
    ]
    calls = [event["data"] for event in events if event["type"] == "tool_call"]
    assert [call["status"] for call in calls] == ["running", "completed"]
    assert calls[1]["output"] == "looked"
    assert events[-1]["data"]["success"] is True
    info = await desk.info(id)
    assert (info["status"], info["title"], info["processing"]) == ("active", "sums", False)
    history = (await desk.http.get(f"/v1/sandboxes/{info['sandboxId']}/events")).json()["events"]
    about = {each["kind"]: each["details"] for each in history if each["kind"].startswith("session_")}
    assert about["session_created"]["agentSession"].startswith("ses_")
    assert about["session_message"] == {"session": id, "message": message["id"], "status": "completed"}
    await desk.http.delete(f"/sessions/{id}")


@pytest.mark.parametrize(("first", "last"), [("done with all", "done"), ("done", "done with all"), ("done", "done")])
async def test_texts_that_begin_alike_are_all_kept(desk: Desk, session: str, first: str, last: str) -> None:
    message = await desk.ask(session, f"say {first}; tool x; say {last}")
    events = await desk.events(session, messageId=message["id"])
    assert [event["data"]["content"] for event in events if event["type"] == "token"] == [first, last]
    assert kinds(events)[-3:] == ["token", "step_finish", "execution_complete"]


async def test_the_supervisor_finds_in_its_environment_what_it_has_to_know(desk: Desk, session: str) -> None:
    line = "tr '\\0' '\\n' < /proc/$(pgrep -f session/supervisor.py | head -1)/environ"
    found = dict(each.split("=", 1) for each in (await desk.inside(session, line)).splitlines() if "=" in each)
    assert (found["SESSION_ID"], found["SANDBOX_ID"]) == (session, desk.live(session).row.sandbox_id)
    assert found["CONTROL_PLANE_URL"] == "http://127.0.0.1:42042"
    assert (found["RESTORED_FROM_SNAPSHOT"], found["SANDBOX_SLEEP_AFTER"]) == ("false", "1h")
    assert found["SANDBOX_INACTIVITY_TIMEOUT_MS"] == "600000"
    assert {"REPO_OWNER", "REPO_NAME", "SANDBOX_AUTH_TOKEN", "SESSION_CONFIG"} <= set(found)
    assert not {"GITHUB_APP_TOKEN", "ANTHROPIC_API_KEY"} & set(found)


async def test_an_agent_can_commit_also_where_nobody_has_said_in_whose_name(desk: Desk, session: str) -> None:
    line = "cd $(mktemp -d) && git init -q && git commit -q --allow-empty -m x && git log -1 --format='%an <%ae>'"
    assert await desk.inside(session, line) == "Skerry <agent@skerry.invalid>\n"


async def test_a_sandbox_says_what_it_is_at_until_it_is_ready(desk: Desk) -> None:
    id = await desk.session(title=SLOW)
    async with desk.watch(id) as watcher:
        await watcher.next("subscribed")
        await watcher.say(type="prompt", content="say hello")
        await watcher.next("snapshot_saved")
    told = [each["status"] for each in watcher.seen if each["type"] == "sandbox_status"]
    assert told[:5] == ["spawning", "connecting", "warming", "ready", "running"]
    await desk.http.delete(f"/sessions/{id}")


async def test_prompts_are_worked_at_strictly_one_at_a_time(desk: Desk, session: str) -> None:
    sent = [await desk.prompt(session, f"slow 0.1 one two {number}; tool x") for number in range(3)]
    for id in sent:
        assert (await desk.done(session, id))["status"] == "completed"
    messages = await desk.messages(session)
    for before, after in pairwise(sent):
        ended, began = messages[before]["completedAt"], messages[after]["startedAt"]
        assert datetime.fromisoformat(ended) <= datetime.fromisoformat(began)
    order = [event["messageId"] for event in await desk.events(session) if event["messageId"] in sent]
    assert [id for id, before in zip(order, [None, *order], strict=False) if id != before] == sent


async def test_the_place_in_the_queue_is_told(desk: Desk, session: str) -> None:
    answers = [
        (await desk.http.post(f"/sessions/{session}/prompt", json={"content": "slow 0.2 a b"})).json() for _ in range(3)
    ]
    assert [answer["position"] for answer in answers] == [1, 2, 3]
    await desk.done(session, answers[-1]["messageId"])


async def test_any_number_of_people_ask_at_the_same_time(desk: Desk, session: str) -> None:
    async with AsyncClient(desk.url) as one, AsyncClient(desk.url) as other:

        async def ask(number: int) -> list[Any]:
            client = other if number == 0 else one
            async with client.coding_session(session).ask(f"say number {number}") as news:
                return [each.event async for each in news if each.event is not None]

        told = await asyncio.gather(*map(ask, range(10)))
    for number, events in enumerate(told):
        assert [each.data["content"] for each in events if each.type == "token"][-1] == f"number {number}"
        assert events[-1].type == "execution_complete"


async def test_a_stopped_prompt_fails_and_the_next_one_is_worked_at(desk: Desk, session: str) -> None:
    first = await desk.prompt(session, "say working; hang")
    second = await desk.prompt(session, "say next")
    await desk.event(session, "token", messageId=first)
    assert (await desk.http.post(f"/sessions/{session}/stop")).status_code == 200
    stopped = await desk.done(session, first)
    assert stopped["status"] == "failed"
    assert "stopped" in stopped["error"]
    assert (await desk.done(session, second))["status"] == "completed"
    ended = await desk.event(session, "execution_complete", messageId=first)
    assert ended["data"]["code"] == "aborted"


async def test_a_prompt_that_waits_for_its_sandbox_is_stopped_as_well(desk: Desk) -> None:
    id = await desk.session()
    first, second = await desk.prompt(id, "say never"), await desk.prompt(id, "say next")
    assert (await desk.http.post(f"/sessions/{id}/stop")).status_code == 200
    stopped = (await desk.messages(id))[first]
    assert (stopped["status"], stopped["error"]) == ("failed", "It was stopped.")
    assert (await desk.done(id, second))["status"] == "completed"
    assert kinds(await desk.events(id, messageId=first)) == ["execution_complete"]
    assert (await desk.event(id, "execution_complete", messageId=first))["data"]["code"] == "aborted"
    await desk.http.delete(f"/sessions/{id}")


async def test_a_prompt_that_waits_for_a_snapshot_is_stopped_as_well(desk: Desk, session: str) -> None:
    live = desk.live(session)
    keep, asked, free = live._berth.keeping.keep, asyncio.Event(), asyncio.Event()

    async def slowly(reason: str) -> bool:
        asked.set()
        await free.wait()
        return await keep(reason)

    live._berth.keeping.keep = slowly  # type: ignore[method-assign]
    first, second, third = [await desk.prompt(session, f"say {word}") for word in ("one", "two", "three")]
    await asked.wait()
    assert (await desk.http.post(f"/sessions/{session}/stop")).status_code == 200
    live._berth.keeping.keep = keep  # type: ignore[method-assign]
    free.set()
    ended = [(await desk.done(session, each))["status"] for each in (first, second, third)]
    assert ended == ["completed", "failed", "completed"]
    assert (await desk.event(session, "execution_complete", messageId=second))["data"]["code"] == "aborted"


async def test_a_failure_of_the_model_is_that_prompts_failure(desk: Desk, session: str) -> None:
    message = await desk.ask(session, "fail out of credit")
    assert message["status"] == "failed"
    assert "out of credit" in message["error"]
    events = await desk.events(session, messageId=message["id"])
    assert kinds(events)[-2:] == ["error", "execution_complete"]


def whole(events: list[dict[str, Any]], words: int, tools: int) -> None:
    """Nothing is missing and nothing is there twice."""
    types = Counter(kinds(events))
    assert types["execution_complete"] == 1
    assert types["tool_call"] == 2 * tools
    calls = [(event["data"]["callId"], event["data"]["status"]) for event in events if event["type"] == "tool_call"]
    assert len(set(calls)) == len(calls)
    assert types["step_start"] == types["step_finish"] == tools + 1
    said = [event["data"]["content"] for event in events if event["type"] == "token"]
    assert said[-1].split() == [f"w{number}" for number in range(words)]


def script(words: int, tools: int, pause: float = 0.15) -> str:
    steps = [f"tool step{number}" for number in range(tools)]
    return "; ".join([*steps, f"slow {pause} " + " ".join(f"w{number}" for number in range(words))])


async def test_a_killed_bridge_loses_no_event(desk: Desk, session: str) -> None:
    message = await desk.prompt(session, script(20, 2))
    await desk.event(session, "token", messageId=message)
    await desk.kill(session, "session/bridge.py")
    assert (await desk.done(session, message))["status"] == "completed"
    whole(await desk.events(session, messageId=message), 20, 2)
    assert (await desk.info(session))["sandboxStatus"] in ("ready", "running", "snapshotting")


async def test_a_cut_connection_loses_no_event(desk: Desk, session: str) -> None:
    message = await desk.prompt(session, script(25, 3, 0.1))
    for _ in range(2):
        await desk.event(session, "tool_call", messageId=message)
        desk.cut()
        await asyncio.sleep(0.4)
    assert (await desk.done(session, message))["status"] == "completed"
    whole(await desk.events(session, messageId=message), 25, 3)


async def test_what_could_not_be_written_down_is_said_again(
    desk: Desk, session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = desk.live(session)._rows
    add, calls = rows.add_event, 0

    async def add_event(row: EventRow) -> EventRow | None:
        nonlocal calls
        calls += 1
        if calls in (2, 5, 9):
            raise StoreError("The disk is full.")
        return await add(row)

    monkeypatch.setattr(rows, "add_event", add_event)
    message = await desk.prompt(session, script(5, 3, 0.05))
    assert (await desk.done(session, message))["status"] == "completed"
    assert calls > 9
    whole(await desk.events(session, messageId=message), 5, 3)


async def test_a_killed_agent_fails_its_prompt_and_is_started_again(desk: Desk, session: str) -> None:
    message = await desk.prompt(session, "tool before; hang")
    await desk.event(session, "tool_call", messageId=message)
    await desk.kill(session, "An agent with a script")
    failed = await desk.done(session, message)
    assert failed["status"] == "failed"
    events = await desk.events(session, messageId=message)
    assert kinds(events).count("tool_call") == 2
    assert events[-1]["data"]["code"] == "agent_died"
    assert (await desk.ask(session, "say back again"))["status"] == "completed"
    warnings = await desk.events(session, type="warning")
    assert any(event["data"].get("code") == "agent_died" for event in warnings)


# -- what the agent asks -----------------------------------------------------------------------------------------------


async def question(desk: Desk, session: str, message: str) -> str:
    asked = await desk.event(session, "permission", messageId=message)
    assert (asked["data"]["tool"], asked["data"]["patterns"]) == ("bash", ["rm -r build"])
    return str(asked["data"]["permissionId"])


async def test_a_question_of_the_agents_is_answered_over_the_api(desk: Desk, session: str) -> None:
    message = await desk.prompt(session, "ask rm -r build; say done")
    id = await question(desk, session, message)
    place = f"/sessions/{session}/permissions"
    nothing = await desk.http.post(f"{place}/per_nothing", json={"reply": "once"})
    assert (nothing.status_code, nothing.json()["error"]["code"]) == (404, "question_not_found")
    assert (await desk.http.post(f"{place}/{id}", json={"reply": "perhaps"})).status_code == 400
    assert (await desk.http.post(f"{place}/{id}", json={"reply": "reject"})).status_code == 200
    assert (await desk.done(session, message))["status"] == "completed"
    answered = await desk.event(session, "permission_answered", messageId=message)
    assert answered["data"] == {
        **{"permissionId": id, "reply": "reject", "messageId": message},
        "author": "local client",
    }
    outputs = [event["data"].get("output") for event in await desk.events(session, type="tool_call", messageId=message)]
    assert outputs[-1] == "rm -r build: reject"
    late = await desk.http.post(f"{place}/{id}", json={"reply": "once"})
    assert (late.status_code, late.json()["error"]["code"]) == (404, "question_not_found")


async def test_a_question_of_the_agents_is_answered_over_the_websocket(desk: Desk, session: str) -> None:
    async with desk.watch(session) as watcher:
        await watcher.next("subscribed")
        await watcher.say(type="prompt", content="ask rm -r build; say done")
        while (event := (await watcher.next("sandbox_event"))["event"])["type"] != "permission":
            pass
        await watcher.say(type="answer", permissionId="per_nothing", reply="once")
        assert (await watcher.next("error"))["code"] == "question_not_found"
        await watcher.say(type="answer", permissionId=event["permissionId"], reply="always")
        while (event := (await watcher.next("sandbox_event"))["event"])["type"] != "permission_answered":
            pass
        assert event["reply"] == "always"
        while event["type"] != "execution_complete":
            event = (await watcher.next("sandbox_event"))["event"]
        assert event["success"]
    # On record as if it had been asked for by a request.
    entries = (await desk.http.get("/v1/audit", params={"actor": "session client", "limit": 3})).json()["entries"]
    assert [(each["operation"], each["code"], each["user"]) for each in entries] == [
        ("answer_session_permission", None, "local client"),
        ("answer_session_permission", "question_not_found", "local client"),
        ("prompt_session", None, "local client"),
    ]


async def test_a_question_is_not_lost_with_the_bridge_nor_asked_twice(desk: Desk, session: str) -> None:
    message = await desk.prompt(session, "slow 0.5 one two; ask rm -r build; say done")
    await desk.event(session, "token", messageId=message)
    first = await _bridge(desk, session)
    await desk.inside(session, f"kill -STOP {first}")
    await desk.until(lambda: _asks(desk, session))
    await desk.inside(session, f"kill -KILL {first}")
    id = await question(desk, session, message)
    second = await desk.until(lambda: _bridge(desk, session, but=first))
    await desk.inside(session, f"kill -KILL {second}")
    await desk.until(lambda: _answered(desk, session, id))
    assert (await desk.done(session, message))["status"] == "completed"
    assert len(await desk.events(session, type="permission", messageId=message)) == 1


async def _bridge(desk: Desk, session: str, but: str = "") -> str:
    found = (await desk.inside(session, "pgrep -f session/bridge.p[y]; true")).split()
    return next((pid for pid in found if pid != but), "")


async def _asks(desk: Desk, session: str) -> bool:
    return "rm -r build" in await desk.inside(session, "curl -s http://127.0.0.1:4096/permission")


async def _answered(desk: Desk, session: str, id: str) -> bool:
    """A bridge that is just being started again is waited for."""
    answer = await desk.http.post(f"/sessions/{session}/permissions/{id}", json={"reply": "once"})
    return answer.status_code == 200


# -- those who watch ---------------------------------------------------------------------------------------------------


async def test_who_subscribes_is_told_what_was_and_what_comes(desk: Desk, session: str) -> None:
    before = await desk.events(session)
    async with desk.watch(session) as watcher:
        hello = await watcher.next("subscribed")
        assert [event["number"] for event in hello["history"]["events"]] == [event["number"] for event in before][-500:]
        assert hello["state"]["id"] == session
        assert hello["history"]["messages"]
        await watcher.say(type="prompt", content="say good morning; tool x")
        queued = await watcher.next("prompt_queued")
        assert queued["position"] == 1
        told = []
        while not told or told[-1]["type"] != "execution_complete":
            told.append((await watcher.next("sandbox_event"))["event"])
        await watcher.next("snapshot_saved")
        assert {event["messageId"] for event in told} == {queued["messageId"]}
        kept = await desk.events(session, messageId=queued["messageId"])
        numbers = [event["number"] for event in told]
        assert numbers == sorted(set(numbers))
        assert {event["number"] for event in kept} <= set(numbers)
        statuses = [each["isProcessing"] for each in watcher.seen if each["type"] == "processing_status"]
        assert statuses == [True, False]


async def test_of_a_history_that_is_too_much_the_last_is_told(
    desk: Desk, session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = await desk.events(session)
    monkeypatch.setattr("skerry.agents.sessions.sessions.HISTORY_CHARACTERS", 2000)
    async with desk.watch(session) as watcher:
        history = (await watcher.next("subscribed"))["history"]
    assert history["hasMore"]
    assert history["events"] == everything[-len(history["events"]) :]
    assert 0 < len(json.dumps(history["events"])) < 2100
    assert 0 < len(json.dumps(history["messages"])) < 2100
    assert history["cursor"] == str(everything[-1]["number"])


async def test_watchers_see_each_other(desk: Desk, session: str) -> None:
    async with desk.watch(session, clientId="one") as one:
        await one.next("presence_sync")
        async with desk.watch(session, clientId="two") as two:
            there = await two.next("presence_sync")
            assert {each["clientId"] for each in there["participants"]} == {"one", "two"}
            assert (await one.next("presence_update"))["participant"]["clientId"] == "two"
            await two.say(type="presence", status="idle", cursor={"line": 3})
            moved = (await one.next("presence_update"))["participant"]
            for nothing in ("nan", "inf"):  # what other clients could not read
                await two.say(type="presence", cursor={"line": float(nothing)})
                assert (await two.next("error"))["code"] == "invalid_request"
            assert (moved["status"], moved["cursor"]) == ("idle", {"line": 3})
        assert (await one.next("presence_leave"))["clientId"] == "two"
        await one.say(type="ping")
        await one.next("pong")
        for said, why in (({"type": "dance"}, "dance"), ({"type": "prompt", "content": "x", "model": "y"}, "model")):
            await one.say(**said)
            error = await one.next("error")
            assert (error["code"], why in error["message"]) == ("invalid_request", True), error


async def test_a_wrong_token_is_shown_out(desk: Desk, session: str) -> None:
    address = f"{desk.url.replace('http', 'ws')}/sessions/{session}/ws"
    for said in ('{"type":"subscribe","token":"wrong","clientId":"x"}', '{"type":"ping"}', "nonsense"):
        async with connect(address) as socket:
            await socket.send(said)
            with pytest.raises(ConnectionClosed) as closed:
                await socket.recv()
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 4001
    async with connect(f"{desk.url.replace('http', 'ws')}/sessions/nothing/ws") as socket:
        await socket.send('{"type":"subscribe","token":"x","clientId":"x"}')
        with pytest.raises(ConnectionClosed) as closed:
            await socket.recv()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 4001


async def test_a_new_token_takes_the_place_of_the_one_before(desk: Desk, session: str) -> None:
    old = (await desk.http.post(f"/sessions/{session}/ws-token", json={"user": "ann"})).json()
    new = (await desk.http.post(f"/sessions/{session}/ws-token", json={"user": "ann"})).json()
    assert old["participantId"] == new["participantId"]
    found = await desk.live(session)._rows.participants(session)
    assert not any(token["token"] in repr(found) for token in (old, new))
    people = (await desk.http.get(f"/sessions/{session}/participants")).json()["participants"]
    assert "ann" in [each["user"] for each in people]
    assert await desk.sessions.by_ws_token(desk.live(session), old["token"]) is None
    assert await desk.sessions.by_ws_token(desk.live(session), new["token"]) is not None


async def test_typing_starts_a_sandbox_before_anything_is_asked(desk: Desk) -> None:
    id = await desk.session()
    async with desk.watch(id) as watcher:
        await watcher.next("subscribed")
        await watcher.say(type="typing")
        await watcher.next("sandbox_warming")
        await watcher.next("sandbox_spawning")
        await watcher.next("sandbox_ready")
    assert (await desk.info(id))["queued"] == 0
    await desk.http.delete(f"/sessions/{id}")


# -- the sandbox's side ------------------------------------------------------------------------------------------------


async def test_only_the_sessions_own_sandbox_is_let_in(desk: Desk, session: str) -> None:
    access = desk.access(await desk.inside(session, "cat /var/lib/skerry-session/access.json"))
    address = f"{desk.url.replace('http', 'ws')}/sessions/{session}/ws?type=sandbox"
    good = {"Authorization": f"Bearer {access['token']}", "X-Sandbox-ID": access["sandbox"]}

    async def status(url: str, headers: dict[str, str]) -> int:
        with pytest.raises(InvalidStatus) as refused:
            await connect(url, additional_headers=headers)
        return refused.value.response.status_code

    assert await status(address, {**good, "Authorization": "Bearer wrong"}) == 401
    assert await status(address, {}) == 401
    assert await status(address, {**good, "X-Sandbox-ID": "another"}) == 410
    assert await status(address.replace(session, "nothing"), good) == 404


async def test_a_sandbox_reaches_nothing_of_the_server_but_its_own_session(desk: Desk, session: str) -> None:
    other = await desk.session()
    for path in ("/sessions", "/v1/sandboxes", f"/sessions/{session}", "/health", "/openapi.json", "/docs"):
        code = await desk.inside(session, f"curl -s -o /dev/null -w '%{{http_code}}' http://127.0.0.1:42042{path}")
        assert code == "404", path
    code = await desk.inside(
        session,
        "curl -s -o /dev/null -w '%{http_code}' -X POST -H 'Content-Type: application/json' -d '{\"title\":\"x\"}' "
        f"http://127.0.0.1:42042/sessions/{other}/pr",
    )
    assert code == "403"
    await desk.http.delete(f"/sessions/{other}")


DEEP = "[" * 400 + "]" * 400
DEEPER = "[" * 100_000
FRAMES: dict[str, tuple[str | bytes, bool]] = {
    # what is said, and whether it is kept
    "bytes": (b"\x00\xff", False),
    "nothing": ("", False),
    "no JSON": ("{", False),
    "no object": ("[1]", False),
    "deeper than anything": (DEEPER, False),
    "no type": ('{"id": "odd 0"}', True),
    "deep": (f'{{"type": "odd", "id": "odd 1", "deep": {DEEP}}}', True),
    "half a character": ('{"type": "odd\\ud800", "id": "odd\\ud800", "messageId": "\\ud800"}', True),
    "what no database holds": ('{"type": "odd\\u0000", "id": "odd\\u0000", "x": NaN, "y": 1e999}', True),
    "the name of another event's": ('{"type": "token", "id": "before", "content": "x"}', False),
    "too much": ('{"type": "odd", "id": "odd 2", "callId": "c", "much": "%s"}' % ("x" * 5_000_000), True),
    "no session": ('{"type": "ready", "agentSession": "\\u0000"}', False),
    "no prompt": ('{"type": "execution_complete", "id": "odd 3", "messageId": {"a": 1}}', True),
}


@pytest.fixture(scope="module")
async def hostile(desk: Desk) -> tuple[str, str, dict[str, str]]:
    """A session whose sandbox speaks as it likes: where, and as whom."""
    id = await desk.session()
    await desk.ask(id, "say hello")
    await desk.inside(id, "kill -STOP $(pgrep -f session/bridge.py)")
    access = desk.access(await desk.inside(id, "cat /var/lib/skerry-session/access.json"))
    address = f"{desk.url.replace('http', 'ws')}/sessions/{id}/ws?type=sandbox"
    return id, address, {"Authorization": f"Bearer {access['token']}", "X-Sandbox-ID": access["sandbox"]}


@pytest.mark.parametrize("name", FRAMES)
async def test_whatever_a_sandbox_says_the_session_can_be_read(
    desk: Desk, hostile: tuple[str, str, dict[str, str]], name: str
) -> None:
    id, address, headers = hostile
    frame, kept = FRAMES[name]
    before = await desk.events(id)
    async with asyncio.timeout(30), connect(address, additional_headers=headers) as socket:
        await socket.send('{"type": "before", "id": "before"}')
        await socket.send(frame)
        await socket.send(json.dumps({"type": "after", "id": f"after {name}"}))
        acknowledged = []
        while f"after {name}" not in acknowledged:
            acknowledged.append(json.loads(await socket.recv()).get("id"))
    said = (await desk.events(id))[len(before) :]
    told = [event for event in said if event["type"] not in ("before", "after")]
    assert len(told) == kept
    assert all(len(json.dumps(event)) < 10_000 for event in told)
    assert [event["data"].get("callId") for event in told if event["data"].get("truncated")] in ([], ["c"])
    async with desk.watch(id) as watcher:
        assert (await watcher.next("subscribed"))["history"]["events"][-1]["type"] == "after"


async def test_a_sandbox_has_so_many_connections_and_no_more(desk: Desk, session: str) -> None:
    many = (
        "import socket; s = [socket.create_connection(('127.0.0.1', 42042)) for _ in range(200)]; import time; "
        "time.sleep(1); [each.setblocking(False) for each in s]\n"
        "def open(each):\n    try: return each.recv(1) != b''\n    except BlockingIOError: return True\n"
        "    except OSError: return False\n"
        "print(sum(map(open, s)))"
    )
    left = int(await desk.inside(session, f'/run/skerry/bin/python3 -c "{many}"'))
    assert 16 < left < MOST_CONNECTIONS
    assert (await desk.ask(session, "say still here"))["status"] == "completed"


# -- the rest of the API -----------------------------------------------------------------------------------------------


async def test_events_come_in_pages(desk: Desk, session: str) -> None:
    everything = await desk.events(session)
    one = (await desk.http.get(f"/sessions/{session}/events", params={"limit": 2})).json()
    assert one["hasMore"]
    two = (await desk.http.get(f"/sessions/{session}/events", params={"limit": 2, "cursor": one["cursor"]})).json()
    assert [*one["events"], *two["events"]] == everything[:4]
    last = (await desk.http.get(f"/sessions/{session}/events", params={"cursor": everything[-1]["number"]})).json()
    assert last == {"events": [], "cursor": str(everything[-1]["number"]), "hasMore": False}
    assert (await desk.http.get(f"/sessions/{session}/events", params={"limit": 101})).status_code == 400


async def test_sessions_are_listed_newest_first_in_pages(desk: Desk) -> None:
    made = [await desk.session(title=f"number {number}") for number in range(3)]
    page = (await desk.http.get("/sessions", params={"limit": 2})).json()
    assert [each["id"] for each in page["sessions"]] == [made[2], made[1]]
    rest = (await desk.http.get("/sessions", params={"limit": 100, "cursor": page["cursor"]})).json()
    assert made[0] in [each["id"] for each in rest["sessions"]]
    archived = (await desk.http.post(f"/sessions/{made[0]}/archive")).json()
    assert archived["status"] == "archived"
    found = (await desk.http.get("/sessions", params={"status": "archived"})).json()
    assert [each["id"] for each in found["sessions"]] == [made[0]]
    refused = await desk.http.post(f"/sessions/{made[0]}/prompt", json={"content": "say x"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "session_archived")
    assert (await desk.http.post(f"/sessions/{made[0]}/unarchive")).json()["status"] == "active"
    for id in made:
        assert (await desk.http.delete(f"/sessions/{id}")).status_code == 200
        assert (await desk.http.get(f"/sessions/{id}")).json()["error"]["code"] == "session_not_found"


async def test_a_deleted_session_leaves_nothing_behind(desk: Desk) -> None:
    id = await desk.session()
    await desk.ask(id, "write /workspace/file text")
    sandbox = (await desk.info(id))["sandboxId"]
    await desk.status(id, "ready")
    assert [each for each in await desk.registry.snapshots.list_() if each.labels.get("session") == id]
    await desk.http.delete(f"/sessions/{id}")
    assert not [each for each in await desk.registry.snapshots.list_() if each.labels.get("session") == id]
    assert (await desk.http.get(f"/v1/sandboxes/{sandbox}")).status_code == 404


async def test_what_makes_no_sense_is_refused(desk: Desk) -> None:
    for wrong in (
        {"repoOwner": "only"},
        {"branch": "--upload-pack=x", "repoOwner": "a", "repoName": "b"},
        {"repoOwner": "../..", "repoName": "b/c"},
        {"secrets": {"api.example.com": {}}},
        {"model": "nonsense"},
        {"config": {"provider": {"x": {"models": {f"model {number}": {"name": "x" * 20} for number in range(3000)}}}}},
        {"unknown": 1},
    ):
        answer = await desk.http.post("/sessions", json=wrong)
        assert answer.status_code == 400, wrong
    id = await desk.session()
    for more in (
        {"content": ""},
        {"model": "nonsense"},
        {"model": "/x"},
        {"attachments": [{"name": "neither"}]},
        {"attachments": [{"type": "dance"}]},
        {"attachments": [{"type": "file", "mime": "text/plain"}]},
        {"attachments": [{"type": "text"}]},
        {"attachments": [{"content": "no base64", "encoding": "base64"}]},
        {"attachments": [{"content": "\N{SNOWMAN}" * 3_000_000}] * 2},
    ):
        answer = await desk.http.post(f"/sessions/{id}/prompt", json={"content": "say x", **more})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request"), more
    assert (await desk.http.post(f"/sessions/{id}/pr", json={"title": "x"})).status_code == 400
    await desk.http.delete(f"/sessions/{id}")
    other = await desk.session(agent="claude-code")
    attached = {"content": "x", "attachments": [{"type": "agent", "name": "reviewer"}]}
    answer = await desk.http.post(f"/sessions/{other}/prompt", json=attached)
    assert "Claude Code takes no attachments of type 'agent'" in answer.json()["error"]["message"]
    await desk.http.delete(f"/sessions/{other}")
