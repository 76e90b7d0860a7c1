"""Snapshots of sandboxes, and what can be done with them: new sandboxes, going back, seeing what changed.

A snapshot is whole: sandboxes made from it are copies that need it no more, so deleting one never takes anything from
another. What a server was making or deleting when it was killed is gone after the next one has started.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from skerry.control.actor import SERVER, caller, own_id
from skerry.control.events import Events
from skerry.control.identity import LONGEST, mark_in, normalise_id
from skerry.control.metrics import Metrics, Operation
from skerry.control.owner import Owner
from skerry.control.schema import SnapshotState
from skerry.control.snapshot_rows import SnapshotRow
from skerry.control.store import SandboxRow, Store
from skerry.errors import (
    ConflictError,
    InvalidRequestError,
    ProviderError,
    SandboxExistsError,
    SandboxNotFoundError,
    SkerryError,
    SnapshotInUseError,
    SnapshotNotFoundError,
)
from skerry.models import (
    CreateSandbox,
    CreateSnapshot,
    ForkResult,
    ForkSandbox,
    RollbackSandbox,
    SandboxInfo,
    SnapshotInfo,
    State,
    now,
    shown_id,
)
from skerry.providers.contract import Changes, Provider
from skerry.storage.restores import Facts, Restores

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_PREFIX = "snap-"

Change = Callable[[str, Callable[[Owner], Awaitable[None]]], Awaitable[SandboxInfo]]


@dataclass(frozen=True, slots=True)
class Origin:
    """What new sandboxes are made from."""

    snapshot: str
    said: str
    restores: Sequence[Facts]
    """Those that the snapshot holds unfinished."""
    soon: bool = False
    """They may still be on their way when the sandboxes are on record, which are started as soon as they come."""


Place = Callable[[Sequence[SandboxRow], Origin], Awaitable[list[Owner]]]


class Snapshots:
    def __init__(
        self,
        provider: Provider,
        store: Store,
        history: Events,
        metrics: Metrics,
        restores: Restores,
        *,
        node: Callable[[], str],
        change: Change,
        place: Place,
        loaded: Callable[[], Iterable[Owner]],
    ) -> None:
        self._provider = provider
        self._store = store
        self._rows = store.snapshots
        self._history = history
        self._metrics = metrics
        self._restores = restores
        self._node = node
        self._change = change
        self._place = place
        self._loaded = loaded

    # -- making and keeping --------------------------------------------------------------------------------------------

    async def create(self, id: str, request: CreateSnapshot) -> SnapshotInfo:
        """Keep the files of a sandbox as they are now. It queues with changes of life; commands go on."""
        name = None if request.name is None else _checked_name(request.name)
        row: SnapshotRow | None = None

        async def make(owner: Owner) -> None:
            nonlocal row
            row = SnapshotRow(
                id=f"{_PREFIX}{int(time.time())}-{secrets.token_hex(4)}",
                node=self._node(),
                name=name,
                sandbox_id=owner.id,
                image=owner.row.image,
                parent=owner.row.base,
                labels=request.labels,
                settings=_settings(owner.row),
                owner=owner.row.owner,
            )
            await self._rows.insert(row)
            began = time.perf_counter()
            with self._measured("snapshot", owner.id):
                try:
                    with self._restores.watched(owner.id) as restores:
                        await self._take(owner, row.id)
                    settings = row.settings | ({"restores": restores} if restores else {})
                    await self._rows.set_state(row.id, SnapshotState.READY, settings=settings)
                except BaseException:
                    with suppress(ProviderError):  # what cannot be removed now is swept at the next start
                        await self._provider.remove_snapshot(row.id)
                    await self._rows.delete(row)
                    raise
                await owner.update(base=row.id)
            took = time.perf_counter() - began
            owner.record("snapshot", f"Snapshot {_called(row)} was taken.", took=took, details={"snapshot": row.id})

        await self._change(id, make)
        assert row is not None
        return _describe(row, [])

    async def _take(self, owner: Owner, snapshot: str) -> None:
        if owner.machine is None:
            await self._provider.require_idle(owner.id)
            await owner.require_files()  # what is empty because it was lost is not worth keeping
        await self._provider.snapshot(owner.id, snapshot, owner.machine, await self._previous(owner))

    async def _previous(self, owner: Owner) -> str | None:
        """The snapshot to share unchanged files with, where they are copied: by what they were on the disk, so only one
        of the same sandbox."""
        if owner.row.base is None or self._provider.capabilities().snapshots != "copy":
            return None
        base = await self._rows.find(owner.row.base, owner.row.owner)
        return base.id if base is not None and base.sandbox_id == owner.id else None

    async def list_(self, sandbox: str | None = None) -> list[SnapshotInfo]:
        who = caller.get()
        rows = await self._rows.list_(who.sandbox if sandbox is None else own_id(sandbox), who.owner)
        users = await self._rows.users()
        return [_describe(row, users.get(row.id, [])) for row in rows]

    async def get(self, reference: str) -> SnapshotInfo:
        row = await self._find(reference)
        return _describe(row, await self._rows.users_of(row.id))

    async def place(self, reference: str, asked: str | None = None) -> str:
        """The provider that what is made of it is on. Raises ``ConflictError`` if another was asked for."""
        return self._place_of((await self._find(reference, here=True)).id, asked)

    def _place_of(self, id: str, asked: str | None) -> str:
        there = self._provider.place_of_snapshot(id)
        if asked not in (None, there):
            raise ConflictError(
                f"The snapshot is on {there}, so a sandbox made of it cannot be on {asked}.",
                hint="Leave the provider out.",
            )
        return there

    async def delete(self, reference: str, *, force: bool = False) -> None:
        row = await self._find(reference, here=True)
        users = [] if force else await self._rows.users_of(row.id)
        if users:
            raise SnapshotInUseError(
                f"Snapshot {_called(row)} is what {_several(users)} made from.",
                hint="They do not need its files: delete it with force, or destroy them first.",
                details={"sandboxes": users},
            )
        began = time.perf_counter()
        await self._rows.set_state(row.id, SnapshotState.DELETING)
        await self._finish_deleting(row)
        took, details = time.perf_counter() - began, {"snapshot": row.id}
        said = f"Snapshot {_called(row)} was deleted."
        self._history.record(row.sandbox_id, "snapshot_deleted", said, took=took, details=details)
        await self._history.flush()

    async def _finish_deleting(self, row: SnapshotRow) -> None:
        await self._provider.remove_snapshot(row.id)
        await self._rows.delete(row)
        for owner in self._loaded():
            if owner.row.base == row.id:
                owner.row = replace(owner.row, base=row.parent)

    async def settle(self) -> set[str]:
        """Put right what a server that was killed has left; the snapshots that are to be kept."""
        rows = await self._rows.of_node(self._node())
        for row in rows:
            if row.state != SnapshotState.READY and self._provider.alone:
                await self._finish_deleting(row)
                if row.state == SnapshotState.DELETING:
                    said = f"Snapshot {_called(row)} was deleted; the server before ended in the middle of it."
                    details = {"snapshot": row.id}
                    await self._store.add_event(row.sandbox_id, "snapshot_deleted", said, by=SERVER, details=details)
        return {row.id for row in rows if row.state == SnapshotState.READY}

    # -- new sandboxes -------------------------------------------------------------------------------------------------

    async def create_sandboxes(
        self, name: str, wanted: Sequence[tuple[SandboxRow, CreateSandbox]], *, soon: bool = False
    ) -> list[Owner]:
        """Sandboxes over a snapshot: all of them, or none and an error. What a request does not say is as it was with
        the sandbox it was taken of. ``soon``: as in ``Origin``."""
        snapshot = await self._find(name, here=True)
        for _, request in wanted:
            self._place_of(snapshot.id, request.provider)
        rows = [_over(snapshot, row, request) for row, request in wanted]
        await self._provider.require_image(snapshot.image)
        with self._metrics.timed("fork", SandboxExistsError):
            restores = snapshot.settings.get("restores", ())
            said = f"Created from snapshot {_called(snapshot)}."
            return await self._place(rows, Origin(snapshot.id, said, restores, soon))

    async def fork(self, id: str, request: ForkSandbox) -> ForkResult:
        """New sandboxes that are what this one is now, without its processes."""
        ids = [own_id(each) for each in request.ids or []]
        if len(set(ids)) != len(ids):
            raise InvalidRequestError("Two of the new sandboxes have the same id.")
        if ids and "count" in request.model_fields_set and request.count != len(ids):
            raise InvalidRequestError(f"{len(ids)} ids were given for {request.count} new sandboxes.")
        began = time.perf_counter()
        with self._measured("fork", normalise_id(id), SandboxNotFoundError, SandboxExistsError):
            async with self._moment(id) as (row, snapshot, restores):
                wanted = ids or [_fork_id(row.id) for _ in range(request.count)]
                origin = Origin(snapshot, f"Forked from sandbox {shown_id(row.id)!r}.", restores)
                forks = [owner.info() for owner in await self._place([_forked(row, each) for each in wanted], origin)]
        made = [shown_id(each.id) for each in forks]
        took, details = time.perf_counter() - began, {"sandboxes": made}
        self._history.record(row.id, "forked", f"Forked into {', '.join(made)}.", took=took, details=details)
        await self._history.flush()
        return ForkResult(sandbox_id=row.id, sandboxes=forks)

    @asynccontextmanager
    async def _moment(self, id: str) -> AsyncIterator[tuple[SandboxRow, str, list[Facts]]]:
        """A snapshot that nobody sees, of what a sandbox is now, and the restores it holds unfinished.

        One that is left by a killed server is swept.
        """
        name = f".moment-{secrets.token_hex(8)}"
        row: SandboxRow | None = None
        restores: list[Facts] = []

        async def take(owner: Owner) -> None:
            nonlocal row, restores
            row = owner.row
            with self._restores.watched(owner.id) as restores:
                await self._take(owner, name)

        try:
            await self._change(id, take)
            assert row is not None
            yield row, name, restores
        finally:
            await self._provider.remove_snapshot(name)

    # -- going back ----------------------------------------------------------------------------------------------------

    async def rollback(self, id: str, request: RollbackSandbox) -> SandboxInfo:
        """The files become what they were; processes end. Until that has succeeded, the old state is kept."""
        snapshot = await self._find(request.snapshot, here=True)

        async def back(owner: Owner) -> None:
            if owner.row.image != snapshot.image:
                raise ConflictError(
                    f"Snapshot {_called(snapshot)} is over image {snapshot.image!r}, sandbox {owner.id!r} over "
                    f"{owner.row.image!r}.",
                    hint="Make a new sandbox from the snapshot.",
                )
            began = time.perf_counter()

            async def stop() -> None:
                self._restores.inherit(owner.id, snapshot.settings.get("restores", ()))
                await owner.stop(f"It was rolled back to snapshot {_called(snapshot)}.")

            with self._measured("rollback", owner.id):
                await self._provider.restore(snapshot.id, owner.id, stop)
                await owner.update(base=snapshot.id)
            took, details = time.perf_counter() - began, {"snapshot": snapshot.id}
            owner.record("rollback", f"Rolled back to snapshot {_called(snapshot)}.", took=took, details=details)

        return await self._change(id, back)

    async def copied(self, row: SandboxRow) -> None:
        """A sandbox is about to begin anew as the snapshot it was made from, which may be gone."""
        snapshot = None if row.made_from is None else await self._rows.find(row.made_from, row.owner)
        if snapshot is not None:
            self._restores.inherit(row.id, snapshot.settings.get("restores", ()))

    # -- what changed --------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def diff(self, reference: str, to: str | None = None) -> AsyncIterator[Changes]:
        """What a snapshot changed of its image; or what changed from it to another one."""
        first = await self._find(reference, here=True)
        if to is None:
            yield self._provider.changes(first.image, None, first.id)
            return
        second = await self._find(to, here=True)
        _require_same_image(first.image, second.image)
        kin = first.sandbox_id == second.sandbox_id
        yield self._provider.changes(first.image, first.id, second.id, kin=kin)

    @asynccontextmanager
    async def sandbox_diff(self, id: str, since: str | None = None) -> AsyncIterator[Changes]:
        """What changed in a sandbox since its image, or since a snapshot, up to now."""
        first = None if since is None else await self._find(since, here=True)
        async with self._moment(id) as (row, moment, _):
            if first is not None:
                _require_same_image(first.image, row.image)
            kin = first is not None and first.sandbox_id == row.id
            yield self._provider.changes(row.image, None if first is None else first.id, moment, kin=kin)

    # -- within --------------------------------------------------------------------------------------------------------

    @contextmanager
    def _measured(self, operation: Operation, id: str, *refusals: type[SkerryError]) -> Iterator[None]:
        """Time it; that and why it failed is on record, unless what was asked for was merely refused."""
        with self._metrics.timed(operation, *refusals):
            try:
                yield
            except SkerryError as error:
                if not isinstance(error, refusals):
                    details = {"code": error.code}
                    self._history.record(id, f"{operation}_failed", error.message, details=details)
                raise

    async def _find(self, reference: str, *, here: bool = False) -> SnapshotRow:
        who = caller.get()
        row = await self._rows.find(reference, who.owner) if _NAME.fullmatch(reference) else None
        if row is None or not who.owns(row.sandbox_id):
            raise SnapshotNotFoundError(
                f"There is no snapshot {reference[:80]!r}.", hint="`skerry snapshots` lists those there are."
            )
        if here and row.node != self._node():
            raise ConflictError(f"Snapshot {_called(row)} is on another server.", details={"node": row.node})
        return row


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name) or name.startswith(_PREFIX):
        raise InvalidRequestError(
            f"{name[:80]!r} cannot be the name of a snapshot.",
            hint=f"Use 1 to 63 of a-z 0-9 . _ -, beginning with a letter or digit, but not with {_PREFIX!r}.",
        )
    return name


def _settings(row: SandboxRow) -> dict[str, Any]:
    return {
        "env": row.env,
        "labels": row.labels,
        "limits": row.limits,
        "sleepAfter": row.sleep_after,
        "egress": row.egress,
        "toolboxes": row.toolboxes,
    }


def _fork_id(id: str) -> str:
    mark = mark_in(id)
    return f"{id.removesuffix(mark)[: LONGEST - 9].rstrip('-')}-{secrets.token_hex(4)}{mark}"


def _over(snapshot: SnapshotRow, row: SandboxRow, request: CreateSandbox) -> SandboxRow:
    said, was = request.model_fields_set, snapshot.settings
    if "image" in said and request.image != snapshot.image:
        raise InvalidRequestError(
            f"Snapshot {_called(snapshot)} is over image {snapshot.image!r}, not {request.image!r}.",
            hint="Leave the image out: a snapshot brings its own.",
        )
    return replace(
        row,
        image=snapshot.image,
        env={**was["env"], **row.env},
        labels={**was["labels"], **row.labels},
        limits={**was["limits"], **row.limits},
        egress=row.egress if request.egress is not None else was.get("egress"),
        sleep_after=row.sleep_after if request.sleep_after is not None else was["sleepAfter"],
        toolboxes=row.toolboxes if "toolboxes" in said else was.get("toolboxes", []),
        made_from=snapshot.id,
        base=snapshot.id,
    )


def _forked(row: SandboxRow, id: str) -> SandboxRow:
    return replace(
        row,
        id=id,
        state=State.CREATED,
        created_at=now(),
        started_at=None,
        last_active_at=None,
        starts=0,
        last_stop=None,
        made_from=None,
        forked_from=row.id,
        usage=None,
    )


def _describe(row: SnapshotRow, sandboxes: list[str]) -> SnapshotInfo:
    return SnapshotInfo(
        id=row.id,
        name=row.name,
        sandbox_id=row.sandbox_id,
        image=row.image,
        parent=row.parent,
        labels=row.labels,
        created_at=row.created_at,
        sandboxes=sandboxes,
    )


def _called(row: SnapshotRow) -> str:
    return repr(row.name or row.id)


def _several(ids: list[str]) -> str:
    shown = ", ".join(repr(id) for id in ids[:3])
    return f"sandbox {shown} was" if len(ids) == 1 else f"{len(ids)} sandboxes ({shown}{', …' if ids[3:] else ''}) were"


def _require_same_image(one: str, other: str) -> None:
    if one != other:
        raise ConflictError(
            f"They are over different images ({one!r} and {other!r}), so there is no list of changes between them."
        )
