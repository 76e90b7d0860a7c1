"""Copies of the snapshot that was copied last, made while there is time, and machines that live on them.

Each copy takes the file system a write to the disk, one after the other, and each machine some mounts. Who makes
several sandboxes from a snapshot often makes more of them, and those are then only given their names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from skerry.errors import SkerryError
from skerry.models import Limits
from skerry.providers.contract import Spec
from skerry.providers.local.disk import Disk
from skerry.providers.local.machine import LocalMachine
from skerry.providers.local.spares import kind_of


@dataclass(frozen=True, slots=True)
class Settled:
    """A machine that lives on the files of nobody yet."""

    machine: LocalMachine
    shown: Sequence[tuple[str, str]]
    """The toolboxes that are seen in it, and where."""

    def suits(self, limits: Limits, shown: Sequence[tuple[str, str]]) -> bool:
        return kind_of(self.machine.started_with) == kind_of(limits) and self.shown == shown


@dataclass(frozen=True, slots=True)
class Copy:
    path: Path
    settled: Settled | None = None
    """Who lives on it."""


class Stock:
    def __init__(
        self,
        disk: Disk,
        size: int,
        settle: Callable[[str, Spec], Awaitable[Settled | None]],
        drop: Callable[[Copy], None],
    ) -> None:
        """``settle`` has a new machine live on a copy, by its name, as a sandbox that is started so would."""
        self._disk = disk
        self._size = size
        self._settle = settle
        self._drop = drop
        self._snapshot: str | None = None
        self._ready: list[Copy] = []
        self._given = set[str]()
        self._like: Spec | None = None

    def take(self, snapshot: str, id: str) -> Copy | None:
        """One of them for that sandbox, if there is one; from now on there are to be some, unless it is of a moment
        that is over when it has been copied."""
        if snapshot.startswith("."):
            return None
        if snapshot != self._snapshot:
            self.clear()
            self._snapshot = snapshot
        self._given.add(id)
        self._ready.sort(key=lambda copy: copy.settled is not None)
        return self._ready.pop() if self._ready else None

    def started(self, spec: Spec) -> None:
        """A sandbox is started so; if it is one of the copies, the others are expected to be started alike."""
        if spec.id in self._given:
            self._given.discard(spec.id)
            self._like = spec

    def forget(self, snapshot: str) -> None:
        """It is being deleted."""
        if snapshot == self._snapshot:
            self.clear()

    def clear(self) -> None:
        self._snapshot = self._like = None
        self._given.clear()
        ready, self._ready = self._ready, []
        for copy in ready:
            self._drop(copy)

    async def fill(self) -> bool:
        """One more copy, or one more machine; whether there may be another to make."""
        snapshot = self._snapshot
        if snapshot is None or self._disk.kind != "instant":
            return False
        if len(self._ready) < self._size:
            try:
                path = await asyncio.to_thread(self._disk.copy, snapshot)
            except SkerryError:  # it is gone, or there is no room: whoever wants one hears of it
                self.forget(snapshot)
                return False
            self._keep(Copy(path), snapshot)
            return True
        bare = next((copy for copy in self._ready if copy.settled is None), None)
        if bare is None or self._like is None:
            return False
        # Nobody is given it meanwhile: one of two overlays over the same files would spoil them.
        self._ready.remove(bare)
        settled = None
        try:
            settled = await self._settle(bare.path.name, self._like)
            if settled is None:
                self._like = None
        finally:
            self._keep(Copy(bare.path, settled), snapshot)
        return True

    def _keep(self, copy: Copy, snapshot: str) -> None:
        if snapshot == self._snapshot:
            self._ready.append(copy)
        else:
            self._drop(copy)
