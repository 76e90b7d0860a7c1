"""Machines without files, started in advance: to become a sandbox, one is given the files of that sandbox.

Most of what a start takes is the same for all: namespaces, a network, an init. What is left is to mount two overlays.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import structlog

from skerry.errors import SkerryError
from skerry.models import Limits
from skerry.providers.local.machine import LocalMachine

log = structlog.get_logger(__name__)

QUIET = 1.0
"""Seconds after the last start before more are made: whoever has just been given one has work to do."""
RETRY = 30.0

Key = tuple[int | None, int | None]


def kind_of(limits: Limits) -> Key:
    """What a machine is started with and keeps."""
    return limits.open_files, limits.tmpfs


class Spares:
    """``size`` of them, like the last that was asked for."""

    def __init__(
        self,
        size: int,
        make: Callable[[Limits], Awaitable[LocalMachine]],
        afterwards: Callable[[], Awaitable[bool]],
    ) -> None:
        """``afterwards`` is called again and again when all are there, until it says that there is nothing to do."""
        self._size = size
        self._make = make
        self._afterwards = afterwards
        self._like = Limits()
        self._ready: list[LocalMachine] = []
        self._busy_at = 0.0
        self._wanted = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None

    def open(self) -> None:
        if self._size and self._worker is None:
            self._wanted.set()
            self._worker = asyncio.get_running_loop().create_task(self._refill())

    def stir(self) -> None:
        """Something is being made from what there is."""
        self._busy_at = time.monotonic()
        self._wanted.set()

    def take(self, limits: Limits) -> LocalMachine | None:
        self.stir()
        self._like = limits
        fitting = (spare for spare in self._ready if kind_of(spare.started_with) == kind_of(limits))
        found = next(fitting, None)
        if found is not None:
            self._ready.remove(found)
        return found

    def lost(self, machine: LocalMachine) -> None:
        """One has ended before it was needed."""
        if machine in self._ready:
            self._ready.remove(machine)
            self._wanted.set()

    async def _refill(self) -> None:
        while True:
            await self._wanted.wait()
            left = self._busy_at + QUIET - time.monotonic()
            if left > 0:
                await asyncio.sleep(left)
                continue
            self._wanted.clear()
            for other in [spare for spare in self._ready if kind_of(spare.started_with) != kind_of(self._like)]:
                self._ready.remove(other)
                await other.stop()
            if len(self._ready) >= self._size:
                if await self._afterwards():
                    self._wanted.set()
                continue
            self._wanted.set()
            try:
                self._ready.append(await self._make(self._like))
            except SkerryError as error:
                log.warning("a spare machine could not be started", reason=error.message)
                await asyncio.sleep(RETRY)

    async def close(self) -> None:
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
            self._worker = None
        ready, self._ready = self._ready, []
        for spare in ready:
            await spare.stop()
