"""What each owner may have: held to when sandboxes are made and started. Nothing of it where there are no keys."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager, nullcontext
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any

from skerry.control.account_rows import RUNNING, AccountRows
from skerry.control.identity import LOCAL
from skerry.errors import QuotaExceededError, RateLimitedError
from skerry.models import Quotas, now
from skerry.settings import Settings

if TYPE_CHECKING:
    from skerry.control.owner import Owner
    from skerry.control.store import SandboxRow

MINUTE = 60.0
PRESUMED_MEMORY_MB = 512
PRESUMED_DISK_MB = 1024
"""What one that was made without limits counts for, where its owner has a bound."""


def _nothing() -> None:
    return None


class Allowances:
    def __init__(self, rows: AccountRows, settings: Settings, loaded: Callable[[], Collection[Owner]]) -> None:
        self.on = False
        self._rows = rows
        self._usual = Quotas.model_validate({name: getattr(settings, f"quota_{name}") for name in Quotas.model_fields})
        self._loaded = loaded
        self._known: dict[str, Quotas] = {}
        self._made: dict[str, deque[float]] = {}
        self._turns: dict[str, asyncio.Lock] = {}

    def forget(self) -> None:
        """They may have changed."""
        self._known.clear()

    async def of(self, owner: str) -> Quotas:
        """The bounds of an owner: its own, and else those of the settings, which do not bind the local one."""
        found = self._known.get(owner)
        if found is None:
            row = await self._rows.owner(owner)
            if row is None and owner != LOCAL:
                await self._rows.add_owner(owner)  # an admin acts for it: it must be there to be counted for
            own = {} if row is None else row.quotas
            usual = {} if owner == LOCAL else self._usual.model_dump(exclude_none=True)
            found = self._known[owner] = Quotas.model_validate({**usual, **own})
        return found

    @asynccontextmanager
    async def creating(self, rows: Sequence[SandboxRow]) -> AsyncIterator[int | None]:
        """While new sandboxes of one owner are recorded: how many it may have at most, for the store to hold to.

        Raises if there may be none of them now.
        """
        if not self.on:
            yield None
            return
        owner = rows[0].owner
        quotas = await self.of(owner)
        async with self._turns.setdefault(owner, asyncio.Lock()) if quotas.disk_mb is not None else nullcontext():
            if quotas.disk_mb is not None:
                there = sum(disk_of(limits) for _, _, limits in await self._rows.limits(owner))
                wanted = sum(disk_of(row.limits) for row in rows)
                if there + wanted > quotas.disk_mb:
                    raise _exceeded(owner, "disk_mb", "MB of disk", quotas.disk_mb, there, wanted)
            if quotas.creates_per_minute is not None:
                self._require_pace(owner, quotas.creates_per_minute, len(rows))
            try:
                yield quotas.sandboxes
            except BaseException:
                if quotas.creates_per_minute is not None:  # what was not made does not count
                    made = self._made[owner]
                    for _ in range(min(len(rows), len(made))):
                        made.pop()
                raise

    def _require_pace(self, owner: str, most: int, wanted: int) -> None:
        made, moment = self._made.setdefault(owner, deque()), time.monotonic()
        while made and made[0] <= moment - MINUTE:
            made.popleft()
        if len(made) + wanted > most:
            # When enough of those that were made last have been made a minute ago.
            due = made[len(made) + wanted - most - 1] if wanted <= most else moment
            wait = max(0.0, due + MINUTE - moment)
            raise RateLimitedError(
                f"Owner {owner!r} may make {most} sandboxes a minute and has made {len(made)}.",
                hint=f"Try again in {wait:.0f} seconds." if wanted <= most else "Make fewer at once.",
                details={
                    "quota": "creates_per_minute",
                    "limit": most,
                    "used": len(made),
                    "until": (now() + timedelta(seconds=wait)).isoformat(),
                    "retryAfter": round(wait, 3),
                },
            )
        made.extend([moment] * wanted)

    async def admit(self, owner: Owner) -> Callable[[], None]:
        """A sandbox is to be started. What is returned raises if it may not at that moment, in one step with it."""
        if not self.on:
            return _nothing
        name = owner.row.owner
        quotas = await self.of(name)
        await self.require_time(name, quotas)
        if quotas.running is None and quotas.memory_mb is None:
            return _nothing
        return lambda: self._require_room(owner, quotas)

    async def require_time(self, owner: str, quotas: Quotas) -> None:
        """Raises if it has used up the CPU time of the day or the month."""
        today = now().date()
        for quota, most, since, until in (
            ("cpu_seconds_day", quotas.cpu_seconds_day, today, today + timedelta(days=1)),
            ("cpu_seconds_month", quotas.cpu_seconds_month, today.replace(day=1), _next_month(today)),
        ):
            if most is None:
                continue
            used = sum(row.cpu_seconds for row in await self._rows.usage(owner, since, today))
            if used >= most:
                raise _exceeded(owner, quota, f"seconds of CPU a {quota[12:]}", most, used, until=_midnight(until))

    def _require_room(self, owner: Owner, quotas: Quotas) -> None:
        name = owner.row.owner
        others = [one for one in self._loaded() if one is not owner and one.row.owner == name]
        running = [one for one in others if one.row.state in RUNNING]
        if quotas.running is not None and len(running) + 1 > quotas.running:
            raise _exceeded(name, "running", "running sandboxes", quotas.running, len(running))
        if quotas.memory_mb is not None:
            there, wanted = sum(memory_of(one.row.limits) for one in running), memory_of(owner.row.limits)
            if there + wanted > quotas.memory_mb:
                raise _exceeded(name, "memory_mb", "MB of memory", quotas.memory_mb, there, wanted)


def memory_of(limits: dict[str, Any]) -> int:
    return int(limits.get("memory") or 0) >> 20 or PRESUMED_MEMORY_MB


def disk_of(limits: dict[str, Any]) -> int:
    return int(limits.get("disk") or 0) >> 20 or PRESUMED_DISK_MB


def _exceeded(
    owner: str, quota: str, what: str, most: float, used: float, wanted: float = 0, until: datetime | None = None
) -> QuotaExceededError:
    asked = f", and this one takes {wanted:g}" if wanted else ""
    when = (
        "Stop or destroy one that is no longer needed."
        if until is None
        else f"That is until {until:%Y-%m-%d %H:%M} UTC."
    )
    return QuotaExceededError(
        f"Owner {owner!r} may have {most:g} {what} and has {used:g}{asked}.",
        hint=when,
        details={"quota": quota, "limit": most, "used": used, "until": None if until is None else until.isoformat()},
    )


def _midnight(day: date) -> datetime:
    return datetime(day.year, day.month, day.day, tzinfo=UTC)


def _next_month(day: date) -> date:
    return (day.replace(day=28) + timedelta(days=4)).replace(day=1)
