"""What the server must not forget: sandboxes, their events, processes, code contexts, exposed ports and mounts.

What belongs to one noun more stands in a module of its own (``snapshot_rows``, ``task_rows`` and so on).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Row,
    delete,
    func,
    insert,
    literal,
    select,
    type_coerce,
    update,
)
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from skerry.control.account_rows import AccountRows
from skerry.control.audit_rows import AuditRows
from skerry.control.database import Database, T, clean, cleaned, storable
from skerry.control.identity import LOCAL
from skerry.control.schedule_rows import ScheduleRows
from skerry.control.schema import contexts, events, exposures, mounts, owners, processes, sandboxes, servers, workspaces
from skerry.control.session_rows import SessionRows
from skerry.control.snapshot_rows import SnapshotRows
from skerry.control.task_rows import TaskRows, WorkerRows
from skerry.control.webhook_rows import WebhookRows
from skerry.errors import (
    QuotaExceededError,
    SandboxExistsError,
    SandboxNotFoundError,
)
from skerry.models import ProcessInfo, ProcessStatus, SandboxEvent, Stage, State, now, shown_id
from skerry.runtime.interpreter.context import Remembered

_LARGEST_EVENT_ID = 2**63 - 1
_BATCH = 500


@dataclass(slots=True)
class SandboxRow:
    id: str
    node: str
    state: State
    image: str
    env: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    limits: dict[str, Any] = field(default_factory=dict)
    sleep_after: float | None = None
    keep_alive: bool = False
    on_idle: Stage = "hibernate"
    hibernate_after: float | None = None
    ephemeral: bool = False
    created_at: datetime = field(default_factory=now)
    started_at: datetime | None = None
    last_active_at: datetime | None = None
    starts: int = 0
    last_stop: str | None = None
    made_from: str | None = None
    forked_from: str | None = None
    base: str | None = None
    shipped: dict[str, Any] | None = None
    """The bucket it was shipped to, which generation, and the backup with its files."""
    owner: str = LOCAL
    usage: dict[str, Any] | None = None
    """What it has used in all its life."""
    egress: dict[str, Any] | None = None
    secrets: dict[str, Any] = field(default_factory=dict, repr=False)
    toolboxes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StoredRow:
    """A workspace that lies in a bucket."""

    sandbox_id: str
    owner: str
    bucket: str
    files: int
    size: int
    synced_at: datetime


@dataclass(frozen=True, slots=True)
class Exposure:
    """A port of a sandbox that is reachable from outside, by those who know the token."""

    sandbox_id: str
    port: int
    token: str = field(repr=False)
    name: str | None = None
    hostname: str | None = None
    private: bool = False
    wake_on_request: bool = False
    exposed_at: datetime = field(default_factory=now)

    @property
    def sandbox(self) -> str:
        """The sandbox's id as its owner knows it."""
        return shown_id(self.sandbox_id)


@dataclass(frozen=True, slots=True)
class MountRow:
    """A bucket that is mounted in a sandbox, or will be when it wakes."""

    sandbox_id: str
    path: str
    bucket: str
    prefix: str = ""
    read_only: bool = False
    mounted_at: datetime = field(default_factory=now)
    own: dict[str, Any] | None = field(default=None, repr=False)
    """Of a bucket that is not configured: where it is, and its keys, sealed."""


class Store(Database):
    """Methods may be called concurrently, from one event loop."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.on_queued: Callable[[], None] = lambda: None
        """Called when somebody is to be told of an event."""
        self._starting: tuple[set[str], asyncio.Future[set[str]]] | None = None
        self.snapshots = SnapshotRows(self._read, self._write, storable)
        self.accounts = AccountRows(self._read, self._write, self._upsert, storable)
        self.audit = AuditRows(self._read, self._write, self._together, sqlite=self._sqlite)
        self.webhooks = WebhookRows(self._read, self._write)
        self.tasks = TaskRows(self._read, self._write, self._together, cleaned, storable)
        self.schedules = ScheduleRows(self._read, self._write, self._together, storable)
        self.workers = WorkerRows(self._read, self._write, self._upsert, storable)
        self.sessions = SessionRows(self._read, self._write, self._together, self._upsert, storable)

    # -- sandboxes -----------------------------------------------------------------------------------------------------

    async def insert_sandbox(self, row: SandboxRow, most: int | None = None) -> None:
        """``most``: how many its owner may have, this one included; ``QuotaExceededError`` if that is too many."""
        values = _values(row)
        statement = self._upsert(sandboxes).values(values).on_conflict_do_nothing().returning(sandboxes.c.id)

        async def insert_one(connection: AsyncConnection) -> bool:
            return (await connection.execute(statement)).first() is not None

        if not await (self._write(statement) if most is None else self._counted(insert_one, [row], most)):
            raise _exists(row.id)

    async def insert_sandboxes(self, rows: Sequence[SandboxRow], most: int | None = None) -> None:
        """All of them or none."""

        async def insert_all(connection: AsyncConnection) -> None:
            # Not as the values of one statement: that would be put together anew each time, which takes longer.
            await connection.execute(insert(sandboxes), [_values(row) for row in rows])

        try:
            await (self._together(insert_all) if most is None else self._counted(insert_all, rows, most))
        except IntegrityError as error:
            taken = await self.taken(row.id for row in rows)
            raise _exists(min(taken) if taken else rows[0].id) from error

    async def get_sandbox(self, id: str) -> SandboxRow | None:
        rows = await self._read(select(sandboxes).where(sandboxes.c.id == id))
        return _sandbox(rows[0]) if rows else None

    async def taken(self, ids: Iterable[str]) -> set[str]:
        """Those of them that there are."""
        found = await self._read(select(sandboxes.c.id).where(sandboxes.c.id.in_(list(ids))))
        return {row.id for row in found}

    async def update_sandbox(self, id: str, **changes: Any) -> SandboxRow:
        unknown = changes.keys() - (set(sandboxes.c.keys()) - {"id"})
        if unknown or not changes:
            raise TypeError(f"update_sandbox() wants columns of a sandbox to change, not {sorted(unknown)}.")
        statement = update(sandboxes).where(sandboxes.c.id == id).values(storable(changes)).returning(*sandboxes.c)
        rows = await self._write(statement)
        if not rows:
            raise _not_found(id)
        return _sandbox(rows[0])

    async def record_start(self, id: str) -> None:
        """It is being started, for one more time; in one statement with all others of this moment."""
        if self._starting is None:
            self._starting = set(), asyncio.ensure_future(self._record_starts())
        ids, done = self._starting
        ids.add(id)
        if id not in await asyncio.shield(done):
            raise _not_found(id)

    async def _record_starts(self) -> set[str]:
        await asyncio.sleep(0)  # for those who come with this one
        assert self._starting is not None
        (ids, _), self._starting = self._starting, None
        begun = {"state": State.STARTING, "starts": sandboxes.c.starts + 1}
        started = update(sandboxes).where(sandboxes.c.id.in_(sorted(ids))).values(begun).returning(sandboxes.c.id)
        return {row.id for row in await self._write(started)}

    async def _counted(
        self, work: Callable[[AsyncConnection], Awaitable[T]], rows: Sequence[SandboxRow], most: int
    ) -> T:
        """Insert new sandboxes of one owner if it then has no more than so many, whoever else makes some meanwhile.

        In PostgreSQL nothing less than a lock keeps two from counting the same.
        """
        owner = rows[0].owner
        counted = select(func.count()).select_from(sandboxes).where(sandboxes.c.owner == owner)

        async def insert_counted(connection: AsyncConnection) -> T:
            await connection.execute(select(owners.c.name).where(owners.c.name == owner).with_for_update())
            there = (await connection.execute(counted)).scalar_one()
            if there + len(rows) > most:
                raise _too_many(owner, there, most)
            return await work(connection)

        return await self._together(insert_counted)

    async def delete_sandbox(self, id: str) -> bool:
        """Forget a sandbox and all that is recorded of it; whether there was one."""
        return bool(await self._write(delete(sandboxes).where(sandboxes.c.id == id).returning(sandboxes.c.id)))

    async def list_sandboxes(
        self,
        *,
        state: State | None = None,
        image: str | None = None,
        labels: Mapping[str, str] | None = None,
        prefix: str | None = None,
        limit: int = 50,
        after: str | None = None,
        owner: str | None = None,
        only: str | None = None,
    ) -> list[SandboxRow]:
        """Ordered by id; ``after`` is the last id of the page before, ``only`` the one that may be seen."""
        storable({"image": image, "labels": dict(labels or {}), "prefix": prefix, "after": after})
        statement = select(sandboxes).order_by(sandboxes.c.id).limit(limit)
        if state is not None:
            statement = statement.where(sandboxes.c.state == state)
        if image is not None:
            statement = statement.where(sandboxes.c.image == image)
        if after is not None:
            statement = statement.where(sandboxes.c.id > after)
        if owner is not None:
            statement = statement.where(sandboxes.c.owner == owner)
        if only is not None:
            statement = statement.where(sandboxes.c.id == only)
        if prefix:
            # A range, not LIKE: an index serves it, `_` is a plain character, and SQLite's LIKE ignores case.
            statement = statement.where(sandboxes.c.id >= prefix, sandboxes.c.id < prefix + "\U0010ffff")
        if labels:
            statement = statement.where(*self._labelled(labels))
        return [_sandbox(row) for row in await self._read(statement)]

    async def all_sandboxes(self, node: str) -> list[SandboxRow]:
        rows = await self._read(select(sandboxes).where(sandboxes.c.node == node).order_by(sandboxes.c.id))
        return [_sandbox(row) for row in rows]

    async def count_by_image(self, image: str, owner: str | None = None) -> int:
        storable({"image": image})
        counted = select(func.count()).select_from(sandboxes).where(sandboxes.c.image == image)
        rows = await self._read(counted if owner is None else counted.where(sandboxes.c.owner == owner))
        return int(rows[0][0])

    async def count_by_state(self, node: str) -> dict[State, int]:
        state = sandboxes.c.state
        counted = select(state, func.count().label("number")).where(sandboxes.c.node == node).group_by(state)
        return {row.state: row.number for row in await self._read(counted)}

    # -- events --------------------------------------------------------------------------------------------------------

    async def add_event(self, sandbox_id: str, kind: str, message: str, **more: Any) -> SandboxEvent:
        """Record what happened, also to a sandbox that is gone; ``more`` are the event's other fields."""
        values = {"at": now(), "details": {}} | more
        values |= {"sandbox_id": sandbox_id, "kind": kind, "message": clean(message)}
        values = storable(values)
        # Mostly nobody is to be told, and then it is one statement.
        given = select(*(literal(value, events.c[name].type) for name, value in values.items()))
        alone = insert(events).from_select(list(values), given.where(~self.webhooks.enabled()))
        if added := await self._write(alone.returning(*events.c)):
            return SandboxEvent(**added[0]._mapping)
        statement = insert(events).values(values).returning(*events.c)

        async def add(connection: AsyncConnection) -> SandboxEvent:
            # With those who are to be told, or not at all.
            added = SandboxEvent(**(await connection.execute(statement)).one()._mapping)
            await self.webhooks.enqueue(connection, added)
            return added

        queued: SandboxEvent = await self._together(add)
        self.on_queued()
        return queued

    async def events(self, sandbox_id: str, after: int = 0, limit: int = 100) -> list[SandboxEvent]:
        """Oldest first; ``after`` is the last id the caller has seen."""
        if after >= _LARGEST_EVENT_ID:
            return []
        mine = events.c.sandbox_id == sandbox_id
        rows = await self._read(
            select(events).where(mine, events.c.id > max(after, 0)).order_by(events.c.id).limit(limit)
        )
        return [SandboxEvent(**row._mapping) for row in rows]

    async def trim_events(self, sandbox_id: str, keep: int) -> None:
        """Forget all but the last ``keep`` of a sandbox."""
        mine = events.c.sandbox_id == sandbox_id
        last = select(events.c.id).where(mine).order_by(events.c.id.desc()).offset(keep).limit(1).scalar_subquery()
        await self._write(delete(events).where(mine, events.c.id <= last))

    async def expire_events(self, before: datetime, keep: int) -> None:
        """Forget what happened before then to sandboxes that no longer exist, and all but ``keep`` of every other."""
        gone = events.c.sandbox_id.not_in(select(sandboxes.c.id))
        await self._write(delete(events).where(events.c.at < before, gone))
        place = func.row_number().over(partition_by=events.c.sandbox_id, order_by=events.c.id.desc())
        counted = select(events.c.id, place.label("place")).subquery()
        await self._write(delete(events).where(events.c.id.in_(select(counted.c.id).where(counted.c.place > keep))))

    # -- processes -----------------------------------------------------------------------------------------------------

    async def save_process(self, sandbox_id: str, info: ProcessInfo, starts: int) -> None:
        """Record a process, in place of what was known of it; ``starts`` says in which start of the machine it ran."""
        storable({"process id": info.id, "session id": info.session_id})
        values = info.model_dump() | {"command": clean(info.command), "error": info.error and clean(info.error)}
        statement = self._upsert(processes).values(sandbox_id=sandbox_id, starts=starts, **values)
        changed = {name: statement.excluded[name] for name in ("starts", *(values.keys() - {"id"}))}
        statement = statement.on_conflict_do_update(index_elements=["sandbox_id", "id"], set_=changed)
        try:
            await self._write(statement)
        except IntegrityError as error:
            raise _not_found(sandbox_id) from error

    async def processes(self, sandbox_id: str) -> list[ProcessInfo]:
        """Oldest first."""
        rows = await self._read(
            select(processes)
            .where(processes.c.sandbox_id == sandbox_id)
            .order_by(processes.c.start_time, processes.c.id)
        )
        return [ProcessInfo(**row._mapping) for row in rows]

    async def delete_processes(self, sandbox_id: str, ids: Collection[str] | None = None) -> int:
        """Forget these processes, or all of the sandbox; how many there were."""
        statement = delete(processes).where(processes.c.sandbox_id == sandbox_id).returning(processes.c.id)
        if ids is None:
            return len(await self._write(statement))
        # In batches: a statement may carry only some 32,000 values.
        wanted = list(ids)
        batches = [wanted[start : start + _BATCH] for start in range(0, len(wanted), _BATCH)]
        return sum([len(await self._write(statement.where(processes.c.id.in_(batch)))) for batch in batches])

    async def end_processes(self, sandbox_id: str, reason: str) -> int:
        """Mark what was alive as killed, because its machine is gone; how many that were."""
        alive = [status for status in ProcessStatus if not status.ended]
        statement = (
            update(processes)
            .where(processes.c.sandbox_id == sandbox_id, processes.c.status.in_(alive))
            .values(status=ProcessStatus.KILLED, error=clean(reason), end_time=now())
            .returning(processes.c.id)
        )
        return len(await self._write(statement))

    # -- code contexts -------------------------------------------------------------------------------------------------

    async def save_context(self, sandbox_id: str, context: Remembered) -> None:
        values = storable(asdict(context))
        statement = self._upsert(contexts).values(sandbox_id=sandbox_id, **values)
        changed = {name: statement.excluded[name] for name in values.keys() - {"id"}}
        try:
            await self._write(statement.on_conflict_do_update(index_elements=["sandbox_id", "id"], set_=changed))
        except IntegrityError as error:
            raise _not_found(sandbox_id) from error

    async def contexts(self, sandbox_id: str) -> list[Remembered]:
        """Oldest first."""
        rows = await self._read(
            select(*(column for column in contexts.c if column.name != "sandbox_id"))
            .where(contexts.c.sandbox_id == sandbox_id)
            .order_by(contexts.c.created_at, contexts.c.id)
        )
        return [Remembered(**row._mapping) for row in rows]

    async def delete_context(self, sandbox_id: str, id: str) -> None:
        await self._write(delete(contexts).where(contexts.c.sandbox_id == sandbox_id, contexts.c.id == id))

    # -- exposed ports -------------------------------------------------------------------------------------------------

    async def save_exposure(self, exposure: Exposure, *, keep_token: bool) -> Exposure:
        """Expose a port, or change how it is exposed, and return how it is now.

        Of a port that is exposed already the time stays, with ``keep_token`` its token too, and its hostname unless
        another one is given.
        """
        values = storable(asdict(exposure))
        statement = self._upsert(exposures).values(values)
        kept = {"sandbox_id", "port", "exposed_at"} | ({"token"} if keep_token else set())
        changed = {name: statement.excluded[name] for name in values.keys() - kept}
        changed["hostname"] = func.coalesce(statement.excluded.hostname, exposures.c.hostname)
        statement = statement.on_conflict_do_update(index_elements=["sandbox_id", "port"], set_=changed)
        try:
            rows = await self._write(statement.returning(*exposures.c))
        except IntegrityError as error:
            raise _not_found(exposure.sandbox_id) from error
        return Exposure(**rows[0]._mapping)

    async def exposure(self, sandbox_id: str, port: int) -> Exposure | None:
        rows = await self._read(select(exposures).where(_exposed(sandbox_id), exposures.c.port == port))
        return Exposure(**rows[0]._mapping) if rows else None

    async def exposures(self, sandbox_id: str) -> list[Exposure]:
        """By port."""
        rows = await self._read(select(exposures).where(_exposed(sandbox_id)).order_by(exposures.c.port))
        return [Exposure(**row._mapping) for row in rows]

    async def delete_exposure(self, sandbox_id: str, port: int) -> bool:
        """Whether it was there."""
        statement = delete(exposures).where(_exposed(sandbox_id), exposures.c.port == port)
        return bool(await self._write(statement.returning(exposures.c.port)))

    # -- servers -------------------------------------------------------------------------------------------------------

    async def introduce(self, node: str, url: str | None, region: str | None) -> None:
        """Tell those who share this store where a server is reached."""
        statement = self._upsert(servers).values(node=node, url=url, region=region)
        said = {"url": url, "region": region}
        await self._write(statement.on_conflict_do_update(index_elements=["node"], set_=said))

    async def seen(self, node: str, at: datetime) -> None:
        """It was at work then."""
        statement = self._upsert(servers).values(node=node, seen_at=at)
        await self._write(statement.on_conflict_do_update(index_elements=["node"], set_={"seen_at": at}))

    async def server(self, node: str) -> tuple[str | None, str | None]:
        """Its address and its region, as far as it has told them."""
        rows = await self._read(select(servers).where(servers.c.node == node))
        return (rows[0].url, rows[0].region) if rows else (None, None)

    # -- workspaces ----------------------------------------------------------------------------------------------------

    async def save_workspace(self, row: StoredRow) -> None:
        values = asdict(row)
        statement = self._upsert(workspaces).values(values)
        changed = {name: statement.excluded[name] for name in values if name != "sandbox_id"}
        await self._write(statement.on_conflict_do_update(index_elements=["sandbox_id"], set_=changed))

    async def workspaces(self, sandbox_id: str | None = None) -> list[StoredRow]:
        """All of them by sandbox, or the one of a sandbox."""
        statement = select(workspaces).order_by(workspaces.c.sandbox_id)
        if sandbox_id is not None:
            statement = statement.where(workspaces.c.sandbox_id == sandbox_id)
        return [StoredRow(**row._mapping) for row in await self._read(statement)]

    async def delete_workspace(self, sandbox_id: str) -> None:
        await self._write(delete(workspaces).where(workspaces.c.sandbox_id == sandbox_id))

    # -- mounts --------------------------------------------------------------------------------------------------------

    async def save_mount(self, mount: MountRow) -> None:
        try:
            await self._write(insert(mounts).values(storable(asdict(mount))))
        except IntegrityError as error:
            raise _not_found(mount.sandbox_id) from error

    async def mounts(self, sandbox_id: str) -> list[MountRow]:
        """Oldest first."""
        mine = select(mounts).where(mounts.c.sandbox_id == sandbox_id)
        rows = await self._read(mine.order_by(mounts.c.mounted_at, mounts.c.path))
        return [MountRow(**row._mapping) for row in rows]

    async def delete_mount(self, sandbox_id: str, path: str) -> bool:
        """Whether it was there."""
        statement = delete(mounts).where(mounts.c.sandbox_id == sandbox_id, mounts.c.path == path)
        return bool(await self._write(statement.returning(mounts.c.path)))

    def _labelled(self, labels: Mapping[str, str]) -> list[ColumnElement[bool]]:
        if not self._sqlite:
            return [type_coerce(sandboxes.c.labels, postgresql.JSONB).contains(dict(labels))]
        # Compared as rows: a JSON path could not name a label that holds a quotation mark.
        conditions: list[ColumnElement[bool]] = []
        for name, value in labels.items():
            each = func.json_each(sandboxes.c.labels).table_valued("key", "value", name=f"label{len(conditions)}")
            conditions.append(select(literal(1)).where(each.c.key == name, each.c.value == value).exists())
        return conditions


def _sandbox(row: Row[Any]) -> SandboxRow:
    return SandboxRow(**row._mapping)


def _values(row: SandboxRow) -> dict[str, Any]:
    return storable({name.name: getattr(row, name.name) for name in fields(row)})


def _exists(id: str) -> SandboxExistsError:
    return SandboxExistsError(
        f"Sandbox {id!r} already exists.", hint="Use it by its id, or choose another id.", details={"id": id}
    )


def _too_many(owner: str, there: int, most: int) -> QuotaExceededError:
    return QuotaExceededError(
        f"Owner {owner!r} may have {most} sandboxes and has {there}.",
        hint="Destroy one that is no longer needed.",
        details={"quota": "sandboxes", "limit": most, "used": there, "until": None},
    )


def _exposed(sandbox_id: str) -> ColumnElement[bool]:
    return exposures.c.sandbox_id == sandbox_id


def _not_found(id: str) -> SandboxNotFoundError:
    return SandboxNotFoundError(f"Sandbox {id!r} not found.", details={"id": id})
