"""Who owns which sandbox: the same id always reaches the same owner, and so the same machine."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from skerry.control.exposures import Exposures
from skerry.control.identity import normalise_id, parse_duration
from skerry.control.ledger import Ledger
from skerry.control.owner import Owner, Presence, describe
from skerry.control.pool import Pool
from skerry.control.store import SandboxRow, Store
from skerry.errors import ConflictError, ImageInUseError, SandboxBusyError, SandboxExistsError, SandboxNotFoundError
from skerry.models import (
    CreateSandbox,
    ImageInfo,
    SandboxEvent,
    SandboxInfo,
    SandboxList,
    SetEnv,
    State,
    UpdateSandbox,
    now,
)
from skerry.providers.contract import Provider
from skerry.runtime.environment import check_env
from skerry.runtime.interpreter.languages import LANGUAGES, known
from skerry.runtime.interpreter.pool import Provision, Sizes
from skerry.runtime.runtime import Runtime
from skerry.settings import Settings

log = structlog.get_logger(__name__)

REAP_EVERY = 1.0
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
        self.exposures = Exposures(store, self._ledger, settings.home, get=self.get, make=self._make)
        self._reaper: asyncio.Task[None] | None = None

    # -- opening and closing -------------------------------------------------------------------------------------------

    async def open(self) -> None:
        await self.provider.open()
        try:
            await self._store.open()
            self._node = _node(self.settings.home)
            await self._settle()
        except BaseException:
            await self._store.close()
            await self.provider.close()
            raise
        self._ledger.open()
        self._pool.open()
        self._reaper = asyncio.get_running_loop().create_task(self._reap())

    async def close(self) -> None:
        """Put every machine to sleep and leave nothing running."""
        if self._reaper is not None:
            self._reaper.cancel()
            await asyncio.gather(self._reaper, return_exceptions=True)
        await self._pool.close()
        await asyncio.gather(*(self._put_to_sleep(owner) for owner in list(self._owners.values())))
        await self._ledger.close()
        await self.provider.close()
        await self._store.close()

    async def _put_to_sleep(self, owner: Owner) -> None:
        async with owner.life:
            if owner.active:
                await owner.stop("The server was stopped.")

    async def _settle(self) -> None:
        """Put right what a server that ended without saying so has left behind, and say so."""
        rows = await self._store.all_sandboxes(self._node)
        for row in rows:
            if row.state not in (State.ACTIVE, State.STARTING, State.DESTROYED) or not await self._idle(row.id):
                continue
            if row.state == State.DESTROYED:
                await self.provider.forget(row.id)
                await self._store.delete_sandbox(row.id)
            else:
                reason = "The server ended unexpectedly; processes that were running ended with it. The files are kept."
                if row.ephemeral:
                    await self.provider.forget(row.id)
                    reason = "The server ended unexpectedly; this sandbox is ephemeral, so its files are gone."
                await self._store.update_sandbox(row.id, state=State.HIBERNATED, last_stop=reason)
                await self._store.end_processes(row.id, reason)
                await self._store.add_event(row.id, "stopped", reason)
        for what in await self.provider.sweep({row.id for row in rows}):
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
        operations = {id: owner.operations for id, owner in self._owners.items()}
        return SandboxList(
            sandboxes=[describe(row, operations.get(row.id, 0)) for row in rows],
            next_cursor=rows[-1].id if more else None,
        )

    async def update(self, id: str, request: UpdateSandbox) -> SandboxInfo:
        changes: dict[str, object] = {}
        if request.labels is not None:
            changes["labels"] = request.labels
        if "sleep_after" in request.model_fields_set:
            changes["sleep_after"] = parse_duration(request.sleep_after)
        return await self._change(id, lambda owner: owner.update(**changes))

    async def set_env(self, id: str, request: SetEnv) -> SandboxInfo:
        check_env(request.env)
        return await self._change(id, lambda owner: owner.set_env(request.env), make=True)

    async def start(self, id: str) -> SandboxInfo:
        return await self._change(id, Owner.start, make=True)

    async def stop(self, id: str) -> SandboxInfo:
        return await self._change(id, lambda owner: owner.stop("It was stopped on request."))

    async def restart(self, id: str) -> SandboxInfo:
        async def again(owner: Owner) -> None:
            await owner.stop("It was restarted on request.")
            await owner.start()

        return await self._change(id, again, make=True)

    async def destroy(self, id: str) -> None:
        await self._change(id, Owner.destroy)
        self._owners.pop(normalise_id(id), None)
        self.exposures.forget(normalise_id(id))

    async def events(self, id: str, after: int = 0, limit: int = 100) -> builtins.list[SandboxEvent]:
        info = await self.get(id)
        await self._ledger.flush()
        return await self._store.events(info.id, after, limit)

    async def images(self) -> builtins.list[ImageInfo]:
        found = await self.provider.images()
        return [image.model_copy(update={"sandboxes": await self._store.count_by_image(image.name)}) for image in found]

    async def remove_image(self, name: str) -> None:
        await self.provider.require_image(name)
        count = await self._store.count_by_image(name)
        if count:
            raise ImageInUseError(
                f"Image {name!r} is used by {count} sandbox{'es' if count > 1 else ''}.", hint="Destroy them first."
            )
        await self.provider.remove_image(name)

    @asynccontextmanager
    async def use(self, id: str) -> AsyncIterator[Runtime]:
        """The runtime of a sandbox, made on first use and woken when it sleeps; activity for as long as it is held."""
        id = normalise_id(id)
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
        try:
            yield runtime
        finally:
            owner.leave()

    def peek(self, id: str) -> Runtime | None:
        """The runtime of a sandbox that is awake. Wakes nothing, makes nothing, and counts as no use."""
        owner = self._owners.get(normalise_id(id))
        return None if owner is None else owner.runtime

    def touch(self, id: str) -> None:
        """The sandbox is being used right now, by something that does not hold it for as long as it lasts."""
        owner = self._owners.get(normalise_id(id))
        if owner is not None:
            owner.touch()

    @contextmanager
    def attend(self, id: str, quiet: float = QUIET_AFTER) -> Iterator[Presence]:
        """For a connection that may last long: a user of the sandbox while ``stir`` is called, and a while after."""
        id = normalise_id(id)
        presence = Presence(lambda: self._owners.get(id), quiet)
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
                raise ConflictError(f"Sandbox {id!r} lives on another server.", details={"node": row.node})
            return self._adopt(row)

    async def _make(self, id: str) -> None:
        """See to it that there is such a sandbox; it is not started."""
        id = normalise_id(id)
        if id not in self._owners:
            await self._find(id, make=True)

    async def _insert(self, id: str, request: CreateSandbox) -> Owner:
        explicit = "sleep_after" in request.model_fields_set and request.sleep_after is not None
        row = SandboxRow(
            id=id,
            node=self._node,
            state=State.CREATED,
            image=request.image,
            env=request.env,
            labels=request.labels,
            limits=request.limits.model_dump(exclude_none=True, by_alias=True),
            sleep_after=parse_duration(request.sleep_after) if explicit else self.settings.sleep_after,
            ephemeral=request.ephemeral,
            created_at=now(),
            started_at=None,
            last_active_at=None,
            starts=0,
            last_stop=None,
        )
        await self._store.insert_sandbox(row)
        self._ledger.post(lambda: self._store.add_event(id, "created", f"Created from image {request.image!r}."))
        return self._adopt(row)

    def _adopt(self, row: SandboxRow) -> Owner:
        owner = Owner(row, self.provider, self._store, self._ledger, self._pool, self._provision)
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

    # -- idleness ------------------------------------------------------------------------------------------------------

    async def _reap(self) -> None:
        """Sandboxes that nobody uses go to sleep; owners of sleeping ones are not kept in memory."""
        while True:
            await asyncio.sleep(REAP_EVERY)
            for owner in list(self._owners.values()):
                limit = owner.row.sleep_after
                if owner.life.locked() or owner.operations:
                    continue
                if owner.active and (limit is None or owner.idle_for() < limit):
                    continue
                async with owner.life:
                    if owner.operations:
                        continue
                    if owner.active:
                        await owner.stop(f"Nobody used it for {limit:g} seconds.")
                    elif owner.idle_for() > REAP_EVERY:
                        owner.gone = True
                        self._dismiss(owner)


async def _wholly(change: Awaitable[None]) -> None:
    """A change of life is never left half done: a caller who gives up lets go only when it is through."""
    task = asyncio.ensure_future(change)
    try:
        await asyncio.shield(task)
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
