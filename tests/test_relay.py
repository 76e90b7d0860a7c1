"""Connections over a WebSocket, with both ends in one process, broken in ways hard to bring about elsewhere."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from skerry.errors import InvalidRequestError, PortNotListeningError, ServerUnreachableError
from skerry.relay import CHANNELS, END, OPEN, RESET, Channels, close, ready, relay, streams

Work = Callable[[], Coroutine[Any, Any, None]]
Run = Callable[[Work], None]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a test on a loop of this kind; no task may fail unnoticed."""

    def run(work: Work) -> None:
        failures: list[dict[str, Any]] = []

        async def watched() -> None:
            asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
            async with asyncio.timeout(30):
                await work()

        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(watched())
        assert failures == []

    return run


class Wire:
    """One end of a WebSocket that needs no network."""

    def __init__(self) -> None:
        self.other: Wire = self
        self._frames: asyncio.Queue[bytes | str | None] = asyncio.Queue(4)

    async def send(self, frame: bytes | str) -> None:
        await self.other._frames.put(frame)

    async def recv(self) -> bytes | str | None:
        return await self._frames.get()

    async def cut(self) -> None:
        await self._frames.put(None)


def wires() -> tuple[Wire, Wire]:
    one, other = Wire(), Wire()
    one.other, other.other = other, one
    return one, other


def pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a TCP connection; the second blocks, for a thread."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        far = socket.create_connection(listener.getsockname())
        near, _ = listener.accept()
    near.setblocking(False)
    return near, far


def break_off(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def test_a_reset_reaches_the_other_end_and_may_be_said_twice(run: Run) -> None:
    async def work() -> None:
        near, far = pair()
        _, writer = await streams(near)
        await close(writer, reset=True)
        await close(writer, reset=True)
        with far, pytest.raises(ConnectionResetError):
            far.recv(1)

    run(work)


def test_what_the_other_end_broke_can_still_be_closed(run: Run) -> None:
    async def work() -> None:
        near, far = pair()
        reader, writer = await streams(near)
        break_off(far)
        with pytest.raises(ConnectionResetError):
            await reader.read()
        await close(writer, reset=True)

    run(work)


@pytest.mark.parametrize("ended", [False, True], ids=["open", "half-closed"])
def test_a_connection_whose_websocket_is_cut_is_reset(run: Run, ended: bool) -> None:
    async def work() -> None:
        wire, other = wires()
        near, far = pair()
        if ended:
            await other.send('{"type": "end"}')
        carrying = asyncio.create_task(relay(wire, *await streams(near)))
        await asyncio.sleep(0.05)
        await wire.cut()
        assert not await carrying
        with far, pytest.raises(ConnectionError):
            far.send(b"x")  # what was only closed would still take this

    run(work)


def test_channels_that_are_broken_off_at_once_leave_nothing(run: Run) -> None:
    async def work() -> None:
        wire, other = wires()
        fars: list[socket.socket] = []

        async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            near, far = pair()
            fars.append(far)
            return await streams(near)

        here, there = Channels(wire), Channels(other, connect)
        running = [asyncio.create_task(here.run()), asyncio.create_task(there.run())]
        nears = [pair() for _ in range(50)]
        carrying = [asyncio.create_task(here.carry(*await streams(near))) for near, _ in nears]
        while len(there) < 50 or len(fars) < 50:
            await asyncio.sleep(0.01)
        for number, (_, far) in enumerate(nears):  # some break here, some there, some on both sides at once
            if number % 3:
                break_off(far)
            if number % 3 != 1:
                break_off(fars[number])
        await asyncio.gather(*carrying)
        while len(here) or len(there):
            await asyncio.sleep(0.01)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for sock in [far for _, far in nears] + fars:
            sock.close()

    run(work)


def test_a_reset_is_noticed_after_the_end_too(run: Run) -> None:
    async def work() -> None:
        wire, other = wires()
        near, far = pair()
        channels = Channels(wire)
        running = asyncio.create_task(channels.run())
        carrying = asyncio.create_task(channels.carry(*await streams(near)))
        await other.recv()
        await other.send(struct.pack(">BI", END, 1))
        assert await asyncio.to_thread(far.recv, 1) == b""
        await other.send(struct.pack(">BI", RESET, 1))
        await carrying
        with far, pytest.raises(ConnectionError):
            far.send(b"x")
        running.cancel()

    run(work)


def test_closing_resets_what_is_left(run: Run) -> None:
    async def work() -> None:
        wire, other = wires()
        near, far = pair()
        channels = Channels(wire)
        carrying = asyncio.create_task(channels.carry(*await streams(near)))
        assert await other.recv() == struct.pack(">BI", OPEN, 1)
        await channels.close()
        await carrying
        with far, pytest.raises(ConnectionResetError):
            far.recv(1)
        assert len(channels) == 0

    run(work)


def test_more_channels_than_allowed_are_refused(run: Run) -> None:
    async def work() -> None:
        wire, other = wires()
        never = asyncio.Event()

        async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            await never.wait()
            raise AssertionError

        channels = Channels(wire, connect)
        running = asyncio.create_task(channels.run())
        for number in range(CHANNELS + 1):
            await other.send(struct.pack(">BI", OPEN, number))
        assert await other.recv() == struct.pack(">BI", RESET, CHANNELS)
        assert len(channels) == CHANNELS
        running.cancel()
        await channels.close()

    run(work)


def test_what_the_server_says_instead_of_ready_is_raised(run: Run) -> None:
    async def work() -> None:
        wire, other = wires()
        await other.send('{"type": "error", "code": "port_not_listening", "message": "Nothing.", "hint": "Start it."}')
        with pytest.raises(PortNotListeningError, match=r"Nothing\. Start it\."):
            await ready(wire)
        await other.send(b"bytes")
        with pytest.raises(InvalidRequestError):
            await ready(wire)
        await wire.cut()
        with pytest.raises(ServerUnreachableError):
            await ready(wire)

    run(work)
