"""One server, several providers: each sandbox lives where it was asked for, and all others at the usual place.

Where a sandbox or snapshot is that does not live at the usual place is written to a small file in the home before it is
made. A provider that is needed is opened then; one that cannot be reached harms only the sandboxes it has.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog

from skerry.errors import (
    ConflictError,
    HostUnfitError,
    ImageNotFoundError,
    ProviderError,
    SkerryError,
    UnsupportedError,
)
from skerry.models import ImageInfo
from skerry.providers.contract import Capabilities, Changes, Machine, Provider, Spec, elsewhere

log = structlog.get_logger(__name__)


class Places:
    """Who has what, in files; the usual place is not written down."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def open(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def find(self, name: str) -> str | None:
        try:
            return (self._folder / name).read_text()
        except FileNotFoundError:
            return None

    def keep(self, name: str, provider: str) -> None:
        fresh = self._folder / f"{name}~"
        with open(fresh, "w") as file:
            file.write(provider)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, self._folder / name)
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def forget(self, name: str) -> None:
        (self._folder / name).unlink(missing_ok=True)

    def all(self) -> dict[str, str]:
        names = [path.name for path in self._folder.iterdir() if not path.name.endswith("~")]
        return {name: found for name in names if (found := self.find(name)) is not None}


class SeveralProviders:
    def __init__(self, home: Path, name: str, usual: Provider, others: Mapping[str, Callable[[], Provider]]) -> None:
        self._name = name
        self._usual = usual
        self._others = others
        self._opened: dict[str, Provider] = {}
        self._opening = asyncio.Lock()
        self._sandboxes = Places(home / "places" / "sandboxes")
        self._snapshots = Places(home / "places" / "snapshots")

    @property
    def alone(self) -> bool:
        return self._usual.alone

    def capabilities(self) -> Capabilities:
        """Of the usual place, without what some other one cannot hold."""
        can = self._usual.capabilities()
        unheld = {
            kind: why for provider in self._opened.values() for kind, why in provider.capabilities().unheld.items()
        }
        return replace(can, unheld={**unheld, **can.unheld}, details={**can.details, "providers": [*self._names()]})

    def _names(self) -> list[str]:
        return [self._name, *self._others]

    async def place(self, id: str, provider: str | None) -> None:
        if provider is None or provider == self._name:
            return
        there = await self._provider(provider)
        if not there.capabilities().egress:
            raise UnsupportedError(
                f"Sandboxes of {provider} have no door at which this server could hold its egress policy.",
                hint=f"Use a server whose own provider is {provider}.",
            )
        self._sandboxes.keep(id, provider)

    def place_of(self, id: str) -> str:
        return self._sandboxes.find(id) or self._name

    def place_of_snapshot(self, snapshot: str) -> str:
        return self._snapshots.find(snapshot) or self._name

    async def _provider(self, name: str) -> Provider:
        if name not in self._others:
            raise elsewhere(name, self._names())
        async with self._opening:
            if name not in self._opened:
                made = self._others[name]()
                await made.open()
                self._opened[name] = made
            return self._opened[name]

    async def _of(self, id: str) -> Provider:
        name = self._sandboxes.find(id)
        return self._usual if name is None else await self._provider(name)

    async def _of_snapshot(self, snapshot: str) -> Provider:
        name = self._snapshots.find(snapshot)
        return self._usual if name is None else await self._provider(name)

    # -- opening and closing -------------------------------------------------------------------------------------------

    async def open(self) -> None:
        await self._usual.open()
        self._sandboxes.open()
        self._snapshots.open()
        for name in sorted({*self._sandboxes.all().values(), *self._snapshots.all().values()}):
            try:
                await self._provider(name)
            except (ProviderError, HostUnfitError, ImageNotFoundError) as error:
                log.warning(
                    "a provider cannot be used now; its sandboxes cannot be", provider=name, reason=error.message
                )

    async def close(self) -> None:
        for provider in self._opened.values():
            await provider.close()
        self._opened.clear()
        await self._usual.close()

    async def sweep(self, keep: set[str], snapshots: set[str]) -> list[str]:
        for places, kept in ((self._sandboxes, keep), (self._snapshots, snapshots)):
            for name in places.all().keys() - kept:
                places.forget(name)
        boxes, images = self._sandboxes.all(), self._snapshots.all()
        removed = await self._usual.sweep(keep - boxes.keys(), snapshots - images.keys())
        for name, provider in self._opened.items():
            own = {id for id, place in boxes.items() if place == name}
            try:
                removed += await provider.sweep(own, {id for id, place in images.items() if place == name})
            except ProviderError as error:
                log.warning("a provider could not be swept", provider=name, reason=error.message)
        return removed

    # -- machines ------------------------------------------------------------------------------------------------------

    async def start(self, spec: Spec, died: Callable[[str], Awaitable[None]]) -> Machine:
        return await (await self._of(spec.id)).start(spec, died)

    async def rename(self, machine: Machine, id: str) -> None:
        """Only machines of the usual place are started in advance."""
        await self._usual.rename(machine, id)

    async def require_idle(self, id: str) -> None:
        try:
            provider = await self._of(id)
        except SkerryError:
            return  # who cannot be asked will say so when the machine is wanted
        await provider.require_idle(id)

    async def exists(self, id: str) -> bool:
        return await (await self._of(id)).exists(id)

    async def forget(self, id: str) -> None:
        try:
            await (await self._of(id)).forget(id)
        except (ProviderError, HostUnfitError) as error:
            # Nobody owns it any more, so it is swept when that provider is next opened.
            log.warning("a provider could not be told to forget a sandbox", sandbox=id, reason=error.message)
        self._sandboxes.forget(id)

    def full(self) -> bool:
        return self._usual.full()

    async def make_room(self, size: int) -> None:
        await self._usual.make_room(size)

    # -- snapshots -----------------------------------------------------------------------------------------------------

    async def snapshot(
        self, id: str, snapshot: str, machine: Machine | None = None, previous: str | None = None
    ) -> None:
        name = self._sandboxes.find(id)
        if name is not None:
            self._snapshots.keep(snapshot, name)
        await (await self._of(id)).snapshot(id, snapshot, machine, previous)

    async def clone(self, snapshot: str, id: str) -> None:
        there = self._snapshots.find(snapshot)
        if there is not None:
            self._sandboxes.keep(id, there)
        await (await self._of_snapshot(snapshot)).clone(snapshot, id)

    async def restore(self, snapshot: str, id: str, stop: Callable[[], Awaitable[None]]) -> None:
        if self._snapshots.find(snapshot) != self._sandboxes.find(id):
            raise ConflictError("The snapshot and the sandbox are on different providers.")
        await (await self._of(id)).restore(snapshot, id, stop)

    async def remove_snapshot(self, snapshot: str) -> None:
        try:
            await (await self._of_snapshot(snapshot)).remove_snapshot(snapshot)
        except (ProviderError, HostUnfitError) as error:
            log.warning("a provider could not be told to remove a snapshot", snapshot=snapshot, reason=error.message)
        self._snapshots.forget(snapshot)

    async def snapshots(self) -> set[str]:
        found = await self._usual.snapshots()
        for provider in self._opened.values():
            found |= await provider.snapshots()
        return found

    async def deleted(self, id: str, image: str) -> list[str]:
        return await (await self._of(id)).deleted(id, image)

    def changes(self, image: str, before: str | None, after: str, *, kin: bool = False) -> Changes:
        name = self._snapshots.find(after)
        if before is not None and self._snapshots.find(before) != name:
            raise ConflictError("The two snapshots are on different providers.")
        if name is not None and name not in self._opened:
            raise elsewhere(name, self._names())
        provider = self._usual if name is None else self._opened[name]
        return provider.changes(image, before, after, kin=kin)

    # -- images and toolboxes ------------------------------------------------------------------------------------------

    async def images(self) -> list[ImageInfo]:
        found = {one.name: one for provider in self._all() for one in await provider.images()}
        return list({**found, **{one.name: one for one in await self._usual.images()}}.values())

    def _all(self) -> list[Any]:
        return [*self._opened.values(), self._usual]

    async def require_image(self, name: str, provider: str | None = None) -> None:
        if provider is not None:
            there = self._usual if provider == self._name else await self._provider(provider)
            return await there.require_image(name)
        problem: ImageNotFoundError | None = None
        for one in (self._usual, *self._opened.values()):
            try:
                return await one.require_image(name)
            except ImageNotFoundError as error:
                problem = problem or error
        assert problem is not None
        raise problem

    async def require_toolbox(self, name: str) -> None:
        await self._usual.require_toolbox(name)

    async def import_image(
        self, name: str, source: str, progress: Callable[[int], None] | None = None, label: str | None = None
    ) -> ImageInfo:
        return await self._usual.import_image(name, source, progress, label)

    async def remove_image(self, name: str) -> None:
        await self._usual.remove_image(name)
