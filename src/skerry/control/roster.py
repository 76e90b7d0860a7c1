"""Sandboxes by id: each has one owner, whom one caller at a time finds, makes or changes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from skerry.control.actor import caller
from skerry.control.allowances import Allowances
from skerry.control.egress import Egress
from skerry.control.events import Events
from skerry.control.identity import mark_in, normalise_id, parse_duration
from skerry.control.inquiry import made
from skerry.control.ledger import Ledger
from skerry.control.metrics import Metrics
from skerry.control.owner import Owner
from skerry.control.shipments import Shipments
from skerry.control.snapshots import Origin
from skerry.control.store import SandboxRow, Store
from skerry.errors import ConflictError, SandboxExistsError, SandboxNotFoundError
from skerry.models import CreateSandbox, SandboxInfo, State, now, shown_id
from skerry.providers.contract import Provider
from skerry.settings import Settings
from skerry.storage.restores import Restores

if TYPE_CHECKING:
    from skerry.storage.shipping import Record

T = TypeVar("T")


@dataclass
class _Search:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    callers: int = 0


class Roster:
    def __init__(
        self,
        owners: dict[str, Owner],
        provider: Provider,
        store: Store,
        settings: Settings,
        *,
        allowances: Allowances,
        egress: Egress,
        history: Events,
        ledger: Ledger,
        metrics: Metrics,
        restores: Restores,
        shipments: Shipments,
        node: Callable[[], str],
        owner: Callable[[SandboxRow], Owner],
    ) -> None:
        """``owners``: those at hand, which others look at, too. ``owner`` makes one, of a sandbox that is on record."""
        self._owners = owners
        self._provider = provider
        self._store = store
        self._settings = settings
        self._allowances = allowances
        self._egress = egress
        self._history = history
        self._ledger = ledger
        self._metrics = metrics
        self._restores = restores
        self._shipments = shipments
        self._node = node
        self._owner = owner
        self._finding: dict[str, _Search] = {}

    async def change(self, id: str, change: Callable[[Owner], Awaitable[None]], make: bool = False) -> SandboxInfo:
        id = normalise_id(id)
        while True:
            owner = self._owners.get(id) or await self.find(id, make=make)
            try:
                async with owner.life:
                    owner.begun()
                    if not owner.gone:
                        await wholly(change(owner))
                        await self._ledger.flush()  # what was asked for and answered is on record
                        return owner.info()
            finally:
                self.dismiss(owner)

    async def find(self, id: str, *, make: bool) -> Owner:
        async with self._lock(id):
            owner = self._owners.get(id)
            if owner is not None:
                return owner
            make = make and caller.get().may_make
            if make and not self._allowances.on:
                # Tried first, because it is the new ones that are in a hurry.
                with contextlib.suppress(SandboxExistsError):
                    return await self._insert(id, CreateSandbox(id=id))
            row = await self._store.get_sandbox(id)
            if row is None and make and self._allowances.on:
                return await self._insert(id, CreateSandbox(id=id))
            if row is None:
                raise SandboxNotFoundError(f"There is no sandbox {id!r}.", hint="The first command in it makes it.")
            if row.node != self._node():
                shipped = row.shipped and await self._shipments.find(id, row.shipped["bucket"])
                if not shipped:
                    raise await self.elsewhere(f"Sandbox {id!r}", row.node)
                row = await wholly(self._bring(*shipped))
            return self._adopt(row)

    async def make(self, id: str) -> None:
        """See to it that there is such a sandbox; it is not started."""
        id = normalise_id(id)
        if id not in self._owners:
            await self.find(id, make=True)

    async def create(self, id: str, request: CreateSandbox) -> Owner:
        async with self._lock(id):
            if id in self._owners or await self._store.get_sandbox(id) is not None:
                raise SandboxExistsError(
                    f"Sandbox {id!r} already exists.", hint="Use it, destroy it first, or choose another id."
                )
            async with self.placed(id, request.provider):
                place = request.provider or self._provider.capabilities().name
                await self._provider.require_image(request.image, place)
                return await self._insert(id, request)

    @asynccontextmanager
    async def placed(self, id: str, provider: str | None) -> AsyncIterator[None]:
        """Where a new sandbox is to live, unless making it fails."""
        if provider is None:
            yield
            return
        taken = id in self._owners or await self._store.get_sandbox(id) is not None
        if not taken:
            await self._provider.place(id, provider)
        try:
            yield
        except BaseException:
            if not taken and await self._store.get_sandbox(id) is None:
                await self._provider.forget(id)
            raise

    async def place(self, rows: Sequence[SandboxRow], origin: Origin) -> list[Owner]:
        """New sandboxes with the files of a snapshot: all of them, or none and an error."""
        return await wholly(self._place_all(rows, origin))

    async def _place_all(self, rows: Sequence[SandboxRow], origin: Origin) -> list[Owner]:
        began = time.perf_counter()
        async with contextlib.AsyncExitStack() as locks:
            ids = sorted({row.id for row in rows})
            for id in ids:
                await locks.enter_async_context(self._lock(id))
            there = self._owners.keys() & ids or await self._store.taken(ids)
            if there:
                raise SandboxExistsError(f"Sandbox {min(there)!r} already exists.", hint="Choose another id.")
            most = await locks.enter_async_context(self._allowances.creating(rows))
            # Recorded when all are there: until then they have no owner, and a server that starts sweeps them.
            clones = [asyncio.ensure_future(self._provider.clone(origin.snapshot, row.id)) for row in rows]
            try:
                if not origin.soon:
                    await asyncio.wait(clones)
                    for clone in clones:
                        clone.result()
                for row in rows:
                    self._restores.inherit(row.id, origin.restores)
                begun = [replace(row, state=State.STARTING, starts=1) for row in rows]
                await self._store.insert_sandboxes(begun if origin.soon else rows, most)
            except BaseException:
                for row, failure in zip(rows, await asyncio.gather(*clones, return_exceptions=True), strict=True):
                    if failure is None:
                        await self._provider.forget(row.id)
                        self._restores.forget(row.id)
                raise
            took = time.perf_counter() - began
            for row in rows:
                made(row.id)
                self._metrics.created.inc()
                self._history.record(row.id, "created", origin.said, took=took, to_state=State.CREATED)
            owners = [self._adopt(row) for row in rows]
            if origin.soon:
                for owner, clone in zip(owners, clones, strict=True):
                    await owner.begin(clone)
            return owners

    def dismiss(self, owner: Owner) -> None:
        """Have whoever asks next look for it anew, should it be gone."""
        if owner.gone and self._owners.get(owner.id) is owner:
            del self._owners[owner.id]

    async def bring(self, id: str, bucket: str, record: Record) -> None:
        """See to it that a sandbox that another server shipped lives here."""
        async with self._lock(id):
            if id not in self._owners:
                await wholly(self._bring(bucket, record))

    async def elsewhere(self, what: str, node: str) -> ConflictError:
        """It is another server's of this store; where that is, if that one has told."""
        url, region = await self._store.server(node)
        known = {name: value for name, value in (("url", url), ("region", region)) if value}
        place = f" in {region}" if region else ""
        hint = f"Ask for it at {url}." if url else None
        return ConflictError(f"{what} lives on another server{place}.", hint=hint, details={"node": node, **known})

    def row(self, id: str, request: CreateSandbox) -> SandboxRow:
        """A new one, of whoever asks."""
        who = caller.get()
        if mark_in(id) != who.mark:
            raise SandboxNotFoundError(
                f"There is no sandbox {shown_id(id)!r}.", hint="The first command in it makes it."
            )
        egress, secrets = self._egress.kept(request)
        explicit = "sleep_after" in request.model_fields_set and request.sleep_after is not None
        return SandboxRow(
            id=id,
            node=self._node(),
            state=State.CREATED,
            image=request.image,
            env=request.env,
            labels=request.labels,
            limits=request.limits.resolved(),
            sleep_after=parse_duration(request.sleep_after) if explicit else self._settings.sleep_after,
            keep_alive=request.keep_alive,
            on_idle=request.on_idle,
            hibernate_after=parse_duration(request.hibernate_after),
            ephemeral=request.ephemeral,
            created_at=now(),
            started_at=None,
            last_active_at=None,
            starts=0,
            last_stop=None,
            owner=who.owner,
            egress=egress,
            secrets=secrets,
            toolboxes=list(dict.fromkeys(request.toolboxes)),
        )

    # -- within --------------------------------------------------------------------------------------------------------

    async def _insert(self, id: str, request: CreateSandbox) -> Owner:
        row = self.row(id, request)
        async with self._allowances.creating([row]) as most:
            await self._store.insert_sandbox(row, most)
        self._metrics.created.inc()
        made(id)
        self._history.record(id, "created", f"Created from image {request.image!r}.", to_state=State.CREATED)
        return self._adopt(row)

    async def _bring(self, bucket: str, record: Record) -> SandboxRow:
        """One that another server shipped lives here from now on."""
        row = await self._shipments.bring(bucket, record)
        known = await self._store.get_sandbox(row.id)
        if known is None:
            await self._store.insert_sandbox(row)
        else:  # in a store that both servers share
            row = await self._store.update_sandbox(row.id, node=row.node, state=row.state, shipped=None)
        await self._shipments.arrived(bucket, record)
        return row

    def _adopt(self, row: SandboxRow) -> Owner:
        owner = self._owners[row.id] = self._owner(row)
        return owner

    @asynccontextmanager
    async def _lock(self, id: str) -> AsyncIterator[None]:
        """Only one caller at a time finds or makes the owner of an id."""
        search = self._finding.setdefault(id, _Search())
        search.callers += 1
        try:
            async with search.lock:
                yield
        finally:
            search.callers -= 1
            if not search.callers:
                del self._finding[id]


async def wholly(change: Awaitable[T]) -> T:
    """A change of life is never left half done: a caller who gives up lets go only when it is through."""
    task = asyncio.ensure_future(change)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.gather(task, return_exceptions=True)
        raise
