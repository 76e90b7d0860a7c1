"""What each owner's sandboxes use, day by day, and what that costs.

A collector reads what every machine has used, now and again and once more before it stops, and adds what is new to the
owner's day. A server that is killed takes with it what was used since it last looked.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Collection
from datetime import date, timedelta
from typing import TYPE_CHECKING

import structlog

from skerry.control.account_rows import UsageRow
from skerry.control.allowances import Allowances, disk_of
from skerry.control.store import Store
from skerry.errors import InvalidRequestError, QuotaExceededError, SkerryError
from skerry.models import UsageDay, UsageReport, now
from skerry.settings import Settings

if TYPE_CHECKING:
    from skerry.control.owner import Owner

log = structlog.get_logger(__name__)

HOUR = 3600.0
MONTH = 30 * 24 * HOUR
GIB = 2.0**30
LONGEST_REPORT = 3660
DISKS_AFTER = 6
"""Disks are looked at every so many times: there are more sandboxes asleep than awake."""


class Collector:
    def __init__(
        self,
        store: Store,
        settings: Settings,
        allowances: Allowances,
        loaded: Callable[[], Collection[Owner]],
        node: Callable[[], str],
    ) -> None:
        self._store = store
        self._settings = settings
        self._allowances = allowances
        self._loaded = loaded
        self._node = node
        self._disks: dict[str, int] = {}
        """Bytes on disk of sandboxes whose provider measures them; others count as what they may have."""
        self._looked = 0.0
        self._task: asyncio.Task[None] | None = None

    def open(self) -> None:
        """From now on. Nothing is collected where nobody has opened it."""
        if self._task is None:
            self._looked = time.monotonic()
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            await self._look(last_look=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._settings.usage_every)
            await self._look()

    async def _look(self, last_look: bool = False) -> None:
        try:
            await self.collect(last_look)
        except SkerryError as error:
            log.warning("usage could not be recorded", code=error.code, reason=error.message)

    async def leaving(self, owner: Owner) -> None:
        """It is about to stop: what it used since the collector last looked is not lost."""
        if self._task is None or owner.machine is None:
            return
        spent = self._spent(owner, now().date())
        try:
            await self._store.accounts.add_usage(spent)
        except SkerryError as error:
            log.warning("usage could not be recorded", sandbox=owner.id, code=error.code)

    async def collect(self, last_look: bool = False) -> None:
        """Add what was used since the last time; whoever has used up its time goes to sleep."""
        today = now().date()
        sums: defaultdict[str, UsageRow] = defaultdict(lambda: UsageRow("", today))
        for owner in self._loaded():
            _add(sums[owner.row.owner], self._spent(owner, today))
        since = time.monotonic() - self._looked
        if last_look or since >= DISKS_AFTER * self._settings.usage_every:
            self._looked += since
            rows = await self._store.accounts.disks(self._node())
            for id, owner_name, limits in rows:
                size = self._disks.get(id, disk_of(limits) * 2**20)
                sums[owner_name].disk_byte_seconds += size * since
            self._disks = {id: self._disks[id] for id, _, _ in rows if id in self._disks}
        for name, spent in sums.items():
            spent.owner = name
            await self._store.accounts.add_usage(spent)
        for name in sums:
            await self._hold_to_time(name)

    def _spent(self, owner: Owner, day: date) -> UsageRow:
        sample = owner.sample(keep=False)
        if sample is not None and sample.disk is not None:
            self._disks[owner.id] = sample.disk
        spent = owner.meter.take()
        return UsageRow(
            owner.row.owner,
            day,
            cpu_seconds=spent.cpu_seconds,
            memory_byte_seconds=spent.memory_byte_seconds,
            egress_bytes=spent.network_out,
        )

    async def _hold_to_time(self, name: str) -> None:
        if not self._allowances.on:
            return
        try:
            await self._allowances.require_time(name, await self._allowances.of(name))
        except QuotaExceededError as error:
            for owner in [one for one in self._loaded() if one.row.owner == name and one.running]:
                async with owner.life:
                    await owner.stop(error.message, self._settings.stop_grace)

    # -- what it costs -------------------------------------------------------------------------------------------------

    async def report(self, owner: str, since: date | None = None, until: date | None = None) -> UsageReport:
        """Day by day, the last included; the last thirty days unless others are asked for."""
        until = until or now().date()
        since = since or until - timedelta(days=29)
        if since > until or (until - since).days > LONGEST_REPORT:
            raise InvalidRequestError("`since` must not be after `until`, nor ten years before it.")
        days = [self._priced(row) for row in await self._store.accounts.usage(owner, since, until)]
        total = UsageRow(owner, until)
        for day in days:
            _add(total, day)
        settings = self._settings
        return UsageReport(
            owner=owner,
            since=since,
            until=until,
            days=days,
            total=self._priced(total),
            currency=settings.currency,
            prices={
                "cpuHour": settings.price_cpu_hour,
                "memoryGibHour": settings.price_memory_gib_hour,
                "diskGibMonth": settings.price_disk_gib_month,
                "egressGib": settings.price_egress_gib,
            },
        )

    def _priced(self, row: UsageRow) -> UsageDay:
        settings = self._settings
        cost = (
            row.cpu_seconds / HOUR * settings.price_cpu_hour
            + row.memory_byte_seconds / GIB / HOUR * settings.price_memory_gib_hour
            + row.disk_byte_seconds / GIB / MONTH * settings.price_disk_gib_month
            + row.egress_bytes / GIB * settings.price_egress_gib
        )
        return UsageDay(
            day=row.day,
            cpu_seconds=round(row.cpu_seconds, 3),
            memory_byte_seconds=round(row.memory_byte_seconds),
            disk_byte_seconds=round(row.disk_byte_seconds),
            egress_bytes=row.egress_bytes,
            cost=round(cost, 6),
        )


def _add(sum: UsageRow, more: UsageRow | UsageDay) -> None:
    sum.cpu_seconds += more.cpu_seconds
    sum.memory_byte_seconds += more.memory_byte_seconds
    sum.disk_byte_seconds += more.disk_byte_seconds
    sum.egress_bytes += more.egress_bytes
