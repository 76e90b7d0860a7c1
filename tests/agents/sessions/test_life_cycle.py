"""How a session's sandbox comes and goes, and what is left of it."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from skerry.agents.sessions.life import Times
from skerry.agents.sessions.programs import AgentCommand
from skerry.control.session_rows import SessionRow
from tests.agents.sessions.conftest import Desk, desk_of, scripted

TIMES = Times(inactivity=600, extension=300, subscribe=0.3)


def agent(row: SessionRow, tools: Mapping[str, Any]) -> AgentCommand:
    if row.title == "no agent":
        return AgentCommand(("/bin/false",))
    return scripted(row, tools)


@pytest.fixture(scope="module")
async def desk() -> AsyncIterator[Desk]:
    home = Path(tempfile.mkdtemp(prefix="skerry-sessions-"))
    os.chmod(home, 0o711)
    async with desk_of(home, TIMES, agent=agent, settings={"session_events": 40}) as desk:
        yield desk
    shutil.rmtree(home)


async def idle(desk: Desk, id: str, seconds: float) -> None:
    """So much time goes by in which nobody asks for anything, and heartbeats come."""
    await desk.status(id, "ready")
    live = desk.live(id)
    live.row.active_at = (live.row.active_at or 0) - seconds


async def test_what_nobody_uses_is_put_away_and_comes_back_as_it_was(desk: Desk) -> None:
    id = await desk.session()
    await desk.ask(id, "write /workspace/notes remember me")
    first = await desk.status(id, "ready")
    access = desk.access(await desk.inside(id, "cat /var/lib/skerry-session/access.json"))
    await idle(desk, id, 601)
    await desk.status(id, "stopped")
    await desk.until(lambda: _gone(desk, first["sandboxId"]))
    stopped = await desk.info(id)
    assert stopped["snapshot"] not in (None, first["snapshot"])

    # It may not come back: the session has done with it.
    address = f"{desk.url.replace('http', 'ws')}/sessions/{id}/ws?type=sandbox"
    headers = {"Authorization": f"Bearer {access['token']}", "X-Sandbox-ID": access["sandbox"]}
    query = f"&token={access['token']}&sandboxId={access['sandbox']}"
    for url, given in ((address, headers), (address + query, {})):
        with pytest.raises(InvalidStatus) as refused:
            await connect(url, additional_headers=given)
        assert refused.value.response.status_code == 410

    async with desk.watch(id) as watcher:
        await watcher.say(type="prompt", content="say here again")
        assert (await watcher.next("sandbox_restored"))["snapshot"] == stopped["snapshot"]
        await watcher.next("sandbox_ready")
        ended = {"type": ""}
        while ended["type"] != "execution_complete":
            ended = (await watcher.next("sandbox_event"))["event"]
    assert ended["success"]
    assert await desk.inside(id, "cat /workspace/notes") == "remember me"
    assert (await desk.info(id))["sandboxId"] != first["sandboxId"]
    await desk.http.delete(f"/sessions/{id}")


async def test_a_session_is_completed_when_its_work_is_done_and_its_sandbox_put_away(desk: Desk) -> None:
    id = await desk.session()
    async with desk.watch(id) as watcher:
        await watcher.say(type="prompt", content="; ".join(["tool x"] * 20))
        await watcher.next("snapshot_saved")
        assert (await desk.info(id))["status"] == "active"

        # Of its 83 events no more than 40 are kept; one stands for those that are gone.
        kept = await desk.events(id)
        assert len(kept) <= 40
        assert kept[0]["type"] == "trimmed"
        told = [each["event"]["number"] for each in watcher.seen if each["type"] == "sandbox_event"]
        gone = [number for number in told if number <= kept[0]["number"]]
        assert kept[0]["data"]["events"] == len(gone)
        assert [each["number"] for each in kept[1:]] == told[len(gone) :]

        live = desk.live(id)
        live._berth.warned = True
        await idle(desk, id, 901)
        while (await watcher.next("session_status"))["status"] != "completed":
            pass
        assert (await desk.info(id))["sandboxStatus"] == "stopped"
        await watcher.say(type="prompt", content="say more")
        assert (await watcher.next("session_status"))["status"] == "active"
    assert [each["id"] for each in (await desk.http.get("/sessions?status=active")).json()["sessions"]] == [id]
    await desk.http.delete(f"/sessions/{id}")


async def _gone(desk: Desk, sandbox: str) -> bool:
    return (await desk.http.get(f"/v1/sandboxes/{sandbox}")).status_code == 404


async def test_who_watches_is_warned_and_gets_a_while_more(desk: Desk) -> None:
    id = await desk.session()
    await desk.ask(id, "say hi")
    async with desk.watch(id) as watcher:
        await watcher.next("subscribed")
        await idle(desk, id, 601)
        assert "idle" in (await watcher.next("sandbox_warning"))["message"]
        assert (await desk.info(id))["sandboxStatus"] == "ready"
        await idle(desk, id, 300)
        await watcher.next("snapshot_saved")
    # The status was said before: whoever sees the snapshot sees that it is over.
    told = [each["type"] if each["type"] != "sandbox_status" else each["status"] for each in watcher.seen]
    assert told.index("stopped") < told.index("snapshot_saved")
    await desk.http.delete(f"/sessions/{id}")


async def test_a_silent_sandbox_is_given_up_and_the_session_goes_on_in_another(desk: Desk) -> None:
    id = await desk.session()
    await desk.ask(id, "write /workspace/notes remember me")
    await desk.status(id, "ready")
    message = await desk.prompt(id, "tool before; hang")
    await desk.event(id, "tool_call", messageId=message)
    next = await desk.prompt(id, "say go on")
    await desk.inside(id, "kill -STOP $(pgrep -f session/supervisor.py) $(pgrep -f session/bridge.py)")
    desk.live(id).row.heard_at = desk.sessions._clock() - 91
    lost = await desk.done(id, message)
    assert lost["status"] == "failed"
    assert "90 seconds" in lost["error"]
    assert (await desk.done(id, next))["status"] == "completed"
    assert await desk.inside(id, "cat /workspace/notes") == "remember me"
    await desk.http.delete(f"/sessions/{id}")


async def test_a_sandbox_that_dies_is_noticed_at_once(desk: Desk) -> None:
    id = await desk.session()
    await desk.ask(id, "write /workspace/notes remember me")
    first = await desk.status(id, "ready")
    message = await desk.prompt(id, "say begun; hang")
    await desk.event(id, "token", messageId=message)
    await desk.registry.stop(first["sandboxId"])
    lost = await desk.done(id, message, 10)
    assert (lost["status"], lost["error"]) == ("failed", "The sandbox has ended.")
    assert (await desk.ask(id, "say on"))["status"] == "completed"
    assert await desk.inside(id, "cat /workspace/notes") == "remember me"
    await desk.http.delete(f"/sessions/{id}")


async def test_a_killed_supervisor_is_noticed_at_once(desk: Desk) -> None:
    id = await desk.session()
    await desk.ask(id, "write /workspace/notes remember me")
    await desk.status(id, "ready")
    message = await desk.prompt(id, "say begun; hang")
    await desk.event(id, "token", messageId=message)
    await desk.kill(id, "session/supervisor.py")
    attended = desk.live(id).attendance
    assert attended is not None
    await attended.supervisor.ended.wait()
    await attended.runtime.processes.cleanup()  # somebody tidies up before it is looked at
    lost = await desk.done(id, message, 20)
    assert lost["status"] == "failed"
    assert "supervisor in the sandbox has ended. It was ended by SIGKILL" in lost["error"]
    assert (await desk.ask(id, "say on"))["status"] == "completed"
    assert await desk.inside(id, "cat /workspace/notes") == "remember me"
    await desk.http.delete(f"/sessions/{id}")


@pytest.mark.parametrize("said", ["plain", "with \0 in it"])
async def test_what_the_supervisor_gives_up_for_is_told_whatever_is_in_it(desk: Desk, said: str) -> None:
    id = await desk.session()
    await desk.ask(id, "say hello")
    access = desk.access(await desk.inside(id, "cat /var/lib/skerry-session/access.json"))
    headers = {"Authorization": f"Bearer {access['token']}"}
    await desk.http.post(f"/sandbox/{access['sandbox']}/error", json={"error": said}, headers=headers)
    failed = await desk.status(id, "failed", seconds=20)
    assert failed["error"] == said.replace("\0", "\N{REPLACEMENT CHARACTER}")
    assert failed["updatedAt"] > failed["createdAt"]
    await desk.http.delete(f"/sessions/{id}")


async def test_an_agent_that_cannot_start_is_tried_three_times_and_no_more(desk: Desk) -> None:
    id = await desk.session(title="no agent")
    async with desk.watch(id) as watcher:
        await watcher.next("subscribed")
        await watcher.say(type="prompt", content="say never")
        said = await watcher.next("sandbox_error")
        assert "The agent ended with 1" in said["error"]

        async def broken() -> bool:
            return desk.live(id).row.failures == 3

        await desk.until(broken)
        while "3 times in a row" not in (said := await watcher.next("sandbox_error"))["error"]:
            pass
    await asyncio.sleep(1.5)
    info = await desk.info(id)
    assert (info["sandboxStatus"], info["queued"]) == ("failed", 1)
    assert desk.live(id).row.failures == 3
    await desk.until(lambda: _gone(desk, info["sandboxId"]))
    await desk.http.delete(f"/sessions/{id}")


async def test_who_does_not_subscribe_in_time_is_shown_out(desk: Desk) -> None:
    id = await desk.session()
    async with connect(f"{desk.url.replace('http', 'ws')}/sessions/{id}/ws") as socket:
        with pytest.raises(ConnectionClosed) as closed:
            await socket.recv()
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 4008
    await desk.http.delete(f"/sessions/{id}")


async def test_an_archived_session_has_no_sandbox(desk: Desk) -> None:
    id = await desk.session()
    await desk.ask(id, "write /workspace/notes remember me")
    sandbox = (await desk.status(id, "ready"))["sandboxId"]
    await desk.http.post(f"/sessions/{id}/archive")
    await desk.status(id, "stopped")
    await desk.until(lambda: _gone(desk, sandbox))
    await desk.http.post(f"/sessions/{id}/unarchive")
    assert (await desk.ask(id, "say again"))["status"] == "completed"
    assert await desk.inside(id, "cat /workspace/notes") == "remember me"
    await desk.http.delete(f"/sessions/{id}")


async def test_without_snapshots_a_session_begins_anew(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    can = desk.registry.provider.capabilities()
    monkeypatch.setattr(desk.registry.provider, "capabilities", lambda: replace(can, snapshots="none"))
    id = await desk.session()
    await desk.ask(id, "write /workspace/notes forget me")
    await idle(desk, id, 601)
    stopped = await desk.status(id, "stopped")
    assert stopped["snapshot"] is None
    assert (await desk.ask(id, "say new"))["status"] == "completed"
    assert await desk.inside(id, "ls /workspace") == ""
    await desk.http.delete(f"/sessions/{id}")
