"""One of those who look at a terminal: what it has not been shown yet, and never more than it can hold."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from skerry.errors import SkerryError

HELD = 256 * 1024
_AT_ONCE = 64 * 1024


@dataclass(frozen=True, slots=True)
class Screen:
    """Begin anew with this: the scrollback, for a viewer who just came or who fell behind."""

    data: bytes
    behind: bool = False


@dataclass(frozen=True, slots=True)
class Size:
    cols: int
    rows: int


@dataclass(frozen=True, slots=True)
class End:
    """The shell ended with an exit code, or was taken away."""

    code: int | None
    error: SkerryError | None = None


Shown = bytes | Screen | Size | End


class Viewer:
    """Made by ``Terminal.attach``. Who reads too slowly is shown the scrollback again, in place of what it missed."""

    def __init__(self, screen: Callable[[], bytes], drained: Callable[[], None]) -> None:
        self._screen = screen
        self._drained = drained
        self._pieces: deque[bytes | Size | End] = deque()
        self._held = 0
        self._fresh = True
        self._behind = False
        self._wake = asyncio.Event()

    @property
    def full(self) -> bool:
        return self._held >= HELD

    def offer(self, piece: bytes | Size | End) -> None:
        if isinstance(piece, bytes):
            if self._fresh or self._behind:
                return  # it will be in the scrollback
            if self.full:
                self.fall_behind()
                return
            self._held += len(piece)
        self._pieces.append(piece)
        self._wake.set()

    def fall_behind(self) -> None:
        self._behind = True
        self._pieces = deque(piece for piece in self._pieces if not isinstance(piece, bytes))
        self._held = 0
        self._wake.set()

    async def next(self) -> Shown:
        """What to show next: the scrollback first, an ``End`` last."""
        while True:
            if self._fresh or self._behind:
                behind, self._fresh, self._behind = self._behind, False, False
                self._drained()
                return Screen(self._screen(), behind)
            if self._pieces:
                return self._take()
            self._wake.clear()
            await self._wake.wait()

    def _take(self) -> Shown:
        first = self._pieces.popleft()
        if not isinstance(first, bytes):
            return first
        joined, size = [first], len(first)
        while self._pieces and isinstance(piece := self._pieces[0], bytes) and size + len(piece) <= _AT_ONCE:
            joined.append(piece)
            size += len(piece)
            self._pieces.popleft()
        self._held -= size
        self._drained()
        return b"".join(joined) if len(joined) > 1 else first
