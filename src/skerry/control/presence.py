"""Someone who is connected to a sandbox, for as long as the connection lasts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from skerry.control.owner import Owner


class Presence:
    """Someone who is connected to a sandbox: counts as its user while something happens, not while all is quiet."""

    def __init__(self, find: Callable[[], Owner | None], quiet: float, rouse: Callable[[], None] | None) -> None:
        self._find = find
        self._quiet = quiet
        self._rouse = rouse
        self._loop = asyncio.get_running_loop()
        self._last = 0.0
        self._owner: Owner | None = None
        self._timer: asyncio.TimerHandle | None = None

    def stir(self, inward: bool = False) -> None:
        """Something happens; cheap enough for every piece of data.

        A sandbox that sleeps is left to sleep, but what comes in for a frozen one thaws it where that is allowed: the
        connection is still there, and so is the program at its other end.
        """
        self._last = self._loop.time()
        if self._owner is not None and (self._owner.gone or not self._owner.awake):
            self.close()
        if self._owner is None and (owner := self._find()) is not None:
            if owner.awake:
                self._owner = owner
                owner.connections += 1
                self._timer = self._loop.call_later(self._quiet, self._look)
            elif inward and owner.frozen and self._rouse is not None:
                self._rouse()

    def close(self) -> None:
        if self._timer is not None and self._owner is not None:
            self._timer.cancel()
            self._owner.connections -= 1
            self._owner.touch()
            self._timer = self._owner = None

    def _look(self) -> None:
        left = self._last + self._quiet - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._look)
        else:
            self.close()
