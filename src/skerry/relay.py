"""TCP connections carried over a WebSocket, by server and client alike.

One connection has a WebSocket to itself (``relay``): its bytes are binary frames, and the text frame
``{"type": "end"}`` says that a side has no more to send while it still listens. Many share one (``Channels``): every
binary frame begins with a byte for its kind and four for the number of the channel, the most significant first.

    1 open    a connection was made; its number is new
    2 data    the rest of the frame are bytes of it
    3 end     this side sends no more
    4 reset   it is over, at once; the rest of the frame may say why, in UTF-8
    5 taken   four bytes: so many bytes of it were passed on, so many more may come

Of each channel at most WINDOW bytes are under way, so that one which nobody reads holds up neither the others nor the
WebSocket's own pings. A WebSocket that closes before both sides said ``end`` resets what it carried.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from asyncio import StreamReader, StreamWriter
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Protocol

from skerry.errors import InvalidRequestError, ServerUnreachableError, SkerryError, error_from_wire

PIECE = 64 * 1024
WINDOW = 256 * 1024
STALLED = 60.0
"""A connection with a WebSocket to itself is reset when its end takes nothing for so many seconds."""
CHANNELS = 1024
"""How many connections may be open on one WebSocket."""

OPEN, DATA, END, RESET, TAKEN = 1, 2, 3, 4, 5

_HEAD = struct.Struct(">BI")
_COUNT = struct.Struct(">I")
_ENDED = json.dumps({"type": "end"})

Connect = Callable[[], Awaitable[tuple[StreamReader, StreamWriter]]]


class Frames(Protocol):
    """A WebSocket: frames of bytes or text; ``recv`` gives None when it is closed."""

    async def send(self, frame: bytes | str) -> None: ...
    async def recv(self) -> bytes | str | None: ...


Stir = Callable[[bool], None]
"""Told of every piece of data, and whether it came in by the WebSocket."""


def quiet(inward: bool) -> None:
    """What is called with every piece of data where nobody wants to know."""


async def streams(sock: socket.socket) -> tuple[StreamReader, StreamWriter]:
    """A connected socket, to be read and written; it is closed with the writer."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return await asyncio.open_connection(sock=sock, limit=PIECE)


async def ready(frames: Frames) -> None:
    """Wait until the server says that it has begun; raises what it says instead."""
    frame = await frames.recv()
    if not isinstance(frame, str) or _message(frame).get("type") != "ready":
        raise _said(frame)


async def relay(frames: Frames, reader: StreamReader, writer: StreamWriter, stir: Stir = quiet) -> bool:
    """Carry one connection until both sides have ended, or one of them broke off; whether it ended well.

    Raises what the other side says went wrong. The connection is closed in any case, the WebSocket is not.
    """
    sent, received = asyncio.Event(), asyncio.Event()

    async def outward() -> None:
        while data := await reader.read(PIECE):
            stir(False)
            await frames.send(data)
        sent.set()
        await frames.send(_ENDED)
        await received.wait()

    async def inward() -> None:
        # Read on after the end, too: that is how one learns that the other side is gone.
        while (frame := await frames.recv()) is not None:
            stir(True)
            if isinstance(frame, str):
                if _message(frame).get("type") != "end":
                    raise _said(frame)
                received.set()
                writer.write_eof()
            elif not received.is_set():
                writer.write(frame)
                # No frame is read meanwhile, not even the one that says that the other side has left.
                async with asyncio.timeout(STALLED):
                    await writer.drain()

    tasks = [asyncio.ensure_future(outward()), asyncio.ensure_future(inward())]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            with suppress(OSError, RuntimeError):  # it broke, or stalled; uvloop says some of it by RuntimeError
                task.result()
        return sent.is_set() and received.is_set()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await close(writer, reset=not (sent.is_set() and received.is_set()))


async def close(writer: StreamWriter, *, reset: bool = False) -> None:
    if reset:
        _abort(writer)
    else:
        writer.close()
    with suppress(OSError, RuntimeError):
        await writer.wait_closed()


def _abort(writer: StreamWriter) -> None:
    if not writer.transport.is_closing():  # what is closed already has no socket, with uvloop
        with suppress(OSError):
            # Without lingering the other end is told of a reset, so that it does not take this for all there was.
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.transport.abort()


class _Channel:
    """The local end of one connection, and what came for it from the other side."""

    def __init__(self) -> None:
        self.writer: StreamWriter | None = None
        self.credit = WINDOW
        self.inbox: deque[bytes | None] = deque()
        self.held = 0
        self.over = False
        self._credited = asyncio.Event()
        self._filled = asyncio.Event()

    def arrived(self, kind: int, payload: bytes) -> None:
        if kind == DATA:
            self.held += len(payload)
            if self.held > WINDOW:  # more than was allowed: it is not kept, and who waits to pass some on need not
                self.inbox.clear()
                if self.writer is not None:
                    _abort(self.writer)
            else:
                self.inbox.append(payload)
            self._filled.set()
        elif kind == END:
            self.inbox.append(None)
            self._filled.set()
        elif kind == TAKEN and len(payload) == _COUNT.size:
            self.credit = min(WINDOW, self.credit + _COUNT.unpack(payload)[0])
            self._credited.set()
        elif kind == RESET:
            self.over = True
            self._credited.set()
            self._filled.set()
            if self.writer is not None:
                _abort(self.writer)  # wakes who waits for data here

    async def allowance(self) -> int:
        """How many bytes may be sent, as soon as it is some."""
        while not self.credit and not self.over:
            self._credited.clear()
            await self._credited.wait()
        self.check()
        return min(PIECE, self.credit)

    async def next(self) -> bytes | None:
        """What is to be passed on; None at the end."""
        while not self.inbox and not self.over and self.held <= WINDOW:
            self._filled.clear()
            await self._filled.wait()
        self.check()
        return self.inbox.popleft()

    def check(self) -> None:
        if self.over or self.held > WINDOW:
            raise ConnectionResetError


class Channels:
    """Many connections on one WebSocket. ``connect`` makes the local end of those that the other side opens.

    ``told`` gets the sentence with which the other side reset a connection.
    """

    def __init__(
        self,
        frames: Frames,
        connect: Connect | None = None,
        *,
        stir: Stir = quiet,
        told: Callable[[str], None] | None = None,
    ) -> None:
        self._frames = frames
        self._connect = connect
        self._stir = stir
        self._told = told
        self._channels: dict[int, _Channel] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._last = 0

    def __len__(self) -> int:
        return len(self._channels)

    async def run(self) -> None:
        """Serve until the WebSocket closes. Raises what the other side says went wrong."""
        while (frame := await self._frames.recv()) is not None:
            if isinstance(frame, str):
                raise _said(frame)
            await self._take(frame)

    async def close(self) -> None:
        """Reset every connection that is left."""
        for channel in self._channels.values():
            channel.arrived(RESET, b"")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def carry(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Open a channel for a connection that was made here, and carry it to its end."""
        if len(self._channels) >= CHANNELS:
            return await close(writer, reset=True)
        self._last += 1
        number, channel = self._last, _Channel()
        self._channels[number] = channel
        try:
            await self._send(OPEN, number)
            await self._serve(number, channel, reader, writer)
        finally:
            del self._channels[number]

    # -- one channel ---------------------------------------------------------------------------------------------------

    async def _answer(self, number: int, channel: _Channel, connect: Connect) -> None:
        try:
            reader, writer = await connect()
        except (OSError, SkerryError) as error:
            await self._send(RESET, number, str(error).encode()[:PIECE])
        else:
            await self._serve(number, channel, reader, writer)
        finally:
            del self._channels[number]

    async def _serve(self, number: int, channel: _Channel, reader: StreamReader, writer: StreamWriter) -> None:
        channel.writer = writer
        well = False
        tasks = [
            asyncio.ensure_future(self._outward(number, channel, reader)),
            asyncio.ensure_future(self._inward(number, channel, writer)),
        ]
        try:
            await asyncio.gather(*tasks)
            well = not channel.over
        except (OSError, RuntimeError):
            pass  # the connection here broke, of which the other side is told below; uvloop raises RuntimeError, too
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await close(writer, reset=not well)
            if not well and not channel.over:
                await self._send(RESET, number)

    async def _outward(self, number: int, channel: _Channel, reader: StreamReader) -> None:
        while data := await reader.read(await channel.allowance()):
            channel.credit -= len(data)
            await self._send(DATA, number, data)
        channel.check()
        await self._send(END, number)

    async def _inward(self, number: int, channel: _Channel, writer: StreamWriter) -> None:
        while (data := await channel.next()) is not None:
            writer.write(data)
            await writer.drain()
            channel.held -= len(data)
            await self._send(TAKEN, number, _COUNT.pack(len(data)))
        writer.write_eof()

    # -- frames --------------------------------------------------------------------------------------------------------

    async def _send(self, kind: int, number: int, payload: bytes = b"") -> None:
        self._stir(False)
        await self._frames.send(_HEAD.pack(kind, number) + payload)

    async def _take(self, frame: bytes) -> None:
        if len(frame) < _HEAD.size:
            return
        self._stir(True)
        kind, number = _HEAD.unpack_from(frame)
        payload = frame[_HEAD.size :]
        channel = self._channels.get(number)
        if kind == OPEN:
            if self._connect is None or channel is not None or len(self._channels) >= CHANNELS:
                return await self._send(RESET, number)
            channel = self._channels[number] = _Channel()
            task = asyncio.get_running_loop().create_task(self._answer(number, channel, self._connect))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif channel is not None:
            channel.arrived(kind, payload)
            if kind == RESET and payload and self._told is not None:
                self._told(payload.decode(errors="replace"))


def _message(frame: str) -> dict[str, Any]:
    try:
        message = json.loads(frame)
    except ValueError:
        return {}
    return message if isinstance(message, dict) else {}


def _said(frame: bytes | str | None) -> SkerryError:
    """The error that a frame stands for which is not what was expected."""
    if frame is None:
        return ServerUnreachableError("The connection was closed before it was ready.")
    message = _message(frame) if isinstance(frame, str) else {}
    if message.get("type") == "error":
        return error_from_wire(500, {"error": message})
    return InvalidRequestError(
        "A frame came that has no meaning here.",
        hint='Data goes in binary frames, its end is the text {"type": "end"}.',
    )
