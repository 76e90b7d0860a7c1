"""Sandboxes that Modal runs. What is stopped there is gone, so its files are kept as an image and come back from it.

``<home>/modal`` holds, for each sandbox, its id there or the image of its files, and for each snapshot its image.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import structlog

from skerry.errors import (
    SandboxExistsError,
    SandboxLostError,
    SkerryError,
    SnapshotError,
    SnapshotNotFoundError,
)
from skerry.models import ImageInfo
from skerry.providers.cloudflare.ids import Remote
from skerry.providers.cloudflare.provider import IMAGE, BridgeMachine, BridgeProvider
from skerry.providers.contract import Capabilities, Machine, Spec
from skerry.providers.modal.cloud import ModalCloud
from skerry.settings import Settings

log = structlog.get_logger(__name__)

UNHELD = "Modal holds sandboxes to memory and processors, and to nothing else."
RESTING = "image:"
"""What the id of a sandbox that does not run begins with; the rest is the image of its files."""


class ModalMachine(BridgeMachine):
    async def stop(self, grace: float = 0.0) -> None:
        """Its files become an image before Modal ends it; a sandbox that cannot be kept so goes on there."""
        assert isinstance(self._provider, ModalProvider)
        already, self._over = self._over, True
        try:
            if grace:
                await self.portal.end(grace)
            await self.portal.close()
            if not already:
                await self._provider.rest(self.portal.id)
        except SkerryError as error:
            log.warning("a sandbox of Modal could not be put to rest, and goes on there", reason=error.message)
        finally:
            self.release()


class ModalProvider(BridgeProvider):
    name = "modal"
    what = "Modal"
    machine = ModalMachine

    def __init__(self, settings: Settings, package: Any = None) -> None:
        super().__init__(settings)
        self._package = package
        self._folder = settings.home / "modal" / "snapshots"

    @property
    def _cloud(self) -> ModalCloud:
        assert isinstance(self._bridge, ModalCloud)
        return self._bridge

    def capabilities(self) -> Capabilities:
        return Capabilities(
            name="modal",
            snapshots="copy",
            freeze="none",
            mounts=False,
            egress=False,
            unheld=dict.fromkeys(("pids", "open_files", "disk", "tmpfs"), UNHELD),
            details={"app": self._settings.modal_app, "lifetime": self._settings.modal_lifetime},
        )

    def _connect(self) -> ModalCloud:
        return ModalCloud(self._settings, self._package)

    async def open(self) -> None:
        await super().open()
        self._folder.mkdir(exist_ok=True)

    # -- rest and return -----------------------------------------------------------------------------------------------

    async def rest(self, remote: str) -> None:
        for id in self._ids.all():
            found = self._ids.find(id)
            if found is not None and found.id == remote:
                image = await self._cloud.snapshot(remote)
                self._ids.keep(id, Remote(RESTING + image, found.url, found.machine))
                await self._cloud.delete(remote)

    async def start(self, spec: Spec, died: Callable[[str], Awaitable[None]]) -> Machine:
        """One that rests is made anew from the image of its files."""
        remote = self._ids.find(spec.id)
        if remote is not None and remote.id.startswith(RESTING):
            made = await self._cloud.create(spec, remote.id.removeprefix(RESTING))
            self._ids.keep(spec.id, Remote(made, remote.url, remote.machine))
        machine = await super().start(spec, died)
        assert isinstance(machine, ModalMachine)
        self._cloud.watched[machine.portal.id] = machine.lost
        return machine

    async def exists(self, id: str) -> bool:
        remote = self._ids.find(id)
        if remote is None or remote.url != self._bridge.url:
            return False
        if remote.id.startswith(RESTING):
            return True
        try:
            return await self._cloud.running(remote.id) and await super().exists(id)
        except SandboxLostError:
            return False

    async def _clear(self) -> None:
        for remote in self._ids.discarded():
            if remote.id.startswith(RESTING):
                self._ids.cleared(remote)  # images that nobody names are Modal's to remove
        await super()._clear()

    # -- snapshots -----------------------------------------------------------------------------------------------------

    def _record(self, snapshot: str) -> Path:
        return self._folder / f"{snapshot}.json"

    async def snapshot(
        self, id: str, snapshot: str, machine: Machine | None = None, previous: str | None = None
    ) -> None:
        remote = self._ids.find(id)
        if remote is None:
            raise SnapshotError(f"Sandbox {id!r} was never started, and on Modal there is nothing of it to keep.")
        resting = remote.id.startswith(RESTING)
        image = remote.id.removeprefix(RESTING) if resting else await self._cloud.snapshot(remote.id)
        fresh = self._record(f".{snapshot}.{secrets.token_hex(4)}")
        await asyncio.to_thread(fresh.write_text, json.dumps({"image": image, "machine": remote.machine}))
        os.replace(fresh, self._record(snapshot))

    def _read(self, snapshot: str) -> tuple[str, str]:
        try:
            facts = json.loads(self._record(snapshot).read_text())
            return facts["image"], facts["machine"]
        except FileNotFoundError:
            raise SnapshotNotFoundError(f"The files of snapshot {snapshot!r} are missing.") from None

    async def clone(self, snapshot: str, id: str) -> None:
        image, machine = self._read(snapshot)
        if self._ids.find(id) is not None:
            raise SandboxExistsError(
                f"Sandbox {id!r} already has files.", hint="Destroy it first, or choose another id."
            )
        self._ids.keep(id, Remote(RESTING + image, self._bridge.url, machine))

    async def restore(self, snapshot: str, id: str, stop: Callable[[], Awaitable[None]]) -> None:
        image, machine = self._read(snapshot)
        await stop()
        old = self._ids.find(id)
        self._ids.keep(id, Remote(RESTING + image, self._bridge.url, machine))
        if old is not None and not old.id.startswith(RESTING):
            with contextlib.suppress(SkerryError):
                await self._cloud.delete(old.id)

    async def remove_snapshot(self, snapshot: str) -> None:
        self._record(snapshot).unlink(missing_ok=True)

    async def snapshots(self) -> set[str]:
        return {path.stem for path in self._folder.glob("*.json") if not path.name.startswith(".")}

    async def sweep(self, keep: set[str], snapshots: set[str]) -> list[str]:
        removed = []
        if self.alone:
            for left in await self.snapshots() - snapshots:
                await self.remove_snapshot(left)
                removed.append(f"snapshot {left} of Modal")
        return removed + await super().sweep(keep, snapshots)

    async def images(self) -> list[ImageInfo]:
        source = self._settings.modal_image or "Modal's Debian, with Python and git"
        return [ImageInfo(name=IMAGE, size=0, source=source)]
