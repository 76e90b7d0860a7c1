"""The way down into a tree, by the descriptor of each directory: no link is followed, and none is opened twice.

Whoever walks a tree in order asks for a directory near the last one. What both have in common stays open, so that a
tree as deep as it is large costs no more than a flat one; only so much of it that descriptors do not run out.
"""

from __future__ import annotations

import os
from typing import AnyStr, Generic

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_WINDOW = 128


class Trail(Generic[AnyStr]):
    def __init__(self, top: int) -> None:
        """``top`` stays the caller's."""
        self._open: dict[int, int] = {0: top}
        self._names: tuple[AnyStr, ...] = ()

    def open(self, parts: tuple[AnyStr, ...]) -> int:
        """The directory ``parts`` below the top; good until another one is asked for."""
        common = 0
        for mine, wanted in zip(self._names, parts, strict=False):
            if mine != wanted:
                break
            common += 1
        for depth in [depth for depth in self._open if depth > common]:
            os.close(self._open.pop(depth))
        start = max(self._open)
        # Said before, so that a failure on the way leaves nothing that does not belong to these names.
        self._names = parts
        for depth in range(start, len(parts)):
            self._open[depth + 1] = os.open(parts[depth], _DIRECTORY, dir_fd=self._open[depth])
            if depth + 1 - _WINDOW > 0 and depth + 1 - _WINDOW in self._open:
                os.close(self._open.pop(depth + 1 - _WINDOW))
        return self._open[len(parts)]

    def close(self) -> None:
        for depth, fd in self._open.items():
            if depth:
                os.close(fd)
        self._open = {0: self._open[0]}
        self._names = ()
