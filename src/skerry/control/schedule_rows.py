"""What the store knows of schedules: when each is due next, and what became of the times before."""

from __future__ import annotations

import builtins
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Any, TypeVar

from sqlalchemy import Executable, Row, delete, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from skerry.control.identity import LOCAL
from skerry.control.schema import schedule_runs, schedules, tasks
from skerry.models import now

T = TypeVar("T")
Run = Callable[[Executable], Awaitable[Sequence[Row[Any]]]]
Together = Callable[[Callable[[AsyncConnection], Awaitable[T]]], Awaitable[T]]


@dataclass(slots=True)
class ScheduleRow:
    id: str
    name: str
    cron: str
    timezone: str
    kind: str
    """``task`` or ``team``."""
    request: dict[str, Any]
    missed: str = "once"
    overlap: str = "skip"
    paused: bool = False
    owner: str = LOCAL
    secrets: str | None = field(default=None, repr=False)
    next_at: datetime | None = None
    last_at: datetime | None = None
    created_at: datetime = field(default_factory=now)


@dataclass(frozen=True, slots=True)
class Occurrence:
    """A time at which a schedule was due, and what is to become of it."""

    due_at: datetime
    outcome: str
    task_id: str | None = None
    team_id: str | None = None
    reason: str | None = None


class ScheduleRows:
    def __init__(
        self,
        read: Run,
        write: Run,
        together: Together[Any],
        storable: Callable[[dict[str, Any]], dict[str, Any]],
    ) -> None:
        self._read = read
        self._write = write
        self._together = together
        self._storable = storable

    async def insert(self, row: ScheduleRow) -> None:
        values = self._storable({each.name: getattr(row, each.name) for each in fields(row)})
        await self._write(insert(schedules).values(values))

    async def get(self, id: str, owner: str) -> ScheduleRow | None:
        mine = (schedules.c.id == self._storable({"schedule": id})["schedule"], schedules.c.owner == owner)
        rows = await self._read(select(schedules).where(*mine))
        return ScheduleRow(**rows[0]._mapping) if rows else None

    async def list(self, owner: str) -> builtins.list[ScheduleRow]:
        mine = select(schedules).where(schedules.c.owner == owner)
        rows = await self._read(mine.order_by(schedules.c.created_at, schedules.c.id))
        return [ScheduleRow(**row._mapping) for row in rows]

    async def update(self, id: str, **changes: Any) -> ScheduleRow | None:
        changed = update(schedules).where(schedules.c.id == id).values(self._storable(changes))
        rows = await self._write(changed.returning(*schedules.c))
        return ScheduleRow(**rows[0]._mapping) if rows else None

    async def delete(self, id: str) -> None:
        await self._write(delete(schedules).where(schedules.c.id == id))

    async def due(self, at: datetime) -> builtins.list[ScheduleRow]:
        wanted = (~schedules.c.paused, schedules.c.next_at <= at)
        rows = await self._read(select(schedules).where(*wanted).order_by(schedules.c.next_at))
        return [ScheduleRow(**row._mapping) for row in rows]

    async def next_due(self, after: datetime) -> datetime | None:
        wanted = (~schedules.c.paused, schedules.c.next_at > after)
        found = await self._read(select(func.min(schedules.c.next_at)).where(*wanted))
        first: datetime | None = found[0][0]
        return first

    async def advance(
        self,
        row: ScheduleRow,
        next_at: datetime | None,
        occurrences: Sequence[Occurrence],
        also: Callable[[AsyncConnection], Awaitable[None]],
    ) -> bool:
        """Put down what became of the times that are over, and do ``also`` with it, all or nothing.

        False, and nothing, if another server has done so already: by when the schedule was due they know.
        """

        async def claim(connection: AsyncConnection) -> bool:
            mine = (schedules.c.id == row.id, schedules.c.next_at == row.next_at, ~schedules.c.paused)
            changes: dict[str, Any] = {"next_at": next_at}
            if occurrences:
                changes["last_at"] = occurrences[-1].due_at
            claimed = await connection.execute(update(schedules).where(*mine).values(changes).returning(schedules.c.id))
            if not claimed.all():
                return False
            for one in occurrences:
                values = {each.name: getattr(one, each.name) for each in fields(one)}
                await connection.execute(insert(schedule_runs).values(schedule_id=row.id, at=now(), **values))
            await also(connection)
            return True

        done: bool = await self._together(claim)
        return done

    async def runs(self, schedule: str, before: int | None, limit: int) -> Sequence[Row[Any]]:
        """The latest first, with the status of their tasks."""
        statement = (
            select(schedule_runs, tasks.c.status)
            .outerjoin(tasks, tasks.c.id == schedule_runs.c.task_id)
            .where(schedule_runs.c.schedule_id == schedule)
        )
        if before is not None:
            statement = statement.where(schedule_runs.c.id < before)
        return await self._read(statement.order_by(schedule_runs.c.id.desc()).limit(limit))

    async def trim(self, schedule: str, keep: int) -> None:
        """Forget all but the last ``keep`` times of a schedule."""
        mine = schedule_runs.c.schedule_id == schedule
        last = select(schedule_runs.c.id).where(mine).order_by(schedule_runs.c.id.desc()).offset(keep).limit(1)
        await self._write(delete(schedule_runs).where(mine, schedule_runs.c.id <= last.scalar_subquery()))
