"""Large bodies between two sockets without a detour through Python: the kernel moves them by itself.

Only a body of known length goes this way, after its head and whatever came along with it were sent as usual, so that
where it ends is as clear as before. What the client does not take stays in the sockets.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING
from weakref import ref

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

LARGE = 1 << 20
"""What is shorter is not worth the descriptors."""
_PIPE = 1 << 20
_FLAGS = os.SPLICE_F_MOVE | os.SPLICE_F_NONBLOCK


class Wire:
    """The client's connection, below the response that Uvicorn sends on it."""

    def __init__(self, cycle: RequestResponseCycle, patience: float) -> None:
        self._cycle = ref(cycle)  # which holds the scope that holds this
        self.patience = patience

    def prepare(self) -> bool:
        """Before the head is sent. Whether the body may go this way."""
        cycle = self._cycle()
        if cycle is None or cycle.transport.is_closing() or cycle.transport.get_extra_info("sslcontext") is not None:
            return False
        # From now on a writer waits until everything written is with the kernel.
        cycle.transport.set_write_buffer_limits(high=0)
        return True

    async def descriptor(self) -> int | None:
        """The connection's own, to be closed by the caller, when nothing waits to be written on it any more."""
        cycle = self._cycle()
        if cycle is None:
            return None
        await cycle.flow.drain()
        transport = cycle.transport
        if cycle.disconnected or cycle.chunked_encoding or transport.is_closing():
            return None
        transport.set_write_buffer_limits()
        if transport.get_write_buffer_size():
            return None
        return os.dup(transport.get_extra_info("socket").fileno())

    def sent(self, size: int) -> None:
        """Uvicorn counts what of the announced length is still missing."""
        cycle = self._cycle()
        if cycle is not None:
            cycle.expected_content_length -= size


class Unspliceable(Exception):
    """The kernel does not do it for these two; nothing was moved."""


class Splice:
    """Moves bytes from one socket to another, which takes some within ``patience`` seconds.

    ``over`` says that somebody else ended it; who does calls ``wake``.
    """

    def __init__(
        self, source: int, target: int, moved: Callable[[int], None], over: Callable[[], bool], patience: float
    ) -> None:
        self._source, self._target = source, target
        self._patience = patience
        self._moved, self._over = moved, over
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def run(self, size: int) -> int:
        """How many bytes were moved: fewer than ``size`` if the source ended. Raises OSError of either socket."""
        left = size
        with ExitStack() as stack:
            out, into = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            stack.callback(os.close, out)
            stack.callback(os.close, into)
            room = _enlarged(into)
            while left and not self._over():
                try:
                    count = os.splice(self._source, into, min(left, room), flags=_FLAGS)
                except BlockingIOError:
                    await self._ready(self._loop.add_reader, self._loop.remove_reader, self._source)
                    continue
                except OSError as error:
                    if left == size:
                        raise Unspliceable from error
                    raise
                if not count:
                    break
                await self._empty(out, count)
                left -= count
                await asyncio.sleep(0)  # others have their turn
        return size - left

    async def _empty(self, out: int, count: int) -> None:
        while count and not self._over():
            try:
                sent = os.splice(out, self._target, count, flags=_FLAGS)
            except BlockingIOError:
                async with asyncio.timeout(self._patience):  # whose end is an OSError as well
                    await self._ready(self._loop.add_writer, self._loop.remove_writer, self._target)
                continue
            count -= sent
            self._moved(sent)

    async def _ready(self, add: Callable[..., object], remove: Callable[[int], object], descriptor: int) -> None:
        self._waiter = self._loop.create_future()
        add(descriptor, self.wake)
        try:
            await self._waiter
        finally:
            remove(descriptor)
            self._waiter = None


def _enlarged(pipe: int) -> int:
    """How much the pipe holds. Few large moves cost less than many small ones."""
    try:
        return fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE)
    except OSError:
        return fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ)
