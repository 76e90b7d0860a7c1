"""Where a command's output goes: pumps that read descriptors as they fill, and the places that keep what they read."""

from __future__ import annotations

import asyncio
import fcntl
import os
import tempfile
import termios
import time
from collections.abc import Callable
from typing import IO

from skerry.runtime.flow import Flow

CHUNK = 256 * 1024
MEMORY = 1 << 20
RESULT_LIMIT = 32 << 20
DRAIN_PAUSE = 0.01


class Pump:
    """Reads a non-blocking descriptor whenever it is readable and hands the bytes to ``sink``.

    ``pause`` leaves the bytes in the pipe, so that the writer inside waits: a slow reader slows only its own command.
    The pump owns the descriptor and closes it at the end of the data. ``flow`` bounds the time that is spent on it.
    """

    def __init__(self, fd: int, sink: Callable[[bytes], None], flow: Flow | None = None) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._loop = asyncio.get_running_loop()
        self._fd = fd
        self._sink = sink
        self.flow = flow
        self._reading = False
        self._rest: asyncio.TimerHandle | None = None
        self.resume()

    def resume(self) -> None:
        if self._fd >= 0 and not self._reading and self._rest is None:
            self._reading = True
            self._loop.add_reader(self._fd, self._readable)

    def pause(self) -> None:
        if self._rest is not None:
            self._rest.cancel()
            self._rest = None
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._fd)

    def _readable(self) -> None:
        if self.flow is None:
            self._read(CHUNK)
            return
        began = time.thread_time()
        count = self._read(CHUNK)
        delay = self.flow.spend(time.thread_time() - began, count)
        if delay and self._reading:
            self.pause()
            self._rest = self._loop.call_later(delay, self._rested)

    def _rested(self) -> None:
        self._rest = None
        self.resume()

    def _read(self, size: int) -> int:
        try:
            data = os.read(self._fd, size)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            data = b""
        if data:
            self._sink(data)
        else:
            self.close()
        return len(data)

    def pending(self) -> int:
        """How many bytes wait in the pipe now."""
        if self._fd < 0:
            return 0
        count = fcntl.ioctl(self._fd, termios.FIONREAD, b"\0\0\0\0")
        return int.from_bytes(count, "little")

    def drain(self) -> None:
        """Read what is there now, and not a byte that a background child adds meanwhile."""
        left = self.pending()
        while left > 0 and self._fd >= 0:
            count = self._read(min(left, CHUNK))
            if count == 0:
                break
            left -= count

    def settle(self) -> None:
        """The command has ended: take what it wrote. What still comes is from its background children, who must not die
        of a broken pipe; it is read, into nothing."""
        self.drain()
        if self._fd >= 0:
            self.pause()
            self._sink = _nothing
            self._discard()

    def abandon(self) -> None:
        """Read on, into nothing, from the moment there is something to read. Not before: a FIFO that nobody has opened
        for writing yet looks as if it were at its end, and closing it would leave that writer waiting for ever."""
        if self._fd >= 0:
            self.pause()
            self._sink = _nothing
            self._await_more()

    def _discard(self) -> None:
        if self._fd < 0:
            return
        # At most one pipe's worth per turn: nobody wants these bytes, so they may cost next to nothing.
        count = self._read(MEMORY)
        if self._fd >= 0:
            if count == 0:
                self._await_more()
            else:
                self._loop.call_later(DRAIN_PAUSE, self._discard)

    def _await_more(self) -> None:
        self._reading = True
        self._loop.add_reader(self._fd, self._discard_later)

    def _discard_later(self) -> None:
        self.pause()
        self._loop.call_later(DRAIN_PAUSE, self._discard)

    def close(self) -> None:
        if self._fd >= 0:
            self.pause()
            os.close(self._fd)
            self._fd = -1
        if not self.ended.done():
            self.ended.set_result(None)


def _nothing(data: bytes) -> None:
    return None


class Capture:
    """Keeps output up to a limit: a little in memory, more in an unnamed file; counts what it had to leave out."""

    def __init__(self, limit: int = RESULT_LIMIT) -> None:
        self._file: IO[bytes] = tempfile.SpooledTemporaryFile(max_size=MEMORY)  # noqa: SIM115
        self._left = limit
        self.dropped = 0

    def add(self, data: bytes) -> None:
        kept = data[: self._left] if len(data) > self._left else data
        self._file.write(kept)
        self._left -= len(kept)
        self.dropped += len(data) - len(kept)

    def take(self) -> bytes:
        """Everything that was kept; the capture is spent."""
        with self._file as file:
            file.seek(0)
            return file.read()

    def close(self) -> None:
        self._file.close()
