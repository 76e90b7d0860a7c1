"""Reading and writing pipes, sockets and terminals without blocking the event loop.

Nothing here copies through asyncio streams: a descriptor is tried at once and waited for only when it is not ready.
Works on asyncio's own loop and on uvloop.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
from collections.abc import Callable
from typing import Literal

PIPE_SIZE = 1 << 20

_waiting: set[tuple[int, int, bool]] = set()


async def read_some(fd: int, size: int = 65536) -> bytes:
    """The next bytes of a non-blocking descriptor, at most ``size``; ``b""`` at the end. Cancelling loses nothing."""
    # Without this a producer that never pauses would keep its reader, and so the whole loop, from ever yielding. It
    # comes before the read, because bytes already read would be lost if the wait were cancelled.
    await asyncio.sleep(0)
    while True:
        try:
            return os.read(fd, size)
        except BlockingIOError:
            await _ready(fd, write=False)
        except OSError as error:
            # The last holder of a terminal's other side is gone.
            if error.errno == errno.EIO and os.isatty(fd):
                return b""
            raise


async def write_all(fd: int, data: bytes | bytearray | memoryview) -> None:
    """Write everything to a non-blocking descriptor; ``BrokenPipeError`` when nobody reads it any more."""
    rest = memoryview(data).cast("B")
    while rest:
        try:
            rest = rest[os.write(fd, rest) :]
        except BlockingIOError:
            await _ready(fd, write=True)


def pipe(ours: Literal["read", "write", "both"] | None = "read", size: int = PIPE_SIZE) -> tuple[int, int]:
    """A close-on-exec pipe ``(read, write)`` whose ends named by ``ours`` are non-blocking; larger where allowed."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    if ours in ("read", "both"):
        os.set_blocking(reader, False)
    if ours in ("write", "both"):
        os.set_blocking(writer, False)
    try:
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, size)
    except OSError as error:
        # Users other than root may hold only so much pipe memory; the default size works too.
        if error.errno not in (errno.EPERM, errno.EBUSY, errno.EINVAL):
            os.close(reader)
            os.close(writer)
            raise
    return reader, writer


async def _ready(fd: int, *, write: bool) -> None:
    loop = asyncio.get_running_loop()
    key = (id(loop), fd, write)
    if key in _waiting:
        # add_reader would silently replace the first waiter, which then never wakes.
        raise RuntimeError(f"Descriptor {fd} is already being waited for.")
    add: Callable[..., None] = loop.add_writer if write else loop.add_reader
    remove: Callable[[int], bool] = loop.remove_writer if write else loop.remove_reader
    done: asyncio.Future[None] = loop.create_future()
    add(fd, _wake, done)
    _waiting.add(key)
    try:
        await done
    finally:
        _waiting.discard(key)
        remove(fd)


def _wake(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)
