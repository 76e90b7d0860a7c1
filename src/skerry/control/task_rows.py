"""What the store knows of tasks: what was asked of agents, what they said, and what became of it."""

from __future__ import annotations

import builtins
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timedelta
from typing import Any, TypeVar

from sqlalchemy import Executable, Row, case, delete, func, insert, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from skerry.control.identity import LOCAL
from skerry.control.schema import cloudflare_sandboxes, servers, task_artifacts, task_events, tasks, teams
from skerry.models import now

T = TypeVar("T")
Storable = Callable[[dict[str, Any]], dict[str, Any]]
Run = Callable[[Executable], Awaitable[Sequence[Row[Any]]]]
Together = Callable[[Callable[[AsyncConnection], Awaitable[T]]], Awaitable[T]]

OPEN = ("pending", "running")
GONE = "deleted"
MEMORY = timedelta(days=7)
"""How long it is remembered that a worker's sandbox is gone."""


@dataclass(slots=True)
class TaskRow:
    id: str
    node: str
    message: str
    provider: str
    agent: str
    owner: str = LOCAL
    status: str = "pending"
    runner: str | None = None
    """Which process works on it."""
    sandbox_id: str | None = None
    made_sandbox: bool = True
    """Whether the sandbox is the task's own, and not one that was there, or will be used again."""
    session_id: str | None = None
    team_id: str | None = None
    place: int | None = None
    """Which of a team."""
    role: str | None = None
    schedule_id: str | None = None
    retry_of: str | None = None
    user_id: str | None = None
    model: str | None = None
    git_url: str | None = None
    git_branch: str | None = None
    request: dict[str, Any] = field(default_factory=dict)
    """Without secrets."""
    secrets: str | None = field(default=None, repr=False)
    """Sealed."""
    step: str = "waiting"
    """How far it has come: what can be taken up again after a crash, and how."""
    base: dict[str, Any] | None = None
    """What the working directory was before."""
    response: str | None = None
    diff: dict[str, Any] | None = None
    patch: bytes | None = field(default=None, repr=False)
    artifacts: list[dict[str, Any]] = field(default_factory=list)
    tokens: dict[str, int] = field(default_factory=dict)
    cost: float = 0.0
    attempts: int = 0
    error: str | None = None
    error_code: str | None = None
    cancel: bool = False
    """Somebody wants it to end; whoever works on it sees to that."""
    created_at: datetime = field(default_factory=now)
    started_at: datetime | None = None
    completed_at: datetime | None = None


@dataclass(slots=True)
class TeamRow:
    id: str
    node: str
    request: dict[str, Any]
    owner: str = LOCAL
    secrets: str | None = field(default=None, repr=False)
    schedule_id: str | None = None
    snapshot: str | None = None
    shared: bool = False
    step: str = "preparing"
    created_at: datetime = field(default_factory=now)


@dataclass(frozen=True, slots=True)
class TaskEventRow:
    id: int
    task_id: str
    type: str
    at: datetime
    data: dict[str, Any]


class TaskRows:
    def __init__(
        self, read: Run, write: Run, together: Together[Any], clean: Callable[[Any], Any], storable: Storable
    ) -> None:
        """``clean`` makes what a sandbox said into such as a database takes; ``storable`` refuses it."""
        self._read = read
        self._write = write
        self._together = together
        self._clean = clean
        self._storable = storable

    # -- tasks ---------------------------------------------------------------------------------------------------------

    async def insert(self, *rows: TaskRow, team: TeamRow | None = None) -> None:
        """All of them or none."""

        async def insert_all(connection: AsyncConnection) -> None:
            await self.insert_in(connection, *rows, team=team)

        await self._together(insert_all)

    async def insert_in(self, connection: AsyncConnection, *rows: TaskRow, team: TeamRow | None = None) -> None:
        """The same, in a transaction with something else."""
        if team is not None:
            await connection.execute(insert(teams).values(self._storable(_values(team))))
        if rows:
            await connection.execute(insert(tasks), [self._storable(_values(row)) for row in rows])

    async def get(self, id: str, owner: str | None = None) -> TaskRow | None:
        statement = select(tasks).where(tasks.c.id == self._storable({"task": id})["task"])
        if owner is not None:
            statement = statement.where(tasks.c.owner == owner)
        rows = await self._read(statement)
        return TaskRow(**rows[0]._mapping) if rows else None

    async def list(
        self,
        owner: str | None,
        *,
        limit: int,
        offset: int = 0,
        status: str | None = None,
        team: str | None = None,
        schedule: str | None = None,
        user: str | None = None,
    ) -> tuple[builtins.list[TaskRow], int]:
        """The latest first, without patches, and how many there are in all."""
        self._storable({"team": team, "schedule": schedule, "userId": user})
        wanted = [
            column == value
            for column, value in (
                (tasks.c.owner, owner),
                (tasks.c.status, status),
                (tasks.c.team_id, team),
                (tasks.c.schedule_id, schedule),
                (tasks.c.user_id, user),
            )
            if value is not None
        ]
        columns = [column for column in tasks.c if column.name not in ("patch", "request")]
        found = select(*columns).where(*wanted).order_by(tasks.c.created_at.desc(), tasks.c.id)
        rows = await self._read(found.limit(limit).offset(offset))
        counted = await self._read(select(func.count()).select_from(tasks).where(*wanted))
        return [TaskRow(**row._mapping) for row in rows], int(counted[0][0])

    async def team(self, id: str, owner: str | None = None) -> tuple[TeamRow, builtins.list[TaskRow]] | None:
        """A team and its tasks, in the order in which they were asked for."""
        statement = select(teams).where(teams.c.id == self._storable({"team": id})["team"])
        if owner is not None:
            statement = statement.where(teams.c.owner == owner)
        found = await self._read(statement)
        if not found:
            return None
        rows = await self._read(select(tasks).where(tasks.c.team_id == id).order_by(tasks.c.place))
        return TeamRow(**found[0]._mapping), [TaskRow(**row._mapping) for row in rows]

    async def begin(self, rows: Sequence[TaskRow], at: datetime) -> builtins.list[TaskRow]:
        """Tasks that are begun together, as they are then; without those that have ended since they were read."""
        mine = (tasks.c.id.in_([row.id for row in rows]), tasks.c.status.in_(OPEN))
        begun = {"status": "running", "step": "preparing", "started_at": func.coalesce(tasks.c.started_at, at)}
        told = (tasks.c.id, tasks.c.status, tasks.c.step, tasks.c.started_at, tasks.c.cancel)
        found = {row.id: row for row in await self._write(update(tasks).where(*mine).values(begun).returning(*told))}
        return [replace(row, **found[row.id]._mapping) for row in rows if row.id in found]

    async def update_team(self, id: str, **changes: Any) -> None:
        await self._write(update(teams).where(teams.c.id == id).values(changes))

    async def unfinished_teams(self, node: str) -> builtins.list[TeamRow]:
        """Those that were being prepared, or whose snapshot is still there."""
        wanted = (teams.c.node == node, teams.c.step != "done")
        return [TeamRow(**row._mapping) for row in await self._read(select(teams).where(*wanted))]

    async def update(
        self, id: str, *, unless_ended: bool = False, only_at: str | None = None, **changes: Any
    ) -> TaskRow | None:
        """``unless_ended``: leave one alone that has ended; ``only_at``: one that is at another step.

        The row as it is then; None if nothing was changed.
        """
        for name in ("response", "error", "session_id"):
            if changes.get(name) is not None:
                changes[name] = self._clean(changes[name])
        statement = update(tasks).where(tasks.c.id == id)
        if unless_ended:
            statement = statement.where(tasks.c.status.in_(OPEN))
        if only_at is not None:
            statement = statement.where(tasks.c.step == only_at)
        rows = await self._write(statement.values(changes).returning(*tasks.c))
        return TaskRow(**rows[0]._mapping) if rows else None

    async def forget(self, id: str) -> None:
        await self._write(delete(tasks).where(tasks.c.id == id))

    async def open_of(self, node: str, but: str) -> builtins.list[TaskRow]:
        """Those of a home that have not ended, oldest first, but for those of one process."""
        others = tasks.c.runner.is_distinct_from(but)
        mine = (tasks.c.node == node, tasks.c.status.in_(OPEN), others)
        rows = await self._read(select(tasks).where(*mine).order_by(tasks.c.created_at, tasks.c.id))
        return [TaskRow(**row._mapping) for row in rows]

    async def adopt(self, id: str, before: str | None, runner: str) -> bool:
        """Take over a task from a process that is gone, unless another was quicker."""
        mine = (tasks.c.id == id, tasks.c.runner.is_not_distinct_from(before), tasks.c.status.in_(OPEN))
        statement = update(tasks).where(*mine).values(runner=runner).returning(tasks.c.id)
        return bool(await self._write(statement))

    async def to_cancel(self, runner: str) -> builtins.list[str]:
        """Tasks of this process that somebody wants to end, on whichever server that was asked for."""
        mine = (tasks.c.runner == runner, tasks.c.status.in_(OPEN), tasks.c.cancel)
        return [row.id for row in await self._read(select(tasks.c.id).where(*mine))]

    async def abandoned(self, node: str, before: datetime) -> builtins.list[str]:
        """Open tasks of other servers of which nothing was heard since then."""
        silent = (servers.c.node != node, servers.c.seen_at < before, tasks.c.created_at < before)
        found = select(tasks.c.id).join(servers, servers.c.node == tasks.c.node)
        return [row.id for row in await self._read(found.where(*silent, tasks.c.status.in_(OPEN)))]

    async def running(self, schedule: str) -> bool:
        mine = (tasks.c.schedule_id == schedule, tasks.c.status.in_(OPEN))
        return bool(await self._read(select(tasks.c.id).where(*mine).limit(1)))

    async def statuses(self, teams: Collection[str]) -> dict[str, set[str]]:
        """Of the tasks of each team, as far as they are kept."""
        found: dict[str, set[str]] = {}
        asked = select(tasks.c.team_id, tasks.c.status).where(tasks.c.team_id.in_(teams)).distinct()
        for row in await self._read(asked) if teams else ():
            found.setdefault(row.team_id, set()).add(row.status)
        return found

    async def expire(self, before: datetime) -> None:
        """Forget those that ended before then, and all that was kept of them."""
        await self._write(delete(tasks).where(tasks.c.completed_at < before))
        used = select(tasks.c.team_id).where(tasks.c.team_id.is_not(None))
        await self._write(delete(teams).where(teams.c.created_at < before, teams.c.id.not_in(used)))

    async def spent(self, owner: str, since: datetime, until: datetime, user: str | None = None) -> Sequence[Row[Any]]:
        """The status, tokens, cost and end of each task that ended then."""
        wanted = [tasks.c.owner == owner, tasks.c.completed_at >= since, tasks.c.completed_at < until]
        if user is not None:
            wanted.append(tasks.c.user_id == self._storable({"userId": user})["userId"])
        columns = (tasks.c.status, tasks.c.tokens, tasks.c.cost, tasks.c.completed_at)
        return await self._read(select(*columns).where(*wanted).order_by(tasks.c.completed_at))

    async def count(self, node: str) -> dict[str, int]:
        """How many of a server are in each state."""
        counted = select(tasks.c.status, func.count().label("number")).where(tasks.c.node == node)
        return {row.status: row.number for row in await self._read(counted.group_by(tasks.c.status))}

    # -- what happened -------------------------------------------------------------------------------------------------

    async def add_events(self, task: str, events: Sequence[tuple[str, datetime, Mapping[str, Any]]]) -> None:
        if events:
            values = [
                {"task_id": task, "type": type, "at": at, "data": self._clean(dict(data))} for type, at, data in events
            ]
            with suppress(IntegrityError):  # the task is forgotten, and with it what happened to it
                await self._write(insert(task_events).values(values))

    async def events(self, task: str, after: int = 0, limit: int = 500) -> builtins.list[TaskEventRow]:
        """Oldest first; ``after`` is the last that the caller has seen."""
        mine = (task_events.c.task_id == task, task_events.c.id > after)
        rows = await self._read(select(task_events).where(*mine).order_by(task_events.c.id).limit(limit))
        return [TaskEventRow(**row._mapping) for row in rows]

    # -- artifacts -----------------------------------------------------------------------------------------------------

    async def keep(self, task: str, path: str, content: bytes) -> None:
        async def replace(connection: AsyncConnection) -> None:
            mine = (task_artifacts.c.task_id == task, task_artifacts.c.path == path)
            await connection.execute(delete(task_artifacts).where(*mine))
            await connection.execute(insert(task_artifacts).values(task_id=task, path=path, content=content))

        await self._together(replace)

    async def artifact(self, task: str, path: str) -> bytes | None:
        self._storable({"path": path})
        mine = (task_artifacts.c.task_id == task, task_artifacts.c.path == path)
        rows = await self._read(select(task_artifacts.c.content).where(*mine))
        return bytes(rows[0].content) if rows else None


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """A sandbox of a worker in the cloud, as far as the worker has told of it."""

    id: str
    status: str
    user_id: str | None = None
    worker_url: str = ""
    error: str | None = None
    workspace_synced_at: datetime | None = None
    last_active_at: datetime | None = None
    created_at: datetime = field(default_factory=now)
    updated_at: datetime = field(default_factory=now)


class WorkerRows:
    def __init__(self, read: Run, write: Run, upsert: Callable[[Any], Any], storable: Storable) -> None:
        self._read = read
        self._write = write
        self._upsert = upsert
        self._storable = storable

    async def put(self, id: str, at: datetime, changes: Mapping[str, Any]) -> bool:
        """What is known of a sandbox from now on, unless something later is known. Whether that was so."""
        columns = self._storable({"id": id, "status": "sleeping", "worker_url": ""} | dict(changes))
        statement = self._upsert(cloudflare_sandboxes).values(created_at=at, updated_at=at, **columns)
        known, new = cloudflare_sandboxes.c, statement.excluded
        told = {name: new[name] for name in changes} | {"updated_at": new.updated_at}
        told["created_at"] = case((known.status == GONE, new.created_at), else_=known.created_at)
        newer = known.updated_at <= new.updated_at
        statement = statement.on_conflict_do_update(index_elements=["id"], set_=told, where=newer)
        return bool(await self._write(statement.returning(cloudflare_sandboxes.c.id)))

    async def delete(self, id: str, at: datetime) -> None:
        """It is gone since then. That is remembered for a while: what was told before may come after it."""
        nothing = dict.fromkeys(("user_id", "error", "workspace_synced_at", "last_active_at"))
        await self.put(id, at, {**nothing, "status": GONE, "worker_url": ""})
        gone = cloudflare_sandboxes.c.status == GONE
        await self._write(delete(cloudflare_sandboxes).where(gone, cloudflare_sandboxes.c.updated_at < at - MEMORY))

    async def list(self, users: Collection[str] | None = None) -> builtins.list[WorkerRow]:
        """By id; ``users``: only theirs."""
        there = cloudflare_sandboxes.c.status != GONE
        statement = select(cloudflare_sandboxes).where(there).order_by(cloudflare_sandboxes.c.id)
        if users is not None:
            statement = statement.where(cloudflare_sandboxes.c.user_id.in_(list(users)))
        return [WorkerRow(**row._mapping) for row in await self._read(statement)]


def _values(row: TaskRow | TeamRow) -> dict[str, Any]:
    return {each.name: getattr(row, each.name) for each in fields(row)}
