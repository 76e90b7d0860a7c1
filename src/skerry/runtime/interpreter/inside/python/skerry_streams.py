"""stdout and stderr of user code: a line leaves at once, part of a line soon after."""

from __future__ import annotations

import _thread
import contextlib
import io
import os
import sys
import time
from typing import Any

SOON = 0.04
"""Seconds that part of a line may wait for its end."""
QUIET = 25
"""How many times nothing had to be flushed before the thread ends."""


class Descriptor(io.BufferedIOBase):
    """Writes everything it is given to a descriptor, without a buffer of its own."""

    def __init__(self, fd: int, name: str) -> None:
        self._fd = fd
        self.name = name
        self.mode = "wb"
        self.count = 0

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return False

    def write(self, data: Any) -> int:
        with memoryview(data) as whole, whole.cast("B") as view:
            written = 0
            while written < len(view):
                written += os.write(self._fd, view[written:])
            self.count += written
            return written

    def close(self) -> None:
        """Nothing: closing ``sys.stdout.buffer`` would cut off everything that is printed later."""


class Stream(io.TextIOWrapper):
    """Text for a descriptor. Anything can be written: what UTF-8 cannot hold is escaped."""

    def __init__(self, fd: int, name: str, flusher: Flusher) -> None:
        self.descriptor = Descriptor(fd, name)
        super().__init__(self.descriptor, encoding="utf-8", errors="backslashreplace", line_buffering=True)
        self.__dict__["mode"] = "w"
        self._flusher = flusher
        flusher.streams.append(self)

    def write(self, text: str, /) -> int:
        count = super().write(text)
        # A line's end has flushed everything before it already.
        if text and not text.endswith("\n"):
            self._flusher.soon()
        return count

    def close(self) -> None:
        """Only flushes, as `Descriptor.close` does not close either."""
        self.flush()


class Flusher:
    """Flushes its streams a little later, from a thread that lives only while something is written now and then.

    Writing sets a flag and nothing more: waking a thread for every ``print`` would cost more than the printing.
    """

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self._waiting = False
        self._alive = False

    def soon(self) -> None:
        self._waiting = True
        if not self._alive:
            self._alive = True
            try:
                _thread.start_new_thread(self._watch, ())
            except RuntimeError:
                # No thread to be had: then at once.
                self._alive = False
                self.now()

    def now(self) -> None:
        self._waiting = False
        for stream in self.streams:
            # Whoever closed the descriptor, or the other side of it, wants no output.
            with contextlib.suppress(OSError, ValueError):
                stream.flush()

    def forked(self) -> None:
        """The thread is not part of a forked child."""
        self._alive = False

    def _watch(self) -> None:
        quiet = 0
        while quiet < QUIET:
            time.sleep(SOON)
            quiet += 1
            if self._waiting:
                quiet = 0
                self.now()
        self._alive = False
        # Between the last look and the line above somebody may have written and found the thread alive.
        if self._waiting:
            self.soon()


def install() -> Flusher:
    """Make `sys.stdout` and `sys.stderr` write to descriptors 1 and 2."""
    flusher = Flusher()
    sys.stdout = sys.__stdout__ = Stream(1, "<stdout>", flusher)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = Stream(2, "<stderr>", flusher)  # type: ignore[misc]
    return flusher
