"""When an interrupt (SIGINT) becomes a KeyboardInterrupt: while user code runs, and at no other time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import selectors
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

AGAIN = 1.0
"""Seconds in which a second interrupt of the same run counts as the first one.

A signal that comes just before the code waits for something is seen only after the waiting. Whoever interrupts has to
send it again until the run is over, and that must not disturb code that is tidying up already.
"""

LOOP = (os.path.dirname(asyncio.__file__) + os.sep, selectors.__file__)
"""Files whose code is the event loop."""


class Interrupts:
    """Owns the handler of SIGINT. User code may install one of its own; that one is there whenever user code runs.

    Between two bytecodes Python may run the handler. Everything here is therefore a plain flag: storing one cannot
    itself be interrupted, so there is no moment at which an interrupt gets lost or hits what it was not meant for.
    """

    def __init__(self) -> None:
        self._running = False
        self._reading = False
        self._held = False
        self._noted = False
        self._theirs: Any = None
        self._thread = threading.get_ident()
        self._ours = self._handle
        self._raised = -AGAIN
        signal.signal(signal.SIGINT, self._ours)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._running and not self._held:
            self._interrupt(frame)
            return
        if self._running or self._reading:
            self._noted = True

    def _interrupt(self, frame: FrameType | None = None) -> None:
        now = time.monotonic()
        if now - self._raised < AGAIN:
            return
        self._raised = now
        loop = asyncio._get_running_loop()
        if loop is None or frame is None or not frame.f_code.co_filename.startswith(LOOP):
            raise KeyboardInterrupt
        # In the middle of the loop's own work it would lose the task that was to run next, and waiting for that one
        # would never end. As a callback it comes between two of them.
        loop.call_soon_threadsafe(self._throw)

    def _throw(self) -> None:
        if self._running:
            raise KeyboardInterrupt

    def reading(self) -> None:
        """From now on an interrupt is meant for the run that is being read."""
        self._noted = False
        self._reading = True

    def begin(self) -> None:
        """User code starts; raises if the interrupt has come already."""
        if self._theirs is not None:
            signal.signal(signal.SIGINT, self._theirs)
        self._raised = -AGAIN
        self._running = True
        self._reading = False
        if self._noted:
            self._noted = False
            self._interrupt()

    def end(self) -> None:
        """User code has ended; call it first thing, in a ``finally``."""
        self._running = self._reading = self._noted = False
        current = signal.getsignal(signal.SIGINT)
        if current is self._ours:
            self._theirs = None
        else:
            self._theirs = current
            with contextlib.suppress(KeyboardInterrupt):
                signal.signal(signal.SIGINT, self._ours)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Around what must not be left half done in the middle of user code; the interrupt follows after it."""
        if threading.get_ident() != self._thread:
            # Handlers run in the main thread alone.
            yield
            return
        before = self._held
        self._held = True
        try:
            yield
        finally:
            self._held = before
            if self._noted and self._running and not before:
                self._noted = False
                self._interrupt()
