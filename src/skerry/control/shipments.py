"""Sandboxes that went to sleep in a bucket, so that another server can wake them, with its own disk under them.

One that was shipped is woken by one server only: the first to put its mark on it. The one that shipped it has the files
still and needs only the mark; any other brings them from the bucket first. A machine whose files could not be brought
is not woken at all.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import structlog

from skerry.control.backups import SandboxBackups
from skerry.control.events import Events
from skerry.control.identity import LOCAL
from skerry.control.store import SandboxRow
from skerry.errors import ConflictError, SkerryError
from skerry.models import State, now
from skerry.portal.contract import Portal
from skerry.providers.contract import Provider, Spec

if TYPE_CHECKING:
    from skerry.control.owner import Owner
    from skerry.storage.shipping import Record

log = structlog.get_logger(__name__)

SETTINGS = (
    "image",
    "env",
    "labels",
    "limits",
    "sleep_after",
    "keep_alive",
    "on_idle",
    "hibernate_after",
    "egress",
    "toolboxes",
)


class Shipments:
    def __init__(
        self,
        provider: Provider,
        backups: SandboxBackups,
        history: Events,
        node: Callable[[], str],
        always: str | None,
    ) -> None:
        self._provider = provider
        self._backups = backups
        self._history = history
        self._node = node
        self.always = always
        """The bucket into which every sandbox that hibernates is shipped, if there is one."""

    async def ship(self, owner: Owner, bucket: str | None) -> None:
        """Of a sandbox that sleeps: its files and what it is, into a bucket. With its ``life`` held."""
        from skerry.storage import shipping

        began = time.perf_counter()
        await owner.require_files()
        row, before = owner.row, owner.row.shipped
        place = self._backups.bucket(bucket or self.always)
        async with self._bare(row.id, row.image) as portal:
            info = await self._backups.pack(portal, row.id, place.name)
        generation = secrets.token_hex(8)
        record = shipping.Record(
            id=row.id,
            generation=generation,
            backup=info.id,
            node=self._node(),
            shipped_at=now(),
            starts=row.starts,
            settings={name: getattr(row, name) for name in (*SETTINGS, "owner")},
        )
        await shipping.save(place, record, self._backups.key)
        await owner.update(shipped={"bucket": place.name, "generation": generation, "backup": info.id})
        if before is not None:
            await self._tidy(row.id, before, keep_record=before["bucket"] == place.name)
        self._history.record(
            row.id,
            "shipped",
            f"It lies in bucket {place.name!r} and can be woken by any server that has it.",
            took=time.perf_counter() - began,
            details={"bucket": place.name, "size": info.size, "files": info.files},
        )

    async def asleep(self, owner: Owner) -> None:
        """A sandbox has just gone to sleep. It sleeps well even if it cannot be shipped now."""
        if self.always is not None:
            try:
                await self.ship(owner, None)
            except SkerryError as error:
                self._history.record(owner.id, "ship_failed", error.message, details={"code": error.code})

    async def claim(self, owner: Owner) -> None:
        """Before one that was shipped is started from the files that are still here."""
        shipped = owner.row.shipped
        assert shipped is not None
        await self._mark(owner.id, shipped["bucket"], shipped["generation"])
        await owner.update(shipped=None)
        await self._tidy(owner.id, shipped)

    async def forget(self, row: SandboxRow) -> None:
        """It is destroyed, and so is what lies in the bucket."""
        if row.shipped is not None:
            await self._tidy(row.id, row.shipped)

    async def find(self, id: str, bucket: str | None) -> tuple[str, Record] | None:
        """What another server shipped, if it is in this bucket."""
        from skerry.storage import shipping

        place = self._backups.bucket(bucket or self.always)
        record = await shipping.find(place, id, self._backups.key)
        return None if record is None else (place.name, record)

    async def bring(self, bucket: str, record: Record) -> SandboxRow:
        """Its files onto this server's disk; the row it has from now on. All of it, or an error and nothing."""
        from skerry.storage import shipping

        id, began = record.id, time.perf_counter()
        await self._provider.require_image(record.settings["image"])
        await self._mark(id, bucket, record.generation)
        try:
            await self._provider.forget(id)  # what a server that was killed at this has left
            async with self._bare(id, record.settings["image"]) as portal:
                await self._backups.unpack(portal, id, record.backup, bucket)
        except BaseException:
            await self._provider.forget(id)
            with contextlib.suppress(SkerryError):
                await shipping.unclaim(self._backups.bucket(bucket), id, record.generation)
            raise
        self._history.record(
            id,
            "arrived",
            f"It was brought from bucket {bucket!r}, where {record.node} had shipped it.",
            took=time.perf_counter() - began,
        )
        kept: dict[str, Any] = {
            "egress": None,
            "toolboxes": [],
            **record.settings,
        }  # one that was shipped before there was any
        return SandboxRow(
            id=id,
            node=self._node(),
            state=State.HIBERNATED,
            starts=max(1, record.starts),
            owner=kept.get("owner", LOCAL),
            **{name: kept[name] for name in SETTINGS},
        )

    async def arrived(self, bucket: str, record: Record) -> None:
        """It is on record here: what lies in the bucket is of no more use."""
        await self._tidy(record.id, {"bucket": bucket, "backup": record.backup})

    async def _mark(self, id: str, bucket: str, generation: str) -> None:
        from skerry.storage import shipping

        woken_by = await shipping.claim(self._backups.bucket(bucket), id, generation, self._node())
        if woken_by != self._node():
            raise ConflictError(
                f"Sandbox {id!r} was shipped, and another server has woken it.",
                hint="Use it there, or destroy it here: what is left of it here is out of date.",
                details={"node": woken_by},
            )

    async def _tidy(self, id: str, shipped: dict[str, Any], *, keep_record: bool = False) -> None:
        from skerry.storage import shipping

        try:
            if not keep_record:
                await shipping.forget(self._backups.bucket(shipped["bucket"]), id)
            await self._backups.discard(shipped["backup"], shipped["bucket"])
        except SkerryError as error:
            log.warning("a shipment was left in its bucket", sandbox=id, code=error.code)

    @asynccontextmanager
    async def _bare(self, id: str, image: str) -> AsyncIterator[Portal]:
        """The machine with nothing running in it, for no one but us."""

        async def died(reason: str) -> None:
            return None

        machine = await self._provider.start(Spec(id=id, image=image), died)
        try:
            yield machine.portal
        finally:
            await machine.stop()
