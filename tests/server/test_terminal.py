"""Terminals over WebSockets, as any client has them."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import websockets

from tests.server.conftest import ServerProcess

Connect = Callable[..., websockets.connect]


@pytest.fixture
def connect(server: ServerProcess, box: str) -> Connect:
    def connect(query: str = "", **options: Any) -> websockets.connect:
        return websockets.connect(f"{server.url.replace('http', 'ws', 1)}{box}/terminal{query}", **options)

    return connect


async def message(socket: websockets.ClientConnection, kind: str) -> dict[str, Any]:
    """The next text frame of a kind; others and bytes are passed over."""
    async with asyncio.timeout(30):
        while True:
            frame = await socket.recv()
            if isinstance(frame, str) and (found := json.loads(frame))["type"] == kind:
                return dict(found)


async def screen(socket: websockets.ClientConnection, marker: bytes) -> bytes:
    seen = bytearray()
    looked = 0
    async with asyncio.timeout(30):
        while seen.find(marker, looked) < 0:
            looked = max(0, len(seen) - len(marker))
            frame = await socket.recv()
            seen += frame if isinstance(frame, bytes) else b""
    return bytes(seen)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(30):
        while not await condition():
            await asyncio.sleep(0.05)


async def test_a_terminal_is_typed_into_resized_and_ended(connect: Connect) -> None:
    async with connect("?cols=100&rows=30&shell=bash") as socket:
        ready = await message(socket, "ready")
        del ready["terminal"]
        size = {"cols": 100, "rows": 30}
        assert ready == {"type": "ready", "session": "default", "shell": "bash", "viewers": 1, **size}
        await socket.send(b"stty size\n")
        await screen(socket, b"30 100")
        await socket.send(json.dumps({"type": "resize", "cols": 90, "rows": 20}))
        assert await message(socket, "resize") == {"type": "resize", "cols": 90, "rows": 20}
        await socket.send(b"stty size\n")
        await screen(socket, b"20 90")
        await socket.send(b"exit 7\n")
        frames = [frame async for frame in socket if isinstance(frame, str)]
    assert json.loads(frames[-1]) == {"type": "exit", "code": 7}
    assert socket.close_code == 1000


async def test_a_text_frame_that_is_no_command_is_answered_and_the_terminal_lives_on(connect: Connect) -> None:
    async with connect() as socket:
        for nonsense in ("ls", "{}", '{"type": "resize", "cols": 0, "rows": 5}', '{"type": "resize", "cols": 5}'):
            await socket.send(nonsense)
            assert (await message(socket, "error"))["code"] == "invalid_request"
        await socket.send(b"echo $((6*7))\n")
        await screen(socket, b"42")


async def test_a_terminal_survives_its_client_and_shows_the_scrollback(connect: Connect) -> None:
    async with connect("?terminal=new") as socket:
        id = (await message(socket, "ready"))["terminal"]
        await socket.send(b"A=kept; echo early-$((1+1))\n")
        await screen(socket, b"early-2")
        socket.transport.abort()
    async with connect(f"?terminal={id}") as socket:
        ready = await message(socket, "ready")
        assert (ready["terminal"], ready["cols"], ready["rows"]) == (id, 80, 24)
        await screen(socket, b"early-2")
        await socket.send(b"echo $A-$((1+2))\n")
        await screen(socket, b"kept-3")


async def test_who_asks_for_a_session_shares_its_terminal_and_new_means_another(
    connect: Connect, http: httpx.AsyncClient, box: str
) -> None:
    await http.post(f"{box}/sessions", json={"id": "work", "env": {"WHO": "me"}})
    await http.post(f"{box}/exec", json={"command": "cd /tmp", "session": "work"})
    async with connect("?session=work") as one, connect("?session=work") as other, connect("?terminal=new") as third:
        ids = [(await message(socket, "ready"))["terminal"] for socket in (one, other, third)]
        assert ids[0] == ids[1] != ids[2]
        await one.send(b"echo $WHO@$PWD-$((1+1))\n")
        await screen(other, b"me@/tmp-2")
        listed = (await http.get(f"{box}/terminals")).json()["terminals"]
        assert [(found["id"], found["session"], found["viewers"]) for found in listed] == [
            (ids[0], "work", 2),
            (ids[2], "default", 1),
        ]
        await other.send(b"exit 3\n")
        for socket in (one, other):
            assert (await message(socket, "exit"))["code"] == 3
    async with connect("?session=nowhere") as socket:
        assert (await message(socket, "error"))["code"] == "session_not_found"
        await socket.wait_closed()
        assert socket.close_code == 4404


async def test_a_resize_of_one_viewer_reaches_the_others(connect: Connect) -> None:
    async with connect("?cols=80&rows=24") as one:
        await message(one, "ready")
        async with connect("?cols=120&rows=40") as other:
            assert (await message(other, "ready"))["cols"] == 120
            assert await message(one, "resize") == {"type": "resize", "cols": 120, "rows": 40}


async def test_a_terminal_is_closed_by_delete_and_by_a_frame(
    connect: Connect, http: httpx.AsyncClient, box: str
) -> None:
    async with connect("?terminal=new") as one, connect("?terminal=new") as other:
        id = (await message(one, "ready"))["terminal"]
        await message(other, "ready")
        assert (await http.delete(f"{box}/terminals/{id}")).json()["ok"]
        assert (await message(one, "exit"))["code"] == 129
        await other.send(json.dumps({"type": "close"}))
        await message(other, "exit")
    assert (await http.get(f"{box}/terminals")).json() == {"terminals": []}
    gone = await http.delete(f"{box}/terminals/{id}")
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "terminal_not_found")


async def test_a_terminal_ends_with_its_sandbox_and_looking_for_it_wakes_nothing(
    connect: Connect, http: httpx.AsyncClient, box: str
) -> None:
    async with connect() as socket:
        id = (await message(socket, "ready"))["terminal"]
        await http.post(f"{box}/stop")
        assert (await message(socket, "error"))["code"] == "sandbox_lost"
        await socket.wait_closed()
        assert socket.close_code == 4410
    async with connect(f"?terminal={id}") as socket:
        assert (await message(socket, "error"))["code"] == "terminal_not_found"
        await socket.wait_closed()
        assert socket.close_code == 4404
    assert (await http.get(f"{box}/terminals")).json() == {"terminals": []}
    assert (await http.get(box)).json()["state"] == "hibernated"
    assert (await http.get(f"{box}-other/terminals")).status_code == 404


async def test_a_terminal_on_which_nothing_moves_does_not_keep_its_sandbox_awake(
    connect: Connect, http: httpx.AsyncClient, box: str
) -> None:
    async with connect() as socket:
        await message(socket, "ready")
        assert (await http.get(box)).json()["activeOperations"] == 0


async def test_a_terminal_that_cannot_open_says_why(connect: Connect) -> None:
    async with connect("?shell=nosuchshell") as socket:
        assert (await message(socket, "error"))["code"] == "file_not_found"
        await socket.wait_closed()
        assert socket.close_code == 4404
    for query in ("?cols=0", "?rows=x"):
        with pytest.raises(websockets.InvalidStatus):
            async with connect(query):
                pass


async def test_a_viewer_that_does_not_read_holds_no_memory_and_holds_up_no_one(
    connect: Connect, server: ServerProcess, box: str
) -> None:
    async with connect() as fast, connect(max_queue=1, ping_interval=None, compression=None) as slow:
        await message(fast, "ready")
        await message(slow, "ready")
        before = _memory(server)
        await fast.send(b"head -c 30000000 /dev/zero | tr '\\0' a; echo; echo all-$((1+1))\n")
        await screen(fast, b"all-2")
        assert _memory(server) - before < 20_000_000
        assert (await message(slow, "scrollback"))["reason"] == "behind"
        await screen(slow, b"all-2")


def _memory(server: ServerProcess) -> int:
    pages = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def test_many_viewers_leave_nothing_behind(connect: Connect, server: ServerProcess) -> None:
    async with connect() as first:
        await message(first, "ready")
        before = len(os.listdir(f"/proc/{server.process.pid}/fd"))
        viewers = await asyncio.gather(*(connect() for _ in range(100)))
        await first.send(b"echo everyone-$((1+1))\n")
        await asyncio.gather(*(screen(viewer, b"everyone-2") for viewer in viewers))
        for viewer in viewers[:50]:
            viewer.transport.abort()
        await asyncio.gather(*(viewer.close() for viewer in viewers[50:]))

        async def gone() -> bool:
            return len(os.listdir(f"/proc/{server.process.pid}/fd")) <= before

        await until(gone)
