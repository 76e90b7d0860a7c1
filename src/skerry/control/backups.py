"""Backups of sandboxes: who asks, of which machine, and what becomes known of it. The work itself is storage's."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar
from weakref import WeakSet

import structlog

from skerry.control.actor import caller
from skerry.control.events import Events
from skerry.control.identity import mark_in, normalise_id, parse_duration
from skerry.control.metrics import Metrics
from skerry.errors import BackupDamagedError, BackupNotFoundError, SkerryError
from skerry.models import (
    BackupEvent,
    BackupInfo,
    BackupList,
    BackupRequest,
    BackupResult,
    BucketInfo,
    KeyScope,
    RestoreRequest,
    RestoreResult,
    SandboxInfo,
)
from skerry.providers.contract import Provider
from skerry.runtime.environment import WORKSPACE
from skerry.runtime.paths import resolve
from skerry.runtime.runtime import Runtime
from skerry.settings import Settings
from skerry.storage.restores import Restores
from skerry.storage.unfinished import Unfinished

if TYPE_CHECKING:
    from skerry.portal.contract import Portal
    from skerry.storage.backups import Backups
    from skerry.storage.bucket import Bucket
    from skerry.storage.encryption import Key

log = structlog.get_logger(__name__)

QUIET = 30.0
"""Seconds after the start in which others come first."""
T = TypeVar("T")
Report = Callable[[int, int], None]


def _nobody(files: int, size: int) -> None:
    return None


class SandboxBackups:
    def __init__(
        self,
        settings: Settings,
        provider: Provider,
        history: Events,
        metrics: Metrics,
        get: Callable[[str], Awaitable[SandboxInfo]],
    ) -> None:
        self._settings = settings
        self._provider = provider
        self._history = history
        self._metrics = metrics
        self._get = get
        self.restores = Restores(settings.home / "restores")
        self.refills = Unfinished(settings.home / "refills")
        """Sandboxes whose files were missing and are being restored: if that is cut off they are missing still."""
        self._opened: Backups | None = None
        self._making: dict[str, str] = {}
        """The sandboxes of backups that are being made."""
        self._filled: WeakSet[Runtime] = WeakSet()
        self._sweeper: asyncio.Task[None] | None = None

    @property
    def _backups(self) -> Backups:
        # What these import costs tens of milliseconds, which a sandbox that is never backed up should not pay.
        if self._opened is None:
            from skerry.storage.backups import Backups
            from skerry.storage.buckets import Buckets
            from skerry.storage.encryption import read_key

            settings = self._settings
            key = read_key(settings.backup_key, settings.backup_key_file)
            self._opened = Backups(Buckets(settings.home, settings.buckets), key, settings.home, self.restores)
        return self._opened

    def open(self) -> None:
        self._sweeper = asyncio.get_running_loop().create_task(self._sweep())

    async def close(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
        if self._opened is not None:
            await self._opened.close()

    # -- making and restoring ------------------------------------------------------------------------------------------

    async def backup(
        self, runtime: Runtime, id: str, request: BackupRequest, report: Report = _nobody, backup: str | None = None
    ) -> BackupResult:
        from skerry.storage.backups import Source

        id = normalise_id(id)
        ttl = parse_duration(request.ttl)
        dir = resolve(request.dir, WORKSPACE)
        source = Source(runtime.portal, id, dir, ttl=ttl)
        if dir == "/":
            source = replace(source, since=await self._since(id), deleted=await self._deleted(id))
        began = time.perf_counter()
        name = backup or self._new_id(id)
        self._making[name] = id
        try:
            with self._metrics.timed("backup"):
                info = await self._told(id, "backup", self._backups.create(name, source, request, report))
        finally:
            del self._making[name]
        self._metrics.bytes.labels("up").inc(info.size)
        self._history.record(
            id,
            "backed_up",
            f"{dir} was backed up to bucket {info.bucket!r}: {info.files} files.",
            took=time.perf_counter() - began,
            details={"backup": info.id, "bucket": info.bucket, "bytes": info.bytes, "size": info.size},
        )
        return BackupResult(sandbox_id=id, backup=info)

    async def restore(
        self, runtime: Runtime, id: str, request: RestoreRequest, report: Report = _nobody
    ) -> RestoreResult:
        id = normalise_id(id)
        dir = None if request.dir is None else resolve(request.dir, WORKSPACE)
        info = await self._wanted(request)
        await self._provider.make_room(info.bytes)
        began = time.perf_counter()
        with self._metrics.timed("restore"):
            work = self._backups.restore(runtime.portal, id, info, dir, report)
            result = await self._told(id, "restore", work)
        self.made_good(id, runtime)
        self._metrics.bytes.labels("down").inc(info.size)
        self._history.record(
            id,
            "restored",
            f"{result.dir} was restored from backup {info.id}: {result.files} files.",
            took=time.perf_counter() - began,
            details={"backup": info.id, "bucket": info.bucket, "bytes": info.bytes},
        )
        return result

    async def restore_archive(self, runtime: Runtime, id: str, archive: str, dir: str) -> None:
        """An archive in the sandbox's own files takes the place of a directory of it."""
        id, began = normalise_id(id), time.perf_counter()
        await self._told(id, "restore", self._backups.restore_archive(runtime.portal, id, archive, dir))
        self._history.record(
            id, "restored", f"{dir} was restored from an archive in the sandbox.", took=time.perf_counter() - began
        )

    def made_good(self, id: str, runtime: Runtime) -> None:
        """Its files are there again, if they were missing."""
        self._filled.add(runtime)
        self.refills.settled(id)

    def filled(self, runtime: Runtime) -> bool:
        """Whether something was restored through it."""
        return runtime in self._filled

    async def backup_events(self, runtime: Runtime, id: str, request: BackupRequest) -> AsyncIterator[BackupEvent]:
        """The same with news on the way; closing it cancels."""
        backup = self._new_id(normalise_id(id))
        yield BackupEvent(type="start", id=backup)
        progress: _Progress[BackupResult] = _Progress(backup, "packing", None)
        async with contextlib.aclosing(
            progress.follow(self.backup(runtime, id, request, progress.report, backup))  # type: ignore[type-var]
        ) as events:
            async for event in events:
                yield event
        yield BackupEvent(type="complete", id=backup, backup=progress.result.backup)

    async def restore_events(self, runtime: Runtime, id: str, request: RestoreRequest) -> AsyncIterator[BackupEvent]:
        info = await self._wanted(request)
        yield BackupEvent(type="start", id=info.id, total=info.bytes)
        progress: _Progress[RestoreResult] = _Progress(info.id, "unpacking", info.bytes)
        async with contextlib.aclosing(
            progress.follow(self.restore(runtime, id, request, progress.report))  # type: ignore[type-var]
        ) as events:
            async for event in events:
                yield event
        yield BackupEvent(type="complete", id=info.id, restored=progress.result)

    async def settle(self, id: str, runtime: Runtime) -> None:
        """A sandbox has just started: what a restore that was cut off has left in it is put right first."""
        await self._put_right(id, runtime.portal)

    async def _put_right(self, id: str, portal: Portal) -> None:
        if self.restores.left(id) and await self._backups.settle(portal, id):
            self._history.record(id, "restore_undone", "A restore was cut off; what it had begun was put right.")

    # -- what there is -------------------------------------------------------------------------------------------------

    def buckets(self) -> list[BucketInfo]:
        """Where they are is the business of who runs the server."""
        found = self._backups.buckets.list()
        if caller.get().scope is KeyScope.ADMIN:
            return found
        return [one.model_copy(update={"location": ""}) for one in found]

    async def list(
        self, *, sandbox: str | None = None, name: str | None = None, bucket: str | None = None
    ) -> BackupList:
        who = caller.get()
        found = await self._backups.list(sandbox=None if sandbox is None else who.id(sandbox), name=name, bucket=bucket)
        return found.model_copy(update={"backups": [one for one in found.backups if who.owns(one.sandbox_id or "")]})

    async def get(self, id: str, bucket: str | None = None) -> BackupInfo:
        """One that whoever asks may see. As with sandboxes, another's cannot be named."""
        from skerry.storage.backups import unknown

        info = await self._backups.get(self._inner(id), bucket)
        if not caller.get().owns(info.sandbox_id or ""):
            raise unknown(id)
        return info

    async def delete(self, id: str, bucket: str | None = None) -> None:
        """Also one that is being made, which has no manifest yet."""
        from skerry.storage.backups import unknown

        inner, who = self._inner(id), caller.get()
        info: BackupInfo | None = None
        with contextlib.suppress(BackupNotFoundError, BackupDamagedError):  # being made, perhaps, or beyond reading
            info = await self._backups.get(inner, bucket)
        sandbox = self._making.get(inner) if info is None else info.sandbox_id
        if who.sandbox is not None and sandbox != who.sandbox:
            raise unknown(id)
        await self._backups.delete(inner, bucket)
        if info is not None and info.sandbox_id is not None:
            said = f"Backup {info.name or id!r} in bucket {info.bucket!r} was deleted."
            self._history.record(info.sandbox_id, "backup_deleted", said, details={"backup": id})
            await self._history.flush()

    @staticmethod
    def _inner(id: str) -> str:
        from skerry.storage.backups import unknown

        if id.endswith("-"):
            raise unknown(id)
        return id + caller.get().mark

    def _new_id(self, sandbox: str) -> str:
        return self._backups.new_id() + mark_in(sandbox)

    # -- whole machines, for those who ship them -----------------------------------------------------------------------

    @property
    def key(self) -> Key | None:
        return self._backups.key

    def bucket(self, name: str | None) -> Bucket:
        return self._backups.buckets.open(name)

    async def pack(self, portal: Portal, id: str, bucket: str) -> BackupInfo:
        from skerry.storage.backups import Source

        await self._put_right(id, portal)
        source = Source(portal, id, "/", await self._since(id), await self._deleted(id))
        request = BackupRequest(dir="/", name=f"{id}, asleep", bucket=bucket)
        return await self._backups.create(self._new_id(id), source, request, _nobody)

    async def discard(self, backup: str, bucket: str) -> None:
        """What was packed is of no more use; nobody need know."""
        await self._backups.delete(backup, bucket)

    async def unpack(self, portal: Portal, id: str, backup: str, bucket: str) -> None:
        info = await self._backups.get(backup, bucket)
        await self._provider.make_room(info.bytes)
        await self._backups.restore(portal, id, info, None, _nobody)

    # -- within --------------------------------------------------------------------------------------------------------

    async def _wanted(self, request: RestoreRequest) -> BackupInfo:
        if isinstance(request.backup, str):
            return await self.get(request.backup, request.bucket)
        return await self.get(request.backup.id, request.bucket or request.backup.bucket)

    async def _since(self, id: str) -> int:
        """When what lies below the machine was made: only a change in the machine gives a file a younger ctime."""
        made = (self._settings.home / "node").stat().st_mtime_ns
        image = (await self._get(id)).image
        for one in await self._provider.images():
            if one.name == image and one.created_at is not None:
                made = max(made, int(one.created_at.timestamp() * 1e9))
        return made

    async def _deleted(self, id: str) -> tuple[str, ...]:
        return tuple(await self._provider.deleted(id, (await self._get(id)).image))

    async def _told(self, id: str, operation: str, work: Awaitable[T]) -> T:
        try:
            return await work
        except SkerryError as error:
            self._history.record(id, f"{operation}_failed", error.message, details={"code": error.code})
            raise

    async def _sweep(self) -> None:
        """At the start, for what a server before has left, and then now and again for what expires."""
        if not any((self._settings.home / "backups").glob("*")):
            await asyncio.sleep(min(QUIET, self._settings.backup_sweep))
        await asyncio.to_thread(importlib.import_module, "skerry.storage.backups")
        while True:
            try:
                for swept in await self._backups.sweep():
                    log.info("swept", what=f"backup {swept}")
            except SkerryError as error:
                log.warning("sweep_failed", code=error.code, message=error.message)
            except OSError as error:
                log.warning("sweep_failed", error=type(error).__name__)
            await asyncio.sleep(self._settings.backup_sweep)


class _Progress(Generic[T]):
    """Events of a work while it is done; only the last of those nobody had time to read."""

    result: T

    def __init__(self, id: str, phase: Literal["packing", "unpacking"], total: int | None) -> None:
        self._id, self._total = id, total
        self._phase: Literal["packing", "unpacking"] = phase
        self._news = asyncio.Event()
        self._last = (0, 0)

    def report(self, files: int, size: int) -> None:
        self._last = (files, size)
        self._news.set()

    async def follow(self, work: Coroutine[Any, Any, T]) -> AsyncIterator[BackupEvent]:
        task = asyncio.ensure_future(work)
        task.add_done_callback(lambda _: self._news.set())
        try:
            while True:
                await self._news.wait()
                self._news.clear()
                if task.done():
                    self.result = task.result()
                    return
                files, size = self._last
                yield BackupEvent(
                    type="progress", id=self._id, phase=self._phase, files=files, bytes=size, total=self._total
                )
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
