"""Backups: directories of sandboxes, or whole machines, kept in buckets.

backups/<id>/000000.tar …     the parts of one archive
backups/<id>/manifest.json    written last: without it there is no backup
"""

from __future__ import annotations

import asyncio
import builtins
import re
import secrets
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import structlog

from skerry.errors import (
    BackupCancelledError,
    BackupDamagedError,
    BackupExpiredError,
    BackupNotFoundError,
    InvalidRequestError,
    ObjectNotFoundError,
    SkerryError,
)
from skerry.models import BackupInfo, BackupList, BackupRequest, RestoreResult, now
from skerry.portal.contract import Portal
from skerry.storage.archive import Packing, Report, Staging, Summary
from skerry.storage.bucket import Bucket
from skerry.storage.buckets import Buckets
from skerry.storage.encryption import Key, Seal
from skerry.storage.manifest import LARGEST, Encryption, Manifest, manifest_key, prefix_of, read, verified, written
from skerry.storage.parts import Upload, download
from skerry.storage.restores import Restores
from skerry.storage.unfinished import Unfinished

log = structlog.get_logger(__name__)

ABANDONED = timedelta(days=1)
"""Parts that have had no manifest for so long were left by a server that is gone."""
TOGETHER = 4
READERS = 16
_ID = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_-]{0,99}")
T = TypeVar("T")


@dataclass(frozen=True)
class Source:
    """What is backed up: of which sandbox, through which portal, and for how long it is kept."""

    portal: Portal
    sandbox: str
    dir: str
    since: int | None = None
    """For a whole machine: nanoseconds after which a file of the system counts as changed."""
    deleted: tuple[str, ...] = ()
    """For a whole machine: what it has deleted of its image."""
    ttl: float | None = None


class Backups:
    def __init__(self, buckets: Buckets, key: Key | None, home: Path, restores: Restores | None = None) -> None:
        self.buckets = buckets
        self.key = key
        self._unfinished = Unfinished(home / "backups")
        self._restores = restores or Restores(home / "restores")
        self._running: dict[str, asyncio.Task[BackupInfo]] = {}
        self._expiry: dict[tuple[str, str], datetime | None] = {}
        self._turns = asyncio.Semaphore(TOGETHER)
        self._swaps: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    # -- making --------------------------------------------------------------------------------------------------------

    @staticmethod
    def new_id() -> str:
        return f"{now():%Y%m%dT%H%M%S}-{secrets.token_hex(4)}"

    async def create(self, id: str, source: Source, request: BackupRequest, report: Report) -> BackupInfo:
        """Cancelling it, or ``delete(id)`` meanwhile, leaves nothing behind."""
        bucket = self.buckets.open(request.bucket)
        work = asyncio.create_task(self._create(id, bucket, source, request, report))
        self._running[id] = work
        try:
            return await work
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise BackupCancelledError(f"Backup {id!r} was cancelled.") from None
        finally:
            del self._running[id]

    async def _create(
        self, id: str, bucket: Bucket, source: Source, request: BackupRequest, report: Report
    ) -> BackupInfo:
        async with self._turns:
            with self._unfinished.begun(id, {"bucket": bucket.name, "id": id}):
                seal = None if self.key is None else Seal(self.key, id)
                upload = Upload(bucket, id, request.compression, request.level, seal)
                try:
                    return await self._ship(id, bucket, source, request, upload, seal, report)
                except BaseException:
                    await wholly(self._take_back(id, bucket, upload))
                    raise

    async def _ship(
        self,
        id: str,
        bucket: Bucket,
        source: Source,
        request: BackupRequest,
        upload: Upload,
        seal: Seal | None,
        report: Report,
    ) -> BackupInfo:
        arguments = {"path": source.dir, "excludes": request.excludes, "gitignore": request.gitignore}
        packing = Packing(source.portal, {**arguments, "since": source.since}, report, source.deleted)
        created = now()
        async with aclosing(packing.read()) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                await upload.write(chunk)
        await upload.finish()
        summary = packing.summary
        assert summary is not None
        manifest = Manifest(
            id=id,
            dir=source.dir,
            name=request.name,
            sandbox=source.sandbox,
            created_at=created,
            expires_at=None if source.ttl is None else created + timedelta(seconds=source.ttl),
            compression=request.compression,
            encryption=None if seal is None else Encryption(salt=seal.salt.hex(), sign=seal.sign),
            files=summary.files,
            bytes=summary.bytes,
            archive=upload.size,
            sha256=upload.sha256,
            parts=upload.parts,
            left_out=summary.left_out,
            examples=summary.examples,
        )
        await bucket.put(manifest_key(id), written(manifest, seal))
        return manifest.info(bucket.name)

    async def _take_back(self, id: str, bucket: Bucket, upload: Upload) -> None:
        await upload.cancel()
        try:
            await remove(bucket, id)
        except SkerryError as error:
            log.warning("backup_left_for_the_sweep", backup=id, bucket=bucket.name, code=error.code)
        else:
            self._unfinished.settled(id)

    # -- restoring -----------------------------------------------------------------------------------------------------

    async def restore(
        self, portal: Portal, sandbox: str, info: BackupInfo, dir: str | None, report: Report
    ) -> RestoreResult:
        """All of it, or an error and what was there before."""
        bucket = self.buckets.open(info.bucket)
        manifest, text, mac = await self._manifest(bucket, info.id)
        if manifest.expired(now()):
            raise BackupExpiredError(f"Backup {info.id!r} expired at {manifest.expires_at:%Y-%m-%d %H:%M:%S} UTC.")
        seal = verified(manifest, text, mac, self.key)
        target = dir or manifest.dir
        if manifest.machine != (target == "/"):
            raise InvalidRequestError(
                f"Backup {info.id!r} is of {'a whole machine' if manifest.machine else 'a directory'}, "
                f"so it cannot be restored to {target!r}.",
                hint="Leave dir out." if manifest.machine else "Name a directory below '/'.",
            )

        async def fill(staging: Staging) -> Summary:
            archive = download(bucket, manifest, seal)
            summary = await staging.fill(archive, manifest.files, manifest.bytes, report)
            if (summary.files, summary.bytes) != (manifest.files, manifest.bytes):
                raise BackupDamagedError(f"Backup {info.id!r} is damaged: it holds less than it says.")
            return summary

        async with self._turns:
            summary = await self._replace(portal, sandbox, target, manifest.machine, fill)
        return RestoreResult(
            sandbox_id=sandbox,
            backup=info.id,
            dir=target,
            files=manifest.files,
            bytes=manifest.bytes,
            left_out=summary.left_out,
        )

    async def restore_archive(self, portal: Portal, sandbox: str, archive: str, dir: str) -> None:
        """An archive that lies in the sandbox itself takes the place of a directory, wholly or not at all."""
        async with self._turns:
            await self._replace(portal, sandbox, dir, False, lambda staging: staging.unsquash(archive))

    async def _replace(
        self, portal: Portal, sandbox: str, target: str, machine: bool, fill: Callable[[Staging], Awaitable[T]]
    ) -> T:
        staging = await Staging.prepare(portal, target, machine=machine)
        with self._restores.begun(sandbox, {"target": staging.target, "places": staging.places}) as name:
            try:
                filled = await fill(staging)
                async with self._swaps.setdefault(sandbox, asyncio.Lock()):
                    await wholly(staging.swap())
            except BaseException:
                await wholly(self._give_up(staging, name))
                raise
        return filled

    async def _give_up(self, staging: Staging, name: str) -> None:
        try:
            await staging.settle()
        except SkerryError as error:
            # The machine is gone, perhaps: it is settled when it next starts.
            log.warning("restore_left_for_the_next_start", sandbox=name.partition(".")[0], code=error.code)
        else:
            self._restores.settled(name)

    async def settle(self, portal: Portal, sandbox: str) -> int:
        """Put right what restores into a sandbox left behind when it ended under them; how many there were."""
        left = self._restores.left(sandbox)
        for name, facts in left:
            await Staging(portal, facts["target"], facts["places"]).settle()
            self._restores.settled(name)
        return len(left)

    # -- what there is -------------------------------------------------------------------------------------------------

    async def list(
        self, *, sandbox: str | None = None, name: str | None = None, bucket: str | None = None
    ) -> BackupList:
        """Oldest first; of all buckets unless one is named, and then those that do not answer are named too."""
        found: list[BackupInfo] = []
        unreachable = []
        for place in [bucket] if bucket else self.buckets.names:
            try:
                found += await self._infos(self.buckets.open(place))
            except SkerryError:
                if bucket:
                    raise
                unreachable.append(place)
        found = [
            one
            for one in found
            if (sandbox is None or one.sandbox_id == sandbox) and (name is None or one.name == name)
        ]
        return BackupList(backups=sorted(found, key=lambda one: (one.created_at, one.id)), unreachable=unreachable)

    async def get(self, id: str, bucket: str | None = None) -> BackupInfo:
        unreachable: SkerryError | None = None
        if _ID.fullmatch(id):
            for place in [bucket] if bucket else self.buckets.names:
                try:
                    opened = self.buckets.open(place)
                    return (await self._manifest(opened, id))[0].info(opened.name)
                except (BackupNotFoundError, BackupDamagedError) as error:
                    if bucket or isinstance(error, BackupDamagedError):
                        raise
                except SkerryError as error:
                    if bucket:
                        raise
                    unreachable = error
        if unreachable is not None:
            raise unreachable
        raise unknown(id)

    async def delete(self, id: str, bucket: str | None = None) -> None:
        """Delete a backup, or cancel one that is being made."""
        running = self._running.get(id)
        if running is not None:
            running.cancel()
            await asyncio.wait({running})
            return
        try:
            place = (await self.get(id, bucket)).bucket
        except BackupDamagedError as error:
            place = str(error.details["bucket"])
        await self._delete(id, self.buckets.open(place))

    async def _delete(self, id: str, bucket: Bucket) -> None:
        with self._unfinished.begun(f"{id}.{secrets.token_hex(4)}", {"bucket": bucket.name, "id": id}):
            await remove(bucket, id)
        self._expiry.pop((bucket.name, id), None)

    async def _infos(self, bucket: Bucket) -> builtins.list[BackupInfo]:
        turns = asyncio.Semaphore(READERS)

        async def one(id: str) -> BackupInfo | None:
            async with turns:
                try:
                    return (await self._manifest(bucket, id))[0].info(bucket.name)
                except (BackupNotFoundError, BackupDamagedError):
                    return None  # on its way in or out; or not something to offer

        return [info for info in await asyncio.gather(*map(one, await _ids(bucket))) if info is not None]

    async def _manifest(self, bucket: Bucket, id: str) -> tuple[Manifest, str, str | None]:
        try:
            data = await bucket.read(manifest_key(id), 0, LARGEST)
        except ObjectNotFoundError:
            raise unknown(id) from None
        try:
            return read(id, data)
        except BackupDamagedError as error:
            error.details["bucket"] = bucket.name
            raise

    # -- sweeping ------------------------------------------------------------------------------------------------------

    async def sweep(self) -> builtins.list[str]:
        """Delete what has expired, and what was begun by someone who is gone; the ids of both."""
        swept = []
        for name, facts in self._unfinished.left():
            try:
                await remove(self.buckets.open(facts["bucket"]), facts["id"])
            except SkerryError as error:
                log.warning("sweep_postponed", backup=facts["id"], bucket=facts["bucket"], code=error.code)
                continue
            self._unfinished.settled(name)
            swept.append(facts["id"])
        for place in self.buckets.names:
            try:
                swept += await self._sweep_bucket(self.buckets.open(place))
            except SkerryError as error:
                log.warning("sweep_postponed", bucket=place, code=error.code)
        return swept

    async def _sweep_bucket(self, bucket: Bucket) -> builtins.list[str]:
        swept = []
        for id in await _ids(bucket):
            if id in self._running:
                continue
            if (bucket.name, id) not in self._expiry:
                try:
                    manifest, _, _ = await self._manifest(bucket, id)
                except BackupDamagedError:
                    continue
                except BackupNotFoundError:
                    ages = [item.modified async for item in bucket.list(prefix_of(id))]
                    if ages and now() - max(ages) > ABANDONED:
                        await remove(bucket, id)
                        swept.append(id)
                    continue
                self._expiry[bucket.name, id] = manifest.expires_at
            expires = self._expiry[bucket.name, id]
            if expires is not None and expires <= now():
                await self._delete(id, bucket)
                swept.append(id)
        return swept

    async def close(self) -> None:
        running = list(self._running.values())
        for work in running:
            work.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def remove(bucket: Bucket, id: str) -> None:
    """The manifest first: from then on there is no backup, whatever is still to be deleted."""
    await bucket.delete(manifest_key(id))
    keys = [item.key async for item in bucket.list(prefix_of(id))]
    if keys:
        await bucket.delete(*keys)


async def _ids(bucket: Bucket) -> list[str]:
    _, inner = await bucket.children("backups")
    return [id for key in inner if _ID.fullmatch(id := key.rpartition("/")[2])]


async def wholly(work: Coroutine[Any, Any, T]) -> T:
    """Not left half done: a caller who gives up lets go only when it is through."""
    task = asyncio.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
        except Exception:  # noqa: BLE001 - raised below, by result()
            pass
    if cancelled is not None and not task.cancelled() and task.exception() is None:
        raise cancelled
    return task.result()


def unknown(id: str) -> BackupNotFoundError:
    return BackupNotFoundError(f"There is no backup {id[:100]!r}.", hint="`skerry backups` lists those there are.")
