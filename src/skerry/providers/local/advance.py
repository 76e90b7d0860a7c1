"""What is there before it is wanted: machines without files, copies of a snapshot, machines that live on those."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import structlog

from skerry.errors import SkerryError
from skerry.models import Limits
from skerry.providers.contract import Spec
from skerry.providers.local import bubblewrap
from skerry.providers.local.bubblewrap import hostname_of
from skerry.providers.local.controls import Controls
from skerry.providers.local.disk import Disk
from skerry.providers.local.images import HOST
from skerry.providers.local.machine import LocalMachine
from skerry.providers.local.spares import Spares
from skerry.providers.local.stock import Copy, Settled, Stock

if TYPE_CHECKING:
    from skerry.providers.local.provider import LocalProvider

log = structlog.get_logger(__name__)

_HOLD = "/.hold"
"""Where a machine that has no files yet sees what it can be given."""
_OUTFITTING = 10.0
"""Seconds: whoever does it may be killed before it answers."""


class Advance:
    """``size`` of each."""

    def __init__(self, provider: LocalProvider, disk: Disk, size: int) -> None:
        self._provider = provider
        self._disk = disk
        self.stock = Stock(disk, size, self._settle, self._drop)
        self.spares = Spares(size, self._spare, self.stock.fill)
        self._size = size
        self.settled: dict[str, Settled] = {}
        """Machines that live on the files of sandboxes which were not started yet."""
        self._leaving: dict[str, asyncio.Task[None]] = {}
        """Those of them that are being ended, for want of anybody who starts them."""

    def open(self) -> None:
        self.spares.open()

    async def close(self) -> None:
        await self.spares.close()
        self.stock.clear()
        await asyncio.gather(*self._leaving.values())

    # -- taking --------------------------------------------------------------------------------------------------------

    async def machine(self, spec: Spec) -> LocalMachine | None:
        """One that was started before it was wanted, as the one of this sandbox, if there is any that fits."""
        await self._left(spec.id)
        settled = self.settled.pop(spec.id, None)
        self.stock.started(spec)
        if settled is not None:
            found = settled.machine
            christen = partial(self._provider.launcher.christen, found.key, hostname_of(spec.id))
            if not settled.suits(spec.limits, self._provider.shown(spec)):
                await found.stop()
            elif await self._adapted(found, spec, christen):
                self.spares.stir()
                return found
        spare = self.spares.take(spec.limits)
        if spare is not None and await self._adapted(spare, spec, partial(self._outfit, spare, spec)):
            return spare
        return None

    async def clone(self, snapshot: str, id: str) -> None:
        """The files of a new sandbox, from a snapshot."""
        copy = self.stock.take(snapshot, id)
        self.spares.stir()
        if copy is None:
            return await asyncio.to_thread(self._disk.clone, snapshot, id)
        try:
            self._disk.clone(snapshot, id, copy.path)  # a rename: less than the way to a thread
        except BaseException:
            self._drop(copy)
            raise
        if copy.settled is not None:
            self.settled[id] = copy.settled
            if len(self.settled) > self._size:
                self._leave(next(iter(self.settled)))

    async def release(self, id: str) -> None:
        """Before something happens to the files of a sandbox that was not started: nobody lives on them."""
        self._leave(id)
        await self._left(id)

    def look(self, id: str) -> None:
        """Before its lock is taken: a machine does not see what another process has done to its files meanwhile."""
        if id in self.settled and not self._disk.was_ours(id):
            self._leave(id)

    def _leave(self, id: str) -> None:
        if (settled := self.settled.pop(id, None)) is not None:
            task = self._leaving[id] = asyncio.get_running_loop().create_task(settled.machine.stop())
            task.add_done_callback(lambda _: self._leaving.pop(id))

    async def _left(self, id: str) -> None:
        if (leaving := self._leaving.get(id)) is not None:
            await asyncio.shield(leaving)

    def forget(self, snapshot: str) -> None:
        """It is being deleted."""
        self.stock.forget(snapshot)

    async def _adapted(self, machine: LocalMachine, spec: Spec, work: Callable[[], Awaitable[None]]) -> bool:
        """Whether it is as this sandbox's should be once that is done; if not, it is gone."""
        try:
            self._disk.limit(spec.id, spec.limits.disk)
            async with asyncio.timeout(_OUTFITTING):
                await work()
            if spec.limits != machine.started_with and (group := self._provider.group(machine.key)) is not None:
                Controls(group).change(spec.limits)
            return True
        except BaseException as error:
            await machine.stop()
            if isinstance(error, (SkerryError, OSError)):
                log.info("a spare machine could not be used", sandbox=spec.id, reason=str(error))
                return False
            raise

    # -- making --------------------------------------------------------------------------------------------------------

    async def _spare(self, limits: Limits) -> LocalMachine:
        """A machine that has all but files, and is shown where those of sandboxes are until it is given some."""

        async def died(reason: str) -> None:
            self.spares.lost(machine)

        provider, paths = self._provider, self._provider.paths
        machine = LocalMachine(provider, f".spare-{secrets.token_hex(4)}", -1, limits, died)
        line = bubblewrap.arguments(
            hostname="spare",
            overlays=[],
            read_only=[(paths[name], f"{_HOLD}/{name}") for name in ("images", "usr", "toolboxes")],
            writable=[(paths["sandboxes"], f"{_HOLD}/sandboxes")],
            toolbox=[*provider.tools(), "--dir", f"{_HOLD}/root"],
            tmpfs=limits.tmpfs,
        )
        await provider.begin(machine, HOST, line, limits)
        try:
            await provider.launcher.attend(machine.key)
        except BaseException:
            await machine.stop()
            raise
        return machine

    async def _outfit(self, spare: LocalMachine, spec: Spec, *, stays: bool = False) -> None:
        """Give it the files of a sandbox."""
        provider = self._provider
        held = {path: f"{_HOLD}/{name}" for name, path in provider.paths.items()}

        def inside(path: str) -> str:
            """Where it sees a path of the launcher's."""
            found = max((known for known in held if path.startswith(known)), key=len)
            return held[found] + path.removeprefix(found)

        await provider.launcher.outfit(
            spare.key,
            stays=stays,
            root=f"{_HOLD}/root",
            hostname=hostname_of(spec.id),
            overlays=[(*map(inside, paths), target) for *paths, target in provider.layers(spec)],
            moved=["/proc", "/dev", "/run"],
            shown=[(inside(source), target) for source, target in provider.shown(spec)],
        )

    async def _settle(self, copy: str, like: Spec) -> Settled | None:
        """A new machine on the files of a copy of a snapshot, for a sandbox that is to be started like that one."""
        spec = replace(like, id=copy)
        try:
            os.close(await self._disk.acquire(copy))  # from now on it is known whether anybody else runs it
            shown, machine = self._provider.shown(spec), await self._spare(spec.limits)
        except SkerryError as error:
            log.warning("a machine on a copy could not be started", reason=error.message)
            return None
        work = partial(self._outfit, machine, spec, stays=True)
        return Settled(machine, shown) if await self._adapted(machine, spec, work) else None

    def _drop(self, copy: Copy) -> None:
        async def drop() -> None:
            if copy.settled is not None:
                await copy.settled.machine.stop()
            await asyncio.to_thread(self._disk.remove, copy.path)

        self._provider.chores.own(drop())
