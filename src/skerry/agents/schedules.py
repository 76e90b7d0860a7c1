"""Tasks and teams at set times. Several servers on one store run each time once: who moves on when the schedule is due
next has it, and in the same transaction the task is on record.
"""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import structlog
from sqlalchemy.ext.asyncio import AsyncConnection

from skerry.agents.cron import Cron
from skerry.agents.hidden import Hidden, reason_of
from skerry.agents.ids import nanoid
from skerry.agents.task_models import (
    CreateSchedule,
    CreateTask,
    CreateTeam,
    ScheduleHistory,
    ScheduleInfo,
    ScheduleRun,
    TaskStatus,
    UpdateSchedule,
)
from skerry.agents.tasks import Tasks, dumped
from skerry.agents.teams import Teams, status_of
from skerry.control.actor import Caller, actor, caller
from skerry.control.inquiry import inquiry
from skerry.control.registry import Registry
from skerry.control.schedule_rows import Occurrence, ScheduleRow
from skerry.egress.secret import SecretUnavailable
from skerry.errors import ConflictError, ScheduleNotFoundError, SkerryError
from skerry.models import KeyScope, now

log = structlog.get_logger(__name__)

POLL = 15.0
"""Seconds after which the store is asked again in any case: another server may have been told of a schedule."""
LATE = timedelta(minutes=1)
"""A time that is longer past was missed."""
MOST_MISSED = 24
"""How many missed times are made up for at most, the latest of them."""
KEPT = 1000
"""Times of each schedule that are kept on record."""


class Schedules:
    def __init__(self, registry: Registry, tasks: Tasks, teams: Teams, clock: Callable[[], datetime] = now) -> None:
        self._registry = registry
        self._rows = registry.schedules
        self._tasks = tasks
        self._teams = teams
        self._clock = clock
        self._news = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None

    def open(self) -> None:
        self._worker = asyncio.get_running_loop().create_task(self._work())

    async def close(self) -> None:
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)

    # -- making and changing -------------------------------------------------------------------------------------------

    async def create(self, request: CreateSchedule) -> ScheduleInfo:
        cron = Cron.parse(request.cron, request.timezone)
        work, hidden = await self._checked(request.task or request.team)
        id = f"sched-{nanoid()}"
        row = ScheduleRow(
            id=id,
            name=request.name,
            cron=request.cron.strip(),
            timezone=request.timezone,
            kind="task" if request.task is not None else "team",
            request=dumped(work),
            missed=request.missed,
            overlap=request.overlap,
            paused=request.paused,
            owner=caller.get().owner,
            secrets=hidden.sealed(self._registry.vault, id),
            next_at=cron.after(self._clock()),
            created_at=self._clock(),
        )
        await self._rows.insert(row)
        self._news.set()
        return _described(row)

    async def _checked(self, work: CreateTask | CreateTeam | None) -> tuple[Any, Hidden]:
        """What makes no sense now would make none when it is due, and nobody would be there to be told."""
        if isinstance(work, CreateTeam):
            team, rows, hidden = self._teams.rows_of(work)
            await self._teams.require(team, rows, hidden)
        else:
            assert work is not None
            row, _ = self._tasks.row_of(work)
            if row.made_sandbox:  # another is whatever it will be then
                await self._tasks.require(self._tasks.work(row).sandbox_request())
        return self._tasks.checked(work)

    async def list(self) -> builtins.list[ScheduleInfo]:
        return [_described(row) for row in await self._rows.list(caller.get().owner)]

    async def get(self, id: str) -> ScheduleInfo:
        return _described(await self._mine(id))

    async def _mine(self, id: str) -> ScheduleRow:
        row = await self._rows.get(id, caller.get().owner)
        if row is None:
            raise ScheduleNotFoundError(f"There is no schedule {id[:80]!r}.", hint="`skerry schedule list` lists them.")
        return row

    async def update(self, id: str, request: UpdateSchedule) -> ScheduleInfo:
        row = await self._mine(id)
        changes = request.model_dump(exclude_unset=True, exclude_none=True)
        if not changes:
            return _described(row)
        changed = replace(row, **changes)
        timed = {"cron", "timezone"} & changes.keys()
        cron = Cron.parse(changed.cron, changed.timezone)
        if timed or (row.paused and not changed.paused):
            changes["next_at"] = cron.after(self._clock())  # what passed while it was paused was not to be
        updated = await self._rows.update(row.id, **changes)
        self._news.set()
        return _described(updated or changed)

    async def delete(self, id: str) -> None:
        """And its history. What it has begun goes on."""
        await self._rows.delete((await self._mine(id)).id)

    async def history(self, id: str, cursor: int | None = None, limit: int = 50) -> ScheduleHistory:
        """The latest first."""
        rows = await self._rows.runs((await self._mine(id)).id, cursor, limit + 1)
        runs = [ScheduleRun.model_validate(dict(row._mapping)) for row in rows[:limit]]
        teams = await self._registry.tasks.statuses([run.team_id for run in runs if run.team_id is not None])
        for run in runs:
            if run.team_id in teams:
                run.status = status_of({TaskStatus(status) for status in teams[run.team_id]})
        return ScheduleHistory(runs=runs, next_cursor=runs[-1].id if len(rows) > limit else None)

    async def run_now(self, id: str) -> ScheduleRun:
        """Once, out of its turn."""
        row = await self._mine(id)
        if row.paused:
            raise ConflictError(f"Schedule {row.name!r} is paused.", hint="Resume it first.")
        if not await self._begin(row, row.next_at, [], [self._clock()]):
            raise ConflictError(f"Schedule {row.name!r} was due just now.", hint="Look at its history.")
        return (await self.history(id, limit=1)).runs[0]

    # -- when it is time -----------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        inquiry.set(None)
        actor.set("schedule")
        while True:
            self._news.clear()
            began = self._clock()
            try:
                await self.look()
                pause = await self._pause(began)
            except SkerryError as error:
                log.warning("schedules could not be looked at", reason=error.message)
                pause = POLL
            try:
                await asyncio.wait_for(self._news.wait(), pause)
            except TimeoutError:
                continue

    async def _pause(self, looked: datetime) -> float:
        """What was due when it was looked and still is could not be seen to: it is tried again, and not at once."""
        due = await self._rows.next_due(looked)
        return POLL if due is None else min(POLL, max(0.0, (due - self._clock()).total_seconds()))

    async def look(self) -> None:
        """Begin with all that is due now."""
        for row in await self._rows.due(self._clock()):
            caller.set(Caller("schedule", owner=row.owner, scope=KeyScope.USE))
            try:
                await self._due(row)
            except SkerryError as error:
                log.warning("a schedule could not be seen to", schedule=row.id, reason=error.message)

    async def _due(self, row: ScheduleRow) -> None:
        assert row.next_at is not None
        cron, moment = Cron.parse(row.cron, row.timezone), self._clock()
        times = [row.next_at, *cron.latest(row.next_at, moment, KEPT)][-KEPT:]
        missed = [due for due in times if moment - due > LATE]
        timely = [due for due in times if moment - due <= LATE]
        if row.missed == "skip":
            begun = timely
        elif row.missed == "once":
            begun = timely or missed[-1:]
        else:
            begun = times[-MOST_MISSED:]
        skipped = [
            Occurrence(due, "skipped", reason="No server ran at that time.") for due in times if due not in begun
        ]
        if begun and row.overlap == "skip" and await self._registry.tasks.running(row.id):
            reason = "The run before has not ended."
            skipped += [Occurrence(due, "skipped", reason=reason) for due in begun]
            begun = []
        await self._begin(row, cron.after(moment), skipped, begun)

    async def _begin(
        self,
        row: ScheduleRow,
        next_at: datetime | None,
        skipped: builtins.list[Occurrence],
        begun: builtins.list[datetime],
    ) -> bool:
        """Put all on record at once, and then work on it: a server that dies in between takes it up again.

        False if another server was quicker.
        """
        hidden, starts, occurrences = Hidden(), builtins.list[Any](), builtins.list[Occurrence]()
        try:
            hidden = Hidden.opened(self._registry.vault, row.id, row.secrets)
        except (SecretUnavailable, ValueError) as error:
            reason = f"Its secrets cannot be opened here: {error}"
            occurrences, begun = [Occurrence(due, "failed", reason=reason) for due in begun], []
        request = {**row.request, "secrets": hidden.secrets, "config": hidden.config}
        if "gitUrl" in request:
            request["gitUrl"] = hidden.address(request["gitUrl"])
        for due in begun:
            try:
                team, tasks = self._made(row, request)
            except (SkerryError, ValueError, KeyError) as error:  # an older server wrote it, or another
                occurrences.append(Occurrence(due, "failed", reason=reason_of(error)))
                continue
            occurrences.append(Occurrence(due, "started", tasks[0].id, None if team is None else team.id))
            starts.append((team, tasks, hidden))

        async def put(connection: AsyncConnection) -> None:
            for team, tasks, _ in starts:
                await self._registry.tasks.insert_in(connection, *tasks, team=team)

        told = sorted([*skipped, *occurrences], key=lambda one: one.due_at)
        if not await self._rows.advance(row, next_at, told, put):
            return False
        await self._rows.trim(row.id, KEPT)
        for team, tasks, sealed in starts:
            log.info("a schedule is due", schedule=row.id, task=tasks[0].id)
            if team is None:
                self._tasks.start(self._tasks.work(tasks[0]))
            else:
                self._teams.start(team, tasks, sealed)
        return True

    def _made(self, row: ScheduleRow, request: dict[str, Any]) -> tuple[Any, builtins.list[Any]]:
        if row.kind == "team":
            team, tasks, _ = self._teams.rows_of(CreateTeam.model_validate(request))
            team.schedule_id = row.id
        else:
            team, tasks = None, [self._tasks.row_of(CreateTask.model_validate(request))[0]]
        for task in tasks:
            task.schedule_id = row.id
        return team, tasks


def _described(row: ScheduleRow) -> ScheduleInfo:
    if row.kind == "task":
        message = row.request["message"].strip() or f"template {row.request['templateId']}"
    else:
        message = ", ".join(agent["role"] for agent in row.request["agents"])
    return ScheduleInfo(
        id=row.id,
        name=row.name,
        cron=row.cron,
        timezone=row.timezone,
        missed=row.missed,
        overlap=row.overlap,
        paused=row.paused,
        owner=row.owner,
        message=message,
        request={row.kind: row.request},
        next_at=None if row.paused else row.next_at,
        last_at=row.last_at,
        created_at=row.created_at,
    )
