"""Two connections tied together: what comes on one leaves on the other, until both have said all they had to say."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
from collections.abc import Awaitable, Callable

from skerry.egress.streams import Stream
from skerry.egress.turns import LARGE, Turn

CHUNK = 64 * 1024
PIPE_BYTES = 1 << 20
MOST_LARGE = 64
"""Pipes of that size at once; the next ones are as the kernel makes them, and slower."""
EVERYTHING = 1 << 62
BULK_AFTER = 256 * 1024
"""So many bytes in large reads, and the rest is moved by the kernel without passing through this process."""
BULK_READ = 16 * 1024
"""What a large read is. Full ones need not ever come: who reads as fast as the host writes finds a little each time."""
_FLAGS = os.SPLICE_F_MOVE | os.SPLICE_F_NONBLOCK

Count = Callable[[int], None]

_large: set[int] = set()


class Quiet(Exception):
    """Nothing moved for too long."""


class Watch:
    """When something last moved, in either direction."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self.last = self._loop.time()

    def stir(self) -> None:
        self.last = self._loop.time()

    async def expire(self) -> None:
        while (left := self.last + self._seconds - self._loop.time()) > 0:  # noqa: ASYNC110 - time itself is awaited
            await asyncio.sleep(left)


async def tie(first: Awaitable[None], second: Awaitable[None], watch: Watch) -> None:
    """Run both directions to their ends. One that fails ends the other; silence ends both."""
    directions = [asyncio.ensure_future(first), asyncio.ensure_future(second)]
    waiting = asyncio.ensure_future(watch.expire())
    try:
        pending = {*directions, waiting}
        while pending != {waiting}:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            if waiting in done:
                raise Quiet
            for task in done:
                task.result()
    finally:
        for task in (*directions, waiting):
            task.cancel()
        await asyncio.gather(*directions, waiting, return_exceptions=True)


async def move(source: Stream, target: Stream, watch: Watch) -> None:
    """One direction, between streams of any kind."""
    while data := await source.recv():
        watch.stir()
        await target.send(data)
    await target.finish()


async def splice(
    source: socket.socket, target: socket.socket, count: Count, watch: Watch, turn: Turn, size: int | None = None
) -> None:
    """One direction, between sockets: to the end, or ``size`` bytes, of which none may be missing."""
    loop = asyncio.get_running_loop()
    left = size if size is not None else EVERYTHING
    much = since = 0
    while left and much < BULK_AFTER:
        if since >= LARGE:
            since = 0
            await turn()
        data = await loop.sock_recv(source, min(CHUNK, left))
        if not data:
            break
        much = much + len(data) if len(data) >= BULK_READ else 0
        watch.stir()
        await loop.sock_sendall(target, data)
        count(len(data))
        left -= len(data)
        since += len(data)
    else:
        left = await _in_bulk(source, target, count, watch, turn, left)
    if size is None:
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)
    elif left:
        raise ConnectionResetError("it closed in the middle")


async def _in_bulk(
    source: socket.socket, target: socket.socket, count: Count, watch: Watch, turn: Turn, left: int
) -> int:
    outlet, inlet = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if len(_large) < MOST_LARGE:
            _large.add(inlet)
            with contextlib.suppress(OSError):  # an ordinary user has only so many pages for pipes
                fcntl.fcntl(inlet, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        while left:
            try:
                size = os.splice(source.fileno(), inlet, min(PIPE_BYTES, left), flags=_FLAGS)
            except BlockingIOError:
                await _until(source, "reader")
                continue
            if not size:
                break
            left -= size
            count(size)
            watch.stir()
            while size:
                try:
                    size -= os.splice(outlet, target.fileno(), size, flags=_FLAGS)
                except BlockingIOError:
                    await _until(target, "writer")
                    watch.stir()
            await turn()
        return left
    finally:
        _large.discard(inlet)
        os.close(outlet)
        os.close(inlet)


async def readable(*socks: socket.socket) -> set[socket.socket]:
    """Those that have something to read, as soon as there are any."""
    loop = asyncio.get_running_loop()
    ready: set[socket.socket] = set()
    future: asyncio.Future[None] = loop.create_future()

    def note(sock: socket.socket) -> None:
        ready.add(sock)
        _settle(future)

    for sock in socks:
        loop.add_reader(sock.fileno(), note, sock)
    try:
        await future
    finally:
        for sock in socks:
            loop.remove_reader(sock.fileno())
    return ready


async def _until(sock: socket.socket, ready: str) -> None:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()
    add, remove = (loop.add_reader, loop.remove_reader) if ready == "reader" else (loop.add_writer, loop.remove_writer)
    add(sock.fileno(), _settle, future)
    try:
        await future
    finally:
        remove(sock.fileno())


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
