"""Who owns which sandbox: the same id always reaches the same owner, and so the same machine."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import structlog

from skerry.control.actor import caller, own_id
from skerry.control.aftermath import settle
from skerry.control.allowances import Allowances
from skerry.control.audit import Audit
from skerry.control.backups import SandboxBackups
from skerry.control.bootstrap import Bootstraps
from skerry.control.egress import Displaced, Egress
from skerry.control.events import Events
from skerry.control.exposures import Exposures
from skerry.control.identity import normalise_id, parse_duration
from skerry.control.ledger import Ledger
from skerry.control.limits import SandboxLimits
from skerry.control.meter import Meter
from skerry.control.metrics import THRESHOLDS, Metrics
from skerry.control.mounts import Mounts
from skerry.control.owner import Attendants, Owner, describe
from skerry.control.pool import Pool
from skerry.control.presence import Presence
from skerry.control.reaper import Reaper
from skerry.control.reception import Reception
from skerry.control.roster import Roster, wholly
from skerry.control.shipments import Shipments
from skerry.control.snapshots import Snapshots
from skerry.control.store import SandboxRow, Store
from skerry.control.usage import Collector
from skerry.control.webhooks import Webhooks
from skerry.control.workspaces import Workspaces
from skerry.egress.resolver import Resolver
from skerry.egress.vault import Vault
from skerry.errors import (
    ConflictError,
    FilesMissingError,
    ImageInUseError,
    SandboxNotFoundError,
    UnsupportedError,
)
from skerry.limits import host_memory
from skerry.models import (
    CreateSandbox,
    EgressInfo,
    ImageInfo,
    KeyScope,
    SandboxEvent,
    SandboxInfo,
    SandboxList,
    SandboxMetrics,
    Secrets,
    SetEgress,
    SetEnv,
    SleepSandbox,
    StartSandbox,
    State,
    UpdateSandbox,
    Usage,
    WakeSandbox,
    now,
    shown_id,
)
from skerry.providers.contract import Provider
from skerry.runtime.environment import check_env
from skerry.runtime.interpreter.languages import LANGUAGES, known
from skerry.runtime.interpreter.pool import Provision, Sizes
from skerry.runtime.runtime import Runtime
from skerry.settings import Settings

if TYPE_CHECKING:
    pass

log = structlog.get_logger(__name__)

T = TypeVar("T")

CLOSING_GRACE = 2.0
"""Seconds that processes have at most when the server closes."""
SLOW, _ = THRESHOLDS["sandbox.message_latency"]
QUIET_AFTER = 60.0
"""A connection on which nothing moved for so many seconds no longer keeps a sandbox awake."""


class Registry:
    def __init__(
        self,
        provider: Provider,
        store: Store,
        settings: Settings,
        *,
        guarded: bool = True,
        resolver: Resolver | None = None,
    ) -> None:
        """``guarded``: whether others than the program itself can ask, so that there may be keys and quotas."""
        self.provider = provider
        self.settings = settings
        self._store = store
        self._ledger = Ledger()
        self._provision = _provision(settings)
        self._limits = SandboxLimits(settings.limits, host_memory(), provider.capabilities)
        self._owners: dict[str, Owner] = {}
        self._node = ""
        self.metrics = Metrics()
        self.allowances = Allowances(store.accounts, settings, self._owners.values)
        self.reception = Reception(settings, store.accounts if guarded else None, self.allowances, self._on_closed)
        self.audit = Audit(store.audit, self.metrics, settings, lambda: self._node)
        self.webhooks = Webhooks(store.webhooks, self.metrics, settings, self._closed)
        self._egress = Egress(settings, self.metrics, self._closed, resolver, lambda: provider.capabilities().egress)
        self._pool = Pool(provider, settings.warm_pool, self._provision, self._limits.of({}), self._egress)
        store.on_queued = self.webhooks.courier.nudge
        self.history = Events(
            store,
            self._ledger,
            limit=settings.event_limit,
            days=settings.event_days,
            provider=lambda: provider.capabilities().name,
        )
        self.backups = SandboxBackups(settings, provider, self.history, self.metrics, self.get)
        self.shipments = Shipments(provider, self.backups, self.history, lambda: self._node, settings.ship_to)
        self._roster = Roster(
            self._owners,
            provider,
            store,
            settings,
            allowances=self.allowances,
            egress=self._egress,
            history=self.history,
            ledger=self._ledger,
            metrics=self.metrics,
            restores=self.backups.restores,
            shipments=self.shipments,
            node=lambda: self._node,
            owner=self._owner,
        )
        self.exposures = Exposures(store, self.history, settings.home, get=self.get, make=self._roster.make)
        self.workspaces = Workspaces(settings, store, self.history, self.metrics, self.get)
        self.mounts = Mounts(
            store,
            settings,
            change=self._roster.change,
            get=self.get,
            peek=self._owners.get,
            can=provider.capabilities,
            vault=lambda: self.vault,
            closed=self._closed,
        )
        self.bootstraps = Bootstraps(self.mounts, self.history)
        self.snapshots = Snapshots(
            provider,
            store,
            self.history,
            self.metrics,
            self.backups.restores,
            node=lambda: self._node,
            change=self._roster.change,
            place=self._roster.place,
            loaded=self._owners.values,
        )
        self.collector = Collector(store, settings, self.allowances, self._owners.values, lambda: self._node)
        self.accounts = store.accounts
        self.tasks = store.tasks
        self.schedules = store.schedules
        self.workers = store.workers
        self.sessions = store.sessions
        self._guarded = guarded
        self._attendants = Attendants(
            admit=self.allowances.admit,
            leaving=self.collector.leaving,
            claim=self.shipments.claim,
            copied=self.snapshots.copied,
            woken=self.backups.settle,
            tired=self.workspaces.before_sleep,
            asleep=self.shipments.asleep,
        )
        self._reaper = Reaper(self._owners.values, self._roster.dismiss, self._expire, settings.stop_grace)
        self._rousing: dict[str, asyncio.Task[None]] = {}

    def _closed(self) -> bool:
        return self.reception.closed

    def _on_closed(self) -> None:
        """Others may come from now on: what sandboxes may reach for want of a policy of their own is less."""
        for owner in self._owners.values():
            owner.renew_egress()

    def _owner(self, row: SandboxRow) -> Owner:
        return Owner(
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
            self._limits,
            self._egress,
        )

    @property
    def node(self) -> str:
        """This server's name in a store that several share."""
        return self._node

    @property
    def vault(self) -> Vault:
        return self._egress.vault

    async def show_life(self) -> None:
        """To the other servers of the store, which give up the tasks of one that they do not hear of any more."""
        await self._store.seen(self._node, now())

    # -- opening and closing -------------------------------------------------------------------------------------------

    async def open(self) -> None:
        await self.provider.open()
        try:
            await self._store.open()
            self._egress.open(self.settings.home)
            self._node = _node(self.settings.home)
            if self.settings.region or self.settings.public_url:
                await self._store.introduce(self._node, self.settings.public_url, self.settings.region)
            await settle(
                self._node, store=self._store, provider=self.provider, backups=self.backups, snapshots=self.snapshots
            )
            await self._expire()
            await self.workspaces.open()
            if self._guarded:
                await self.reception.open()
        except BaseException:
            await self._store.close()
            await self.provider.close()
            raise
        self._ledger.open()
        self.audit.open()
        self.webhooks.courier.open()
        self._pool.open()
        self.backups.open()
        self._reaper.open()
        if self._guarded:
            self.collector.open()

    async def close(self) -> None:
        """Put every machine to sleep and leave nothing running."""
        await self._reaper.close()
        await self.collector.close()
        await self.reception.close()
        await asyncio.gather(*self._rousing.values(), return_exceptions=True)
        await self.backups.close()
        await self._pool.close()
        await asyncio.gather(*(self._put_to_sleep(owner) for owner in list(self._owners.values())))
        await self._ledger.close()
        await self.webhooks.courier.close()
        await self.audit.close()
        await self.provider.close()
        await self._store.close()
        self._egress.close()

    async def _expire(self) -> None:
        """Forget what is too old."""
        await self.history.expire()
        await self.audit.expire()
        await self.webhooks.expire()

    async def _put_to_sleep(self, owner: Owner) -> None:
        async with owner.life:
            if owner.running:
                await owner.stop("The server was stopped.", min(self.settings.stop_grace, CLOSING_GRACE))

    # -- sandboxes -----------------------------------------------------------------------------------------------------

    async def create(self, request: CreateSandbox) -> SandboxInfo:
        id = own_id(request.id or f"sandbox-{int(time.time())}-{secrets.token_hex(4)}")
        check_env(request.env)
        await self._require_toolboxes(request.toolboxes)
        if request.snapshot is not None:
            async with self._roster.placed(id, request.provider):
                wanted = [(self._roster.row(id, request), request)]
                (made,) = await self.snapshots.create_sandboxes(request.snapshot, wanted)
            await self.history.flush()
            return made.info()
        return (await self._roster.create(id, request)).info()

    async def create_from(self, snapshot: str, requests: Sequence[CreateSandbox]) -> None:
        """Sandboxes over one snapshot, where that is: all of them, or none and an error. They are being started when
        this returns, their files may still be on their way, and one that cannot be says why to whoever uses it."""
        for request in requests:
            check_env(request.env)
        await self._require_toolboxes({name: None for request in requests for name in request.toolboxes})
        rows = [self._roster.row(own_id(request.id or ""), request) for request in requests]
        await self.snapshots.create_sandboxes(snapshot, list(zip(rows, requests, strict=True)), soon=True)

    async def elsewhere(self, what: str, node: str) -> ConflictError:
        """It is another server's of this store; where that is, if that one has told."""
        return await self._roster.elsewhere(what, node)

    def check(self, request: CreateSandbox) -> None:
        """Raises for what could not be made, and makes nothing."""
        check_env(request.env)
        self._check_toolboxes(request.toolboxes)
        self._egress.kept(request)

    def _check_toolboxes(self, names: Collection[str]) -> None:
        if names and not self.provider.capabilities().toolboxes:
            raise UnsupportedError(
                "The sandboxes of this server's provider cannot be shown programs of the host, such as agents.",
                hint="Use a server whose provider is local or docker.",
            )

    async def _require_toolboxes(self, names: Collection[str]) -> None:
        self._check_toolboxes(names)
        for name in names:
            await self.provider.require_toolbox(name)

    async def get(self, id: str) -> SandboxInfo:
        id = normalise_id(id)
        owner = self._owners.get(id)
        if owner is not None:
            return owner.info()
        row = await self._store.get_sandbox(id)
        if row is None:
            raise SandboxNotFoundError(f"There is no sandbox {id!r}.", hint="The first command in it makes it.")
        return describe(row, self._limits, self.provider)

    async def list(
        self,
        *,
        state: State | None = None,
        image: str | None = None,
        labels: Mapping[str, str] | None = None,
        prefix: str | None = None,
        limit: int = 50,
        cursor: str | None = None,
        everyone: bool = False,
    ) -> SandboxList:
        """Those of whoever asks, or, with ``everyone``, of all owners."""
        await self._ledger.flush()
        who = caller.get()
        rows = await self._store.list_sandboxes(
            state=state,
            image=image,
            labels=labels or {},
            prefix=prefix,
            limit=limit + 1,
            after=cursor if cursor is None or everyone else cursor + who.mark,
            owner=None if everyone else who.owner,
            only=who.sandbox,
        )
        more = len(rows) > limit
        rows = rows[:limit]
        last = rows[-1].id if more else None
        return SandboxList(
            sandboxes=[describe(row, self._limits, self.provider, self._owners.get(row.id)) for row in rows],
            next_cursor=last if last is None or everyone else shown_id(last),
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
        limits = request.limits if request.limits is not None and request.limits.model_fields_set else None
        if not changes and limits is None:
            return await self.get(id)

        async def change(owner: Owner) -> None:
            if limits is not None:
                await owner.limit(limits)
            if changes:
                await owner.update(**changes)
                owner.record("updated", f"Changed: {', '.join(sorted(changes))}.", details={"changed": sorted(changes)})

        return await self._roster.change(id, change)

    async def usage(self, id: str) -> Usage:
        """What a sandbox has used in all its life. Wakes nothing."""
        return (await self.measure(id)).usage

    async def measure(self, id: str, since: datetime | None = None) -> SandboxMetrics:
        """What a sandbox uses now and has used, and its samples after ``since``. Wakes nothing, counts as no use."""
        info = await self.get(id)
        owner = self._owners.get(info.id)
        if owner is None:
            row = await self._store.get_sandbox(info.id)
            meter = Meter({} if row is None or row.usage is None else row.usage)
        else:
            meter = owner.meter
        return SandboxMetrics(
            sandbox_id=info.id,
            state=info.state,
            now=None if owner is None else owner.sample(keep=False),
            limits=info.limits,
            usage=meter.usage(),
            history=meter.history(since),
        )

    async def set_env(self, id: str, request: SetEnv) -> SandboxInfo:
        check_env(request.env)

        async def change(owner: Owner) -> None:
            await owner.set_env(request.env)
            names = sorted(request.env)  # never what they hold
            owner.record("updated", f"Environment changed: {', '.join(names)}.", details={"env": names})

        return await self._roster.change(id, change, make=True)

    async def egress(self, id: str) -> EgressInfo:
        id = normalise_id(id)
        owner = self._owners.get(id)
        if owner is not None:
            return owner.egress_info()
        row = await self._store.get_sandbox(id)
        if row is None:
            raise SandboxNotFoundError(f"There is no sandbox {id!r}.", hint="The first command in it makes it.")
        return self._egress.info(row, Usage.model_validate(row.usage or {}), None)

    async def set_egress(self, id: str, request: SetEgress) -> EgressInfo:
        await self._roster.change(id, lambda owner: owner.set_egress(request), make=True)
        return await self.egress(id)

    async def add_secrets(self, id: str, secrets: Secrets) -> Displaced:
        """Beside those that a sandbox has already. What they took the place of is for ``put_back_secrets``."""
        before: Displaced = {}

        async def add(owner: Owner) -> None:
            nonlocal before
            before = await owner.add_secrets(secrets)

        await self._roster.change(id, add, make=True)
        return before

    async def put_back_secrets(self, id: str, secrets: Displaced) -> None:
        await self._roster.change(id, lambda owner: owner.put_back(secrets))

    async def start(self, id: str, request: StartSandbox | None = None) -> SandboxInfo:
        fresh = request is not None and request.fresh
        return await self._roster.change(id, lambda owner: owner.start(fresh=fresh), make=True)

    async def stop(self, id: str) -> SandboxInfo:
        return await self._roster.change(
            id, lambda owner: owner.stop("It was stopped on request.", self.settings.stop_grace, asked=True)
        )

    async def sleep(self, id: str, request: SleepSandbox) -> SandboxInfo:
        """Put it to sleep now. One that sleeps as deep, or deeper, stays as it is."""
        if request.stage == "freeze":
            return await self._roster.change(id, lambda owner: owner.freeze("It was frozen on request."))
        grace = self.settings.stop_grace if request.grace is None else parse_duration(request.grace) or 0.0

        async def sleep(owner: Owner) -> None:
            await owner.stop("It was put to sleep on request.", grace)
            if request.ship:
                await self.shipments.ship(owner, request.bucket)

        return await self._roster.change(id, sleep)

    async def wake(self, id: str, request: WakeSandbox | None = None) -> SandboxInfo:
        """As ``start``, of a sandbox that is there, or that lies in a bucket."""
        try:
            return await self._roster.change(id, Owner.start)
        except SandboxNotFoundError:
            found = await self.shipments.find(normalise_id(id), None if request is None else request.bucket)
            if found is None:
                raise
        await self._roster.bring(normalise_id(id), *found)
        return await self._roster.change(id, Owner.start)

    async def renew(self, id: str) -> SandboxInfo:
        """Begin its idle time anew. One that sleeps is not woken."""
        info = await self.get(id)
        self.touch(info.id)
        return await self.get(id)

    async def restart(self, id: str) -> SandboxInfo:
        async def again(owner: Owner) -> None:
            await owner.stop("It was restarted on request.", self.settings.stop_grace)
            await owner.start()

        return await self._roster.change(id, again, make=True)

    async def destroy(self, id: str) -> None:
        row: SandboxRow | None = None

        async def destroy(owner: Owner) -> None:
            nonlocal row
            row = owner.row
            await owner.destroy()

        await self._roster.change(id, destroy)
        if row is not None:
            await self.shipments.forget(row)
        self._owners.pop(normalise_id(id), None)
        self.exposures.forget(normalise_id(id))
        self.backups.restores.forget(normalise_id(id))

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

    def population(self) -> tuple[int, int]:
        """How many machines wait for a sandbox, and how many run for one."""
        return self._pool.ready, sum(owner.runtime is not None for owner in self._owners.values())

    async def images(self) -> builtins.list[ImageInfo]:
        found = await self.provider.images()
        who = caller.get()
        whose = None if who.scope is KeyScope.ADMIN else who.owner
        counts = [await self._store.count_by_image(image.name, whose) for image in found]
        return [image.model_copy(update={"sandboxes": count}) for image, count in zip(found, counts, strict=True)]

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
            owner = self._owners.get(id) or await self._roster.find(id, make=True)
            runtime = owner.enter()
            if runtime is not None:
                break
            try:
                async with owner.life:
                    if not owner.gone:
                        await wholly(owner.start())
                        runtime = owner.enter()
                        if runtime is not None:
                            break
            finally:
                self._roster.dismiss(owner)
        waited = time.perf_counter() - began
        self.metrics.message_latency.observe(waited)
        if waited > SLOW:
            owner.alert("sandbox.message_latency", waited)
        try:
            yield runtime
        finally:
            owner.leave()

    @asynccontextmanager
    async def refill(self, id: str) -> AsyncIterator[Runtime]:
        """As ``use``, to restore a backup: one whose files are missing takes it, and nothing else until it is there."""
        async with contextlib.AsyncExitStack() as stack:
            try:
                runtime = await stack.enter_async_context(self.use(id))
            except FilesMissingError:
                runtime = await stack.enter_async_context(
                    self._refill(await self._roster.find(normalise_id(id), make=False))
                )
            yield runtime

    @asynccontextmanager
    async def _refill(self, owner: Owner) -> AsyncIterator[Runtime]:
        async with owner.life:
            if owner.gone or owner.running:
                raise ConflictError(f"Sandbox {owner.id!r} has changed meanwhile.", hint="Try again.")
            owner.filling = True
            try:
                with self.backups.refills.begun(owner.id, {}):
                    await wholly(owner.start(fresh=True))
                    runtime = owner.runtime
                    assert runtime is not None
                    owner.operations += 1
                    try:
                        yield runtime
                    finally:
                        owner.leave()
                        if not self.backups.filled(runtime):
                            await wholly(owner.lose())
            finally:
                self.backups.refills.settled(owner.id)
                owner.filling = False

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
