"""Buckets mounted in sandboxes: remembered while a sandbox sleeps, brought back when it wakes."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import errno
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import structlog

from skerry.control.actor import caller
from skerry.control.identity import LOCAL, normalise_id
from skerry.control.own_buckets import OwnBuckets
from skerry.control.store import MountRow, Store
from skerry.errors import (
    BucketUnreachableError,
    DirectoryNotEmptyError,
    InvalidPathError,
    InvalidRequestError,
    MountExistsError,
    MountNotFoundError,
    SandboxStartError,
    SkerryError,
    UnsupportedError,
    error_from_errno,
)
from skerry.models import MountBucket, MountInfo, SandboxInfo, shown_id
from skerry.providers.contract import Capabilities, Machine
from skerry.runtime.paths import check_changeable, resolve
from skerry.settings import Settings

# What mounts buckets is imported by those who do: it would cost every server 30 ms to start.
if TYPE_CHECKING:
    from skerry.control.owner import Owner
    from skerry.egress.vault import Vault
    from skerry.storage.buckets import Bucket, Buckets
    from skerry.storage.mounts import BucketMount

DEFAULT = "default"
LONGEST_PREFIX = 512
MOST = 16
SETTLING = 30.0
LETTING_GO = 10.0
"""How long a sandbox that ends may wait for a bucket, in seconds; then whoever waits inside gets an error."""

log = structlog.get_logger(__name__)

Change = Callable[[str, Callable[["Owner"], Coroutine[Any, Any, None]], bool], Coroutine[Any, Any, SandboxInfo]]


class Mounts:
    """Those of all sandboxes."""

    def __init__(
        self,
        store: Store,
        settings: Settings,
        *,
        change: Change,
        get: Callable[[str], Awaitable[SandboxInfo]],
        peek: Callable[[str], Owner | None],
        can: Callable[[], Capabilities],
        vault: Callable[[], Vault],
        closed: Callable[[], bool] = lambda: True,
    ) -> None:
        """``closed``: whether the server wants keys."""
        self.own = OwnBuckets(settings, closed, vault)
        self.store = store
        self.settings = settings
        self._change = change
        self._get = get
        self._peek = peek
        self._can = can
        self._buckets: Buckets | None = None

    @property
    def buckets(self) -> Buckets:
        if self._buckets is None:
            from skerry.storage.buckets import Buckets

            self._buckets = Buckets(self.settings.home, self.settings.buckets)
        return self._buckets

    async def mount(self, id: str, request: MountBucket) -> MountInfo:
        """Mount a bucket, in a sandbox that is made or woken if need be. The same mount again changes nothing."""
        id = normalise_id(id)
        if not self._can().mounts:
            raise _unsupported()
        row = self._row(id, request)
        # Before anything changes: a bucket that cannot be read is no use to anyone inside.
        await _require_readable(self.opened(row), self.settings.mount_timeout)

        async def add(owner: Owner) -> None:
            await owner.start()
            owner.touch()
            await owner.mounts.add(row)

        await self._change(id, add, True)
        return next(mount for mount in await self.list(id) if mount.mount_path == row.path)

    async def unmount(self, id: str, path: str) -> MountInfo:
        """Take a mount away, and forget it; what was closed is saved first. A sandbox that sleeps is left to sleep."""
        path = resolve(path, "/")
        found = next((mount for mount in await self.list(id) if mount.mount_path == path), None)

        async def remove(owner: Owner) -> None:
            await owner.mounts.remove(path)

        await self._change(id, remove, False)
        assert found is not None  # or it would have been missed there
        return found

    async def list(self, id: str) -> builtins.list[MountInfo]:
        """Oldest first. Raises ``SandboxNotFoundError``."""
        id = normalise_id(id)
        await self._get(id)
        rows = await self.store.mounts(id)
        owner = self._peek(id)
        return [self._described(row, owner.mounts if owner is not None else None) for row in rows]

    def of(self, owner: Owner) -> MountPoints:
        return MountPoints(self, owner)

    def opened(self, row: MountRow) -> Bucket:
        bucket = self.buckets.open(row.bucket) if row.own is None else self.own.opened(row)
        return bucket.within(row.prefix)

    def _row(self, id: str, request: MountBucket) -> MountRow:
        path = check_path(request.mount_path)
        own = self.own.kept(request, id, path)
        if own is None:
            bucket, prefix = self._chosen(request).name, normalised_prefix(request.prefix, id)
        else:
            bucket, prefix = request.bucket or "", checked_prefix(request.prefix or "")
        return MountRow(sandbox_id=id, path=path, bucket=bucket, prefix=prefix, read_only=request.read_only, own=own)

    def _chosen(self, request: MountBucket) -> Bucket:
        if request.bucket is None:
            return self.buckets.open(DEFAULT) if request.local_bucket else self.buckets.remote()
        bucket = self.buckets.open(request.bucket)
        if request.local_bucket and bucket.kind != "directory":
            raise InvalidRequestError(
                f"Bucket {bucket.name!r} is not a local one.", hint="Leave either bucket or localBucket out."
            )
        return bucket

    def _described(self, row: MountRow, points: MountPoints | None) -> MountInfo:
        mount, error = points.find(row.path) if points is not None else (None, None)
        local = row.bucket == DEFAULT and row.own is None
        with contextlib.suppress(SkerryError):
            local = row.own is None and self.buckets.open(row.bucket).kind == "directory"
        return MountInfo(
            mount_path=row.path,
            prefix=_shown(row.prefix),
            mode="localBucket" if local else "remoteR2",
            bucket=row.bucket,
            endpoint=None if row.own is None else row.own["endpoint"],
            read_only=row.read_only,
            state="asleep" if mount is None else "failed" if error else "mounted",
            error=error or (None if mount is None else mount.last_error),
            mounted_at=row.mounted_at,
        )


class MountPoints:
    """Those of one sandbox. Everything but ``find`` is called with the owner's ``life`` held."""

    def __init__(self, mounts: Mounts, owner: Owner) -> None:
        self._mounts = mounts
        self._owner = owner
        self._attached: dict[str, BucketMount] = {}
        self._errors: dict[str, str] = {}

    def find(self, path: str) -> tuple[BucketMount | None, str | None]:
        return self._attached.get(path), self._errors.get(path)

    async def add(self, row: MountRow) -> None:
        there = {known.path: known for known in await self._mounts.store.mounts(row.sandbox_id)}
        known = there.get(row.path)
        if known is not None and _same(known, row) and self._mounts.own.same(known, row):
            return
        _check_free(row.path, builtins.list(there))
        machine = self._owner.machine
        assert machine is not None
        began = time.perf_counter()
        await self._attach(machine, row, self._mounts.opened(row))
        try:
            await self._mounts.store.save_mount(row)
        except BaseException:
            await self._detach(machine, row.path)
            raise
        self._owner.record(
            "mounted",
            f"Bucket {row.bucket!r} was mounted at {row.path}.",
            took=time.perf_counter() - began,
            details={"path": row.path, "bucket": row.bucket, "prefix": _shown(row.prefix), "readOnly": row.read_only},
        )

    async def remove(self, path: str) -> None:
        machine = self._owner.machine
        if machine is not None and path in self._attached:
            # Nothing that was closed is lost, even if the bucket is slow; then the name goes, then the rest.
            await self._settle()
            await self._detach(machine, path)
        if not await self._mounts.store.delete_mount(self._owner.id, path):
            raise MountNotFoundError(
                f"Nothing is mounted at {path!r} in sandbox {self._owner.id!r}.",
                hint="`skerry mounts` lists what is.",
                details={"path": path},
            )
        self._owner.record("unmounted", f"The bucket at {path} was unmounted.", details={"path": path})

    async def restore(self, machine: Machine) -> None:
        """Bring back what was mounted when the sandbox fell asleep, or refuse to start it."""
        for row in await self._mounts.store.mounts(self._owner.id):
            bucket = reason = None
            try:
                bucket = self._mounts.opened(row)
            except SkerryError as error:
                reason = error.message
            try:
                await self._attach(machine, row, bucket)
            except SkerryError as error:
                await self.close()
                raise SandboxStartError(
                    f"The bucket {row.bucket!r} could not be mounted at {row.path} again: {error.message}",
                    hint=f"Put that right, or give the mount up: `skerry unmount {self._owner.id} {row.path}`.",
                    details={"path": row.path},
                ) from error
            if reason is not None:
                # Mounted all the same: everything in it is an error, and nobody takes it for an empty directory.
                self._errors[row.path] = reason
                self._owner.record(
                    "mount_failed", f"The bucket at {row.path} cannot be used: {reason}", details={"path": row.path}
                )

    @asynccontextmanager
    async def leaving(self, grace: float = 0.0) -> AsyncIterator[None]:
        """While the machine ends, which may take ``grace`` seconds: first what was closed is saved; in the end nobody
        waits for a bucket any more."""
        if not self._attached:
            yield
            return
        await self._settle()
        timer = asyncio.get_running_loop().call_later(grace + LETTING_GO, self._abort)
        try:
            yield
        finally:
            timer.cancel()
            await self.close()

    async def close(self) -> None:
        """The machine is gone, or going."""
        mounts = builtins.list(self._attached.values())
        self._attached.clear()
        self._errors.clear()
        await asyncio.gather(*(mount.close() for mount in mounts))

    async def forget(self) -> None:
        """Of an ephemeral sandbox nothing stays."""
        for row in await self._mounts.store.mounts(self._owner.id):
            await self._mounts.store.delete_mount(self._owner.id, row.path)

    async def _attach(self, machine: Machine, row: MountRow, bucket: Bucket | None) -> None:
        try:
            fd = await machine.mount(row.path, row.read_only)
        except OSError as error:
            raise _why(error, row.path) from error
        from skerry.storage.mounts import BucketMount

        settings = self._mounts.settings
        self._attached[row.path] = BucketMount(
            fd,
            bucket,
            read_only=row.read_only,
            spool=settings.home / "spool",
            spool_limit=settings.mount_spool,
            patience=settings.mount_timeout,
            lost=lambda key, reason: self._lost(row.path, key, reason),
            moved=lambda way, size: self._owner.metrics.bytes.labels(way).inc(size),
        )

    async def _detach(self, machine: Machine, path: str) -> None:
        await machine.unmount(path)
        self._errors.pop(path, None)
        await self._attached.pop(path).close()

    async def _settle(self) -> None:
        settling = [asyncio.ensure_future(mount.settle()) for mount in self._attached.values()]
        _, late = await asyncio.wait(settling, timeout=SETTLING)
        for task in late:
            task.cancel()
        await asyncio.gather(*settling, return_exceptions=True)

    def _abort(self) -> None:
        for mount in self._attached.values():
            mount.abort()

    def _lost(self, path: str, key: str, reason: str) -> None:
        message = f"A file on the bucket at {path} could not be saved after it was closed: {key}: {reason}."
        log.warning("a file was not saved", sandbox=self._owner.id, path=path, reason=reason)
        self._owner.record("upload_failed", message, details={"path": path, "key": key, "reason": reason})


async def _require_readable(bucket: Bucket, patience: float) -> None:
    try:
        async with asyncio.timeout(patience):
            await _read_something(bucket)
    except TimeoutError:
        raise BucketUnreachableError(
            f"Bucket {bucket.name!r} did not answer in time.",
            hint="Look at its endpoint and the network; then try again.",
            details={"bucket": bucket.name},
        ) from None


async def _read_something(bucket: Bucket) -> None:
    if bucket.kind == "directory":
        await bucket.children()
        return
    found = bucket.list()
    try:
        async for _ in found:
            return
    finally:
        await found.aclose()  # type: ignore[attr-defined]


def check_path(path: str) -> str:
    path = check_changeable(resolve(path, "/"), force=False)
    if path.startswith("/run/") or path in ("/run", "/tmp", "/home", "/root", "/workspace"):
        raise InvalidPathError(
            f"A bucket cannot be mounted at {path!r}.", hint="Choose a directory of its own, such as /persist."
        )
    return path


def normalised_prefix(prefix: str | None, id: str) -> str:
    """Without slashes at its ends; nothing for the whole bucket.

    All but the local owner have a part of each bucket for themselves, and no prefix leads out of it.
    """
    text = f"projects/{shown_id(id)}" if prefix is None else prefix.strip().strip("/")
    owner = caller.get().owner
    return checked_prefix(text if owner == LOCAL else f"owners/{owner}/{text}")


def checked_prefix(prefix: str) -> str:
    text = prefix.strip().strip("/")
    if text:
        from skerry.storage.bucket import check_key

        check_key(text)
    if len(text.encode()) > LONGEST_PREFIX:
        raise InvalidRequestError(f"A prefix may have at most {LONGEST_PREFIX} bytes.")
    return text


def _shown(prefix: str) -> str:
    return f"/{prefix}/" if prefix else "/"


def _same(one: MountRow, other: MountRow) -> bool:
    return (one.bucket, one.prefix, one.read_only) == (other.bucket, other.prefix, other.read_only)


def _check_free(path: str, taken: builtins.list[str]) -> None:
    if len(taken) >= MOST:
        raise InvalidRequestError(f"A sandbox has at most {MOST} mounts.", hint="Unmount one, or use a wider prefix.")
    for other in taken:
        if path == other or path.startswith(other + "/") or other.startswith(path + "/"):
            raise MountExistsError(
                f"{path!r} cannot be mounted: there is a mount at {other!r} already.",
                hint="Unmount that, or choose another path.",
                details={"path": path, "mounted": other},
            )


def _unsupported() -> UnsupportedError:
    return UnsupportedError(
        "Buckets cannot be mounted on this machine: /dev/fuse is missing, or not open to Skerry.",
        hint="`skerry doctor` says what to do.",
    )


def _why(error: OSError, path: str) -> SkerryError:
    details = {"path": path}
    match error.errno:
        case errno.ENODEV | errno.ENOSYS | errno.EPERM:
            return _unsupported()
        case errno.ELOOP:
            return InvalidPathError(
                f"{path!r} leads through a symbolic link.", hint="Give the path it leads to.", details=details
            )
        case errno.EXDEV:
            return InvalidPathError(
                f"{path!r} is not on the sandbox's own file system, but on one that is mounted there already.",
                hint="Choose a directory of its own, such as /persist.",
                details=details,
            )
        case errno.ENOTEMPTY:
            return DirectoryNotEmptyError(
                f"{path!r} is not empty, and a mount would hide what is in it.",
                hint="Choose another path, or move its content away.",
                details=details,
            )
        case _:
            return error_from_errno(error.errno or errno.EIO, path)
