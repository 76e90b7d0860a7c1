"""Copies of the snapshot that was copied last, made while there is time.

Each takes the file system a write to the disk, one after the other. Who makes several sandboxes from a snapshot often
makes more of them, and those are then only given their names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from skerry.errors import SkerryError
from skerry.providers.local.disk import Disk


class Stock:
    def __init__(self, disk: Disk, size: int, remove: Callable[[Path], None]) -> None:
        self._disk = disk
        self._size = size
        self._remove = remove
        self._snapshot: str | None = None
        self._ready: list[Path] = []

    def take(self, snapshot: str) -> Path | None:
        """One of them, if there is one; from now on there are to be some."""
        if snapshot != self._snapshot:
            self.clear()
            self._snapshot = snapshot
        return self._ready.pop() if self._ready else None

    def forget(self, snapshot: str) -> None:
        """It is being deleted."""
        if snapshot == self._snapshot:
            self.clear()

    def clear(self) -> None:
        self._snapshot = None
        ready, self._ready = self._ready, []
        for path in ready:
            self._remove(path)

    async def fill(self) -> bool:
        """One more; whether there may be another to make."""
        snapshot = self._snapshot
        if snapshot is None or len(self._ready) >= self._size or self._disk.kind != "instant":
            return False
        try:
            copy = await asyncio.to_thread(self._disk.copy, snapshot)
        except SkerryError:  # it is gone, or there is no room: whoever wants one hears of it
            self.forget(snapshot)
            return False
        if snapshot != self._snapshot:
            self._remove(copy)
        else:
            self._ready.append(copy)
        return True
