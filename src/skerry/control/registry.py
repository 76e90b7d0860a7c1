"""Who owns which sandbox: the same id always reaches the same owner, and so the same machine."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import structlog

from skerry.control.actor import SERVER
from skerry.control.backups import SandboxBackups
from skerry.control.bootstrap import Bootstraps
from skerry.control.events import Events
from skerry.control.exposures import Exposures
from skerry.control.identity import normalise_id, parse_duration
from skerry.control.ledger import Ledger
from skerry.control.metrics import Metrics
from skerry.control.mounts import Mounts
from skerry.control.owner import Attendants, Owner, describe
from skerry.control.pool import Pool
from skerry.control.presence import Presence
from skerry.control.reaper import Reaper
from skerry.control.shipments import Shipments
from skerry.control.snapshots import Snapshots
from skerry.control.store import SandboxRow, Store
from skerry.control.workspaces import Workspaces
from skerry.errors import ConflictError, ImageInUseError, SandboxBusyError, SandboxExistsError, SandboxNotFoundError
from skerry.models import (
    CreateSandbox,
    ImageInfo,
    SandboxEvent,
    SandboxInfo,
    SandboxList,
    SetEnv,
    SleepSandbox,
    StartSandbox,
    State,
    UpdateSandbox,
    WakeSandbox,
    now,
)
from skerry.providers.contract import Provider
from skerry.runtime.environment import check_env
from skerry.runtime.interpreter.languages import LANGUAGES, known
from skerry.runtime.interpreter.pool import Provision, Sizes
from skerry.runtime.runtime import Runtime
from skerry.settings import Settings

if TYPE_CHECKING:
    from skerry.storage.shipping import Record

log = structlog.get_logger(__name__)

T = TypeVar("T")

CLOSING_GRACE = 2.0
"""Seconds that processes have at most when the server closes."""
UNSETTLED = (State.ACTIVE, State.STARTING, State.FROZEN, State.DESTROYED)
"""States in which only a running server leaves a sandbox."""
QUIET_AFTER = 60.0
"""A connection on which nothing moved for so many seconds no longer keeps a sandbox awake."""


@dataclass
class _Search:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    callers: int = 0


class Registry:
    def __init__(self, provider: Provider, store: Store, settings: Settings) -> None:
        self.provider = provider
        self.settings = settings
        self._store = store
        self._ledger = Ledger()
        self._provision = _provision(settings)
        self._pool = Pool(provider, settings.warm_pool, self._provision)
        self._owners: dict[str, Owner] = {}
        self._finding: dict[str, _Search] = {}
        self._node = ""
        self.metrics = Metrics()
        self.history = Events(store, self._ledger, limit=settings.event_limit, days=settings.event_days)
        self.exposures = Exposures(store, self.history, settings.home, get=self.get, make=self._make)
        self.backups = SandboxBackups(settings, provider, self.history, self.metrics, self.get)
        self.workspaces = Workspaces(settings, store, self.history, self.metrics, self.get)
        self.mounts = Mounts(
            store, settings, change=self._change, get=self.get, peek=self._owners.get, can=provider.capabilities
        )
        self.bootstraps = Bootstraps(self.mounts, self.history)
        self.snapshots = Snapshots(
            provider, store, node=lambda: self._node, change=self._change, place=self._place, loaded=self._owners.values
        )
        self.shipments = Shipments(provider, self.backups, self.history, lambda: self._node, settings.ship_to)
        self._attendants = Attendants(
            claim=self.shipments.claim,
            woken=self.backups.settle,
            tired=self.workspaces.before_sleep,
            asleep=self.shipments.asleep,
        )
        self._reaper = Reaper(self._owners.values, self._dismiss, self.history.expire, settings.stop_grace)
        self._rousing: dict[str, asyncio.Task[None]] = {}

    # -- opening and closing -------------------------------------------------------------------------------------------

    async def open(self) -> None:
        await self.provider.open()
        try:
            await self._store.open()
            self._node = _node(self.settings.home)
            await self._settle()
            await self.history.expire()
            await self.workspaces.open()
        except BaseException:
            await self._store.close()
            await self.provider.close()
            raise
        self._ledger.open()
        self._pool.open()
        self.backups.open()
        self._reaper.open()

    async def close(self) -> None:
        """Put every machine to sleep and leave nothing running."""
        await self._reaper.close()
        await asyncio.gather(*self._rousing.values(), return_exceptions=True)
        await self.backups.close()
        await self._pool.close()
        await asyncio.gather(*(self._put_to_sleep(owner) for owner in list(self._owners.values())))
        await self._ledger.close()
        await self.provider.close()
        await self._store.close()

    async def _put_to_sleep(self, owner: Owner) -> None:
        async with owner.life:
            if owner.running:
                await owner.stop("The server was stopped.", min(self.settings.stop_grace, CLOSING_GRACE))

    async def _settle(self) -> None:
        """Put right what a server that ended without saying so has left behind, and say so."""
        rows = await self._store.all_sandboxes(self._node)
        for row in rows:
            if row.state not in UNSETTLED or not await self._idle(row.id):
                continue
            if row.state == State.DESTROYED:
                await self.provider.forget(row.id)
                await self._store.delete_sandbox(row.id)
                said = "It was destroyed; the server ended before that was done, and this one did the rest."
                await self._store.add_event(row.id, "destroyed", said, by=SERVER, to_state=State.DESTROYED)
            else:
                reason = "The server ended unexpectedly; processes that were running ended with it. The files are kept."
                if row.ephemeral:
                    await self.provider.forget(row.id)
                    reason = "The server ended unexpectedly; this sandbox is ephemeral, so its files are gone."
                await self._store.update_sandbox(row.id, state=State.HIBERNATED, last_stop=reason)
                await self._store.end_processes(row.id, reason)
                states = {"from_state": row.state, "to_state": State.HIBERNATED}
                await self._store.add_event(row.id, "died", reason, by=SERVER, **states)
        for what in await self.provider.sweep({row.id for row in rows}, await self.snapshots.settle()):
            log.info("swept", what=what)

    async def _idle(self, id: str) -> bool:
        try:
            await self.provider.require_idle(id)
        except SandboxBusyError:
            return False
        return True

    # -- sandboxes -----------------------------------------------------------------------------------------------------

    async def create(self, request: CreateSandbox) -> SandboxInfo:
        id = normalise_id(request.id) if request.id else f"sandbox-{int(time.time())}-{secrets.token_hex(4)}"
        check_env(request.env)
        if request.snapshot is not None:
            return await self.snapshots.create_sandbox(self._row(id, request), request)
        async with self._lock(id):
            if id in self._owners or await self._store.get_sandbox(id) is not None:
                raise SandboxExistsError(
                    f"Sandbox {id!r} already exists.", hint="Use it, destroy it first, or choose another id."
                )
            await self.provider.require_image(request.image)
            owner = await self._insert(id, request)
        return owner.info()

    async def get(self, id: str) -> SandboxInfo:
        id = normalise_id(id)
        owner = self._owners.get(id)
        if owner is not None:
            return owner.info()
        row = await self._store.get_sandbox(id)
        if row is None:
            raise SandboxNotFoundError(f"There is no sandbox {id!r}.", hint="The first command in it makes it.")
        return describe(row)

    async def list(
        self,
        *,
        state: State | None = None,
        image: str | None = None,
        labels: Mapping[str, str] | None = None,
        prefix: str | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> SandboxList:
        await self._ledger.flush()
        rows = await self._store.list_sandboxes(
            state=state, image=image, labels=labels or {}, prefix=prefix, limit=limit + 1, after=cursor
        )
        more = len(rows) > limit
        rows = rows[:limit]
        return SandboxList(
            sandboxes=[describe(row, self._owners.get(row.id)) for row in rows],
            next_cursor=rows[-1].id if more else None,
        )

    async def update(self, id: str, request: UpdateSandbox) -> SandboxInfo:
        changes: dict[str, object] = {}
        if request.labels is not None:
            changes["labels"] = request.labels
        for name in ("sleep_after", "hibernate_after"):
            if name in request.model_fields_set:
                changes[name] = parse_duration(getattr(request, name))
        for name in ("keep_alive", "on_idle"):
            if getattr(request, name) is not None:
                changes[name] = getattr(request, name)
        if not changes:
            return await self.get(id)
        return await self._change(id, lambda owner: owner.update(**changes))

    async def set_env(self, id: str, request: SetEnv) -> SandboxInfo:
        check_env(request.env)
        return await self._change(id, lambda owner: owner.set_env(request.env), make=True)

    async def start(self, id: str, request: StartSandbox | None = None) -> SandboxInfo:
        fresh = request is not None and request.fresh
        return await self._change(id, lambda owner: owner.start(fresh=fresh), make=True)

    async def stop(self, id: str) -> SandboxInfo:
        return await self._change(id, lambda owner: owner.stop("It was stopped on request.", self.settings.stop_grace))

    async def sleep(self, id: str, request: SleepSandbox) -> SandboxInfo:
        """Put it to sleep now. One that sleeps as deep, or deeper, stays as it is."""
        if request.stage == "freeze":
            return await self._change(id, lambda owner: owner.freeze("It was frozen on request."))
        grace = self.settings.stop_grace if request.grace is None else parse_duration(request.grace) or 0.0

        async def sleep(owner: Owner) -> None:
            await owner.stop("It was put to sleep on request.", grace)
            if request.ship:
                await self.shipments.ship(owner, request.bucket)

        return await self._change(id, sleep)

    async def wake(self, id: str, request: WakeSandbox | None = None) -> SandboxInfo:
        """As ``start``, of a sandbox that is there, or that lies in a bucket."""
        try:
            return await self._change(id, Owner.start)
        except SandboxNotFoundError:
            found = await self.shipments.find(normalise_id(id), None if request is None else request.bucket)
            if found is None:
                raise
        async with self._lock(normalise_id(id)):
            if normalise_id(id) not in self._owners:
                await _wholly(self._bring(*found))
        return await self._change(id, Owner.start)

    async def _bring(self, bucket: str, record: Record) -> SandboxRow:
        """One that another server shipped lives here from now on."""
        row = await self.shipments.bring(bucket, record)
        known = await self._store.get_sandbox(row.id)
        if known is None:
            await self._store.insert_sandbox(row)
        else:  # in a store that both servers share
            row = await self._store.update_sandbox(row.id, node=row.node, state=row.state, shipped=None)
        await self.shipments.arrived(bucket, record)
        return row

    async def renew(self, id: str) -> SandboxInfo:
        """Begin its idle time anew. One that sleeps is not woken."""
        info = await self.get(id)
        self.touch(info.id)
        return await self.get(id)

    async def restart(self, id: str) -> SandboxInfo:
        async def again(owner: Owner) -> None:
            await owner.stop("It was restarted on request.", self.settings.stop_grace)
            await owner.start()

        return await self._change(id, again, make=True)

    async def destroy(self, id: str) -> None:
        row: SandboxRow | None = None

        async def destroy(owner: Owner) -> None:
            nonlocal row
            row = owner.row
            await owner.destroy()

        await self._change(id, destroy)
        if row is not None:
            await self.shipments.forget(row)
        self._owners.pop(normalise_id(id), None)
        self.exposures.forget(normalise_id(id))
        self.backups.forget(normalise_id(id))

    async def events(self, id: str, after: int = 0, limit: int = 100) -> builtins.list[SandboxEvent]:
        id = normalise_id(id)
        found = await self.history.list(id, after, limit)
        if not found and not await self.history.list(id, limit=1):
            await self.get(id)
        return found

    async def follow(self, id: str, after: int = 0) -> AsyncGenerator[SandboxEvent, None]:
        """Its events as they happen, until it is destroyed. Looking counts as no use."""
        await self.events(id, limit=1)
        async with aclosing(self.history.follow(normalise_id(id), after)) as found:
            async for event in found:
                yield event

    async def measurements(self) -> bytes:
        """The server's metrics, as Prometheus reads them."""
        await self._ledger.flush()
        return self.metrics.text(await self._store.count_by_state(self._node))

    async def images(self) -> builtins.list[ImageInfo]:
        found = await self.provider.images()
        return [image.model_copy(update={"sandboxes": await self._store.count_by_image(image.name)}) for image in found]

    async def remove_image(self, name: str) -> None:
        await self.provider.require_image(name)
        kept = await self._store.snapshots.count_by_image(name)
        if kept:
            raise ImageInUseError(
                f"Image {name!r} is below {kept} snapshot{'s' if kept > 1 else ''}.", hint="Delete them first."
            )
        count = await self._store.count_by_image(name)
        if count:
            raise ImageInUseError(
                f"Image {name!r} is used by {count} sandbox{'es' if count > 1 else ''}.", hint="Destroy them first."
            )
        await self.provider.remove_image(name)

    @asynccontextmanager
    async def use(self, id: str) -> AsyncIterator[Runtime]:
        """The runtime of a sandbox, made on first use and woken when it sleeps; activity for as long as it is held."""
        id, began = normalise_id(id), time.perf_counter()
        while True:
            owner = self._owners.get(id) or await self._find(id, make=True)
            runtime = owner.enter()
            if runtime is not None:
                break
            async with owner.life:
                if not owner.gone:
                    await _wholly(owner.start())
                    runtime = owner.enter()
                    if runtime is not None:
                        break
            self._dismiss(owner)
        self.metrics.message_latency.observe(time.perf_counter() - began)
        try:
            yield runtime
        finally:
            owner.leave()

    def peek(self, id: str) -> Runtime | None:
        """The runtime of a sandbox that is awake. Wakes nothing, makes nothing, and counts as no use."""
        owner = self._owners.get(normalise_id(id))
        return owner.runtime if owner is not None and owner.awake else None

    def look(self, id: str) -> Runtime | None:
        """The same, of a frozen one too: nothing may be asked of its portal without ``use``."""
        owner = self._owners.get(normalise_id(id))
        return None if owner is None else owner.runtime

    def rouse(self, id: str) -> None:
        """Thaw a frozen sandbox, without waiting for it; cheap for one that is awake."""
        owner = self._owners.get(id)
        if owner is not None and owner.frozen and id not in self._rousing:
            task = self._rousing[id] = asyncio.get_running_loop().create_task(self._thaw(id))
            task.add_done_callback(lambda _: self._rousing.pop(id))

    async def _thaw(self, id: str) -> None:
        owner = self._owners.get(id)
        if owner is not None:
            async with owner.life:
                await owner.thaw()

    def touch(self, id: str) -> None:
        """The sandbox is being used right now, by something that does not hold it for as long as it lasts."""
        owner = self._owners.get(normalise_id(id))
        if owner is not None:
            owner.touch()

    @contextmanager
    def attend(self, id: str, quiet: float = QUIET_AFTER, wakes: bool = True) -> Iterator[Presence]:
        """For a connection that may last long: a user of the sandbox while ``stir`` is called, and a while after.

        ``wakes``: whether what comes in on it thaws the sandbox, should it be frozen.
        """
        id = normalise_id(id)
        presence = Presence(lambda: self._owners.get(id), quiet, (lambda: self.rouse(id)) if wakes else None)
        presence.stir()
        try:
            yield presence
        finally:
            presence.close()

    # -- owners --------------------------------------------------------------------------------------------------------

    async def _change(self, id: str, change: Callable[[Owner], Awaitable[None]], make: bool = False) -> SandboxInfo:
        id = normalise_id(id)
        while True:
            owner = self._owners.get(id) or await self._find(id, make=make)
            async with owner.life:
                if not owner.gone:
                    await _wholly(change(owner))
                    await self._ledger.flush()  # what was asked for and answered is on record
                    return owner.info()
            self._dismiss(owner)

    async def _find(self, id: str, *, make: bool) -> Owner:
        async with self._lock(id):
            owner = self._owners.get(id)
            if owner is not None:
                return owner
            if make:
                # Tried first, because it is the new ones that are in a hurry.
                with contextlib.suppress(SandboxExistsError):
                    return await self._insert(id, CreateSandbox(id=id))
            row = await self._store.get_sandbox(id)
            if row is None:
                raise SandboxNotFoundError(f"There is no sandbox {id!r}.", hint="The first command in it makes it.")
            if row.node != self._node:
                shipped = row.shipped and await self.shipments.find(id, row.shipped["bucket"])
                if not shipped:
                    raise ConflictError(f"Sandbox {id!r} lives on another server.", details={"node": row.node})
                row = await _wholly(self._bring(*shipped))
            return self._adopt(row)

    async def _make(self, id: str) -> None:
        """See to it that there is such a sandbox; it is not started."""
        id = normalise_id(id)
        if id not in self._owners:
            await self._find(id, make=True)

    async def _place(self, rows: Sequence[SandboxRow], snapshot: str) -> builtins.list[SandboxInfo]:
        """New sandboxes with the files of a snapshot: all of them, or none and an error."""
        return await _wholly(self._place_all(rows, snapshot))

    async def _place_all(self, rows: Sequence[SandboxRow], snapshot: str) -> builtins.list[SandboxInfo]:
        async with contextlib.AsyncExitStack() as locks:
            for id in sorted({row.id for row in rows}):
                await locks.enter_async_context(self._lock(id))
                if id in self._owners or await self._store.get_sandbox(id) is not None:
                    raise SandboxExistsError(f"Sandbox {id!r} already exists.", hint="Choose another id.")
            # Recorded when all are there: until then they have no owner, and a server that starts sweeps them.
            made = await asyncio.gather(
                *(self.provider.clone(snapshot, row.id) for row in rows), return_exceptions=True
            )
            try:
                for failure in made:
                    if failure is not None:
                        raise failure
                await self._store.insert_sandboxes(rows)
            except BaseException:
                for row, failure in zip(rows, made, strict=True):
                    if failure is None:
                        await self.provider.forget(row.id)
                raise
            return [self._adopt(row).info() for row in rows]

    async def _insert(self, id: str, request: CreateSandbox) -> Owner:
        row = self._row(id, request)
        await self._store.insert_sandbox(row)
        self.metrics.created.inc()
        self.history.record(id, "created", f"Created from image {request.image!r}.", to_state=State.CREATED)
        return self._adopt(row)

    def _row(self, id: str, request: CreateSandbox) -> SandboxRow:
        explicit = "sleep_after" in request.model_fields_set and request.sleep_after is not None
        return SandboxRow(
            id=id,
            node=self._node,
            state=State.CREATED,
            image=request.image,
            env=request.env,
            labels=request.labels,
            limits=request.limits.model_dump(exclude_none=True, by_alias=True),
            sleep_after=parse_duration(request.sleep_after) if explicit else self.settings.sleep_after,
            keep_alive=request.keep_alive,
            on_idle=request.on_idle,
            hibernate_after=parse_duration(request.hibernate_after),
            ephemeral=request.ephemeral,
            created_at=now(),
            started_at=None,
            last_active_at=None,
            starts=0,
            last_stop=None,
        )

    def _adopt(self, row: SandboxRow) -> Owner:
        owner = Owner(
            row,
            self.provider,
            self._store,
            self._ledger,
            self._pool,
            self._provision,
            self.history,
            self.metrics,
            self._attendants,
            self.mounts,
        )
        self._owners[row.id] = owner
        return owner

    def _dismiss(self, owner: Owner) -> None:
        if owner.gone and self._owners.get(owner.id) is owner:
            del self._owners[owner.id]

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


async def _wholly(change: Awaitable[T]) -> T:
    """A change of life is never left half done: a caller who gives up lets go only when it is through."""
    task = asyncio.ensure_future(change)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.gather(task, return_exceptions=True)
        raise


def _provision(settings: Settings) -> Provision:
    sizes = {
        language: Sizes(
            getattr(settings, f"{language}_pool_min_size"),
            getattr(settings, f"{language}_pool_max_size"),
            settings.pool_idle_timeout,
        )
        for language in LANGUAGES
    }
    timeout = None if settings.code_timeout is None else settings.code_timeout * 1000
    return Provision(sizes, timeout, [known(name) for name in settings.code_warm])


def _node(home: Path) -> str:
    """This server's name in a store that several share: random, and kept with the files it speaks for."""
    path = home / "node"
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        temporary = home / f"node.{secrets.token_hex(4)}"
        temporary.write_text(secrets.token_hex(8))
        try:
            path.hardlink_to(temporary)
        except FileExistsError:
            pass
        finally:
            temporary.unlink()
        return path.read_text().strip()
