"""The files of sandboxes: one volume each, their snapshots, and the trash. Where they are depends on the host.

- the home is on btrfs: in the home, as subvolumes;
- the server is root: in the home's pool, a disk of its own in a file, as subvolumes;
- neither: in the home, as plain directories, and a snapshot is a copy.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import secrets
import stat
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import structlog

from skerry.errors import (
    NoSpaceError,
    SandboxBusyError,
    SandboxExistsError,
    SandboxStartError,
    SkerryError,
    SnapshotError,
    SnapshotNotFoundError,
)
from skerry.providers.local import btrfs
from skerry.providers.local.idmap import IdMap
from skerry.providers.local.launcher import Launcher
from skerry.providers.local.pool import Pool, lost
from skerry.providers.local.volumes import BtrfsVolumes, PlainVolumes, Volumes

log = structlog.get_logger(__name__)

T = TypeVar("T")
Hold = Callable[[Callable[[], None]], None]

_PLACES = ("sandboxes", "snapshots", "trash")
_WATCH_EVERY = 0.25
_FULL = 8 << 20


class Disk:
    """Methods that are not coroutines block."""

    def __init__(self, home: Path, pool_size: int | None) -> None:
        self.reason: str | None = None
        """Why snapshots take as long as copies here, in a sentence; None where they are instant."""
        self.uncounted: str | None = "Sandboxes' files are not in a pool, which only a server that is root has."
        """Why sandboxes cannot be held to a limit of disk space, in a sentence; None where they can."""
        self._home = home
        self._base = home
        self._idmap: IdMap
        self._volumes: Volumes
        self._pool: Pool | None = None
        self._pool_size = pool_size
        self._watcher: asyncio.Task[None] | None = None

    @property
    def kind(self) -> str:
        return self._volumes.kind

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What a child needs to have open to follow the paths that are given out here."""
        return () if self._pool is None else self._pool.descriptors

    # -- where it is ---------------------------------------------------------------------------------------------------

    def prepare(self, idmap: IdMap) -> None:
        self._idmap = idmap
        self._volumes = PlainVolumes(idmap)
        for name in _PLACES:
            directory = self._home / name
            directory.mkdir(exist_ok=True)
            # Reachable for the user sandboxes run as, through the launcher's own mounts; home itself is closed to all.
            directory.chmod(0o711 if name == "sandboxes" else 0o700)
        pool = Pool(self._home, self._pool_size)
        if pool.file.exists():
            if self._idmap.kind != "root":
                raise lost(pool, "this server is not root")
            self._pool = pool
        elif btrfs.is_btrfs(self._home):
            self._volumes = BtrfsVolumes(self._idmap)
        else:
            self.reason = self._why_plain(pool)
            if self.reason is None:
                self._make_pool(pool)

    def _make_pool(self, pool: Pool) -> None:
        try:
            pool.make()
            self._pool = pool
        except OSError as error:
            self.reason = f"A pool could not be made: {error.strerror or error}."

    def _why_plain(self, pool: Pool) -> str | None:
        if self._idmap.kind != "root":
            return "The home is not on btrfs, and only root can mount a pool."
        places = (self._home / "sandboxes", self._home / "snapshots")
        if any(not name.startswith(".") for place in places for name in os.listdir(place)):
            return "The home has sandboxes that are plain directories, made before it could have a pool."
        return pool.impossible()

    def exposed(self) -> dict[str, Path]:
        """What the launcher must show to those who run as the sandboxes' user."""
        return {} if self._pool is not None else {"sandboxes": self._home / "sandboxes"}

    @asynccontextmanager
    async def device(self) -> AsyncIterator[int | None]:
        """The pool's device, for as long as it takes to mount it; None where there is no pool."""
        if self._pool is None:
            yield None
            return
        with contextlib.ExitStack() as stack:
            await asyncio.to_thread(stack.enter_context, self._pool.locked())
            try:
                device = await asyncio.to_thread(self._pool.attach)
            except OSError as error:
                raise lost(self._pool, error.strerror or str(error)) from error
            stack.callback(os.close, device)
            yield device

    def mounted(self, launcher: Launcher, mount: str | None, unmounted: str | None) -> bool:
        """The launcher has mounted the pool, or could not. False if it must be staged again, without one."""
        if self._pool is None:
            return True
        if mount is None:
            reason = unmounted or "the launcher gave no reason"
            if not self._pool.fresh:
                raise lost(self._pool, reason)
            self._pool.file.unlink()
            self._pool, self.reason = None, f"A pool could not be mounted: {reason}."
            return False
        self._pool.enter(launcher.pid, mount)
        self._base = self._pool.root
        self._volumes = BtrfsVolumes(self._idmap, self._pool.relieve)
        try:
            btrfs.count_simply(self._pool.root)
            self.uncounted = None
        except OSError as error:
            self.uncounted = f"The pool cannot count what each sandbox wrote ({error.strerror}): that takes Linux 6.7."
        return True

    def watch(self, busy: Callable[[], bool]) -> None:
        """Let the pool grow while there are sandboxes that might fill it."""
        if self._pool is not None and self._watcher is None:
            self._watcher = asyncio.get_running_loop().create_task(self._watch(self._pool, busy))

    async def _watch(self, pool: Pool, busy: Callable[[], bool]) -> None:
        while True:
            await asyncio.sleep(_WATCH_EVERY)
            if busy():
                try:
                    await asyncio.to_thread(pool.grow_if_low)
                except OSError as error:
                    log.warning("the pool could not be looked at", reason=error.strerror)

    async def make_room(self, size: int) -> None:
        if self._pool is not None:
            await asyncio.to_thread(self._pool.make_room, size)

    async def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
            self._watcher = None
        if self._pool is not None:
            await asyncio.to_thread(self._pool.leave)

    # -- sandboxes -----------------------------------------------------------------------------------------------------

    def directory(self, id: str) -> Path:
        return self._base / "sandboxes" / id

    def _snapshot(self, name: str) -> Path:
        return self._base / "snapshots" / name

    def exists(self, id: str) -> bool:
        return (self.directory(id) / "root").is_dir()

    def make_layer(self, id: str, name: str) -> None:
        layer = self.directory(id) / name
        if os.path.isdir(layer / "work"):  # the last of them
            return
        for path in (layer, layer / "upper", layer / "work"):
            if not path.exists():
                path.mkdir(mode=0o755)
                if self._idmap.kind == "root":
                    os.chown(path, self._idmap.runner_uid, self._idmap.runner_gid)

    async def acquire(self, id: str) -> int:
        """The lock that says which process runs this sandbox; it falls with the process that holds it."""
        for _ in range(5):
            with contextlib.suppress(SandboxBusyError):
                return self._lock(id)
            await asyncio.sleep(0.02)  # another server may only be looking whether it is held
        return self._lock(id)

    def _lock(self, id: str) -> int:
        with _told(f"Sandbox {id!r} could not be started", SandboxStartError):
            return self._locked(id)

    def _locked(self, id: str) -> int:
        directory = self.directory(id)
        path = os.fspath(directory)
        if not os.path.exists(path):
            with contextlib.suppress(FileExistsError):
                self._volumes.create(directory)
        if self._idmap.kind == "root":
            wanted, found = (self._idmap.runner_uid, self._idmap.runner_gid), os.stat(path)
            if (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) != (*wanted, 0o700):
                os.chmod(path, 0o700)
                os.chown(path, *wanted)
        lock = os.open(f"{path}/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 32, 0).decode(errors="replace").strip()
            os.close(lock)
            raise SandboxBusyError(
                f"Sandbox {id!r} is being run by another process ({holder or 'unknown'}).",
                hint="Start `skerry serve` and set SKERRY_URL, so that all of them share one server.",
            ) from None
        with contextlib.suppress(OSError):  # on a full disk it is held all the same, only not by name
            os.ftruncate(lock, 0)
            os.pwrite(lock, str(os.getpid()).encode(), 0)
        return lock

    def was_ours(self, id: str) -> bool:
        """Whether no other process has run this sandbox since this one did."""
        with contextlib.suppress(OSError):
            return (self.directory(id) / "lock").read_text() == str(os.getpid())
        return False

    async def require_idle(self, id: str) -> None:
        if self.directory(id).exists():
            os.close(await self.acquire(id))

    def rename(self, old: str, new: str) -> None:
        self.directory(old).rename(self.directory(new))

    def discard(self, id: str) -> Path | None:
        """Out of sight at once; what it returns is for ``remove``, which may take a while."""
        trash = self._base / "trash" / f"{id}.{secrets.token_hex(6)}"
        try:
            self.directory(id).rename(trash)
        except FileNotFoundError:
            return None
        return trash

    def remove(self, path: Path) -> None:
        self._volumes.remove(path)

    # -- how much they may write ---------------------------------------------------------------------------------------

    def limit(self, id: str, size: int | None, spare: int = 0) -> None:
        """Let a sandbox write no more than so much. With ``spare``, one that is full already gets that much more: it
        could not be started otherwise, and so nothing could be deleted in it."""
        if self.uncounted is not None:
            return
        if size is not None and spare:
            size = max(size, (self.written(id) or 0) + spare)
        btrfs.limit(self.directory(id), size)

    def written(self, id: str) -> int | None:
        """Bytes that a sandbox has written and that still exist, in it or in its snapshots and forks."""
        if self.uncounted is not None:
            return None
        try:
            return btrfs.written(self.directory(id))
        except OSError:
            return None

    def full(self) -> bool:
        """Whether the disk that holds all sandboxes' files is."""
        found = os.statvfs(self._base)
        return found.f_bavail * found.f_frsize < _FULL

    # -- snapshots -----------------------------------------------------------------------------------------------------

    def snapshot(self, id: str, name: str, hold: Hold | None, previous: str | None) -> None:
        """What the sandbox's files are now, under a name. ``hold`` does something while one that runs stands still."""
        with _told(f"Sandbox {id!r} could not be snapshotted"):
            source, target = self.directory(id), self._snapshot(name)
            old = None if previous is None else self._snapshot(previous)
            seal = partial(self._volumes.snapshot, source, target, writable=False, previous=old)
            if not self.exists(id):  # it was never started
                self._seal_nothing(target)
            elif hold is not None:
                self._volumes.settle(source, self._snapshot(f".settle-{secrets.token_hex(8)}"))
                hold(seal)
            else:
                seal()

    def _seal_nothing(self, target: Path) -> None:
        empty = f".empty-{secrets.token_hex(8)}"
        self._volumes.create(self.directory(empty))
        try:
            self.make_layer(empty, "root")
            self._volumes.snapshot(self.directory(empty), target, writable=False)
        finally:
            self._volumes.remove(self.directory(empty))

    def copy(self, name: str) -> Path:
        """The files of a snapshot, for a sandbox that has no name yet."""
        made = self.directory(f".copy-{secrets.token_hex(8)}")
        with _told(f"Snapshot {name!r} could not be copied"), self._required(name):
            self._volumes.snapshot(self._snapshot(name), made, writable=True)
        return made

    def clone(self, name: str, id: str, copy: Path | None = None) -> None:
        """The files of a new sandbox, from a snapshot. ``copy``: of the same, made before."""
        with _told(f"Sandbox {id!r} could not be made from a snapshot"), self._required(name):
            try:
                if copy is None:
                    self._volumes.snapshot(self._snapshot(name), self.directory(id), writable=True)
                elif self.directory(id).exists():
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), id)
                else:
                    copy.rename(self.directory(id))
            except FileExistsError as error:
                raise SandboxExistsError(
                    f"Sandbox {id!r} already has files.", hint="Destroy it first, or choose another id."
                ) from error

    def prepare_restore(self, name: str, id: str) -> Path:
        """All of a rollback that can fail: the files of a snapshot, beside those of the sandbox."""
        made = self.directory(f".restore-{secrets.token_hex(8)}")
        with _told(f"Sandbox {id!r} could not be rolled back"), self._required(name):
            self._volumes.snapshot(self._snapshot(name), made, writable=True)
        return made

    def restore(self, made: Path, id: str) -> Path | None:
        """The sandbox, which does not run, gets these files in one step. Returns the old ones, for ``remove``."""
        with _told(f"Sandbox {id!r} could not be rolled back"):
            if not self.directory(id).exists():
                made.rename(self.directory(id))
                return None
            self._volumes.exchange(made, self.directory(id))
            return made

    def hide_snapshot(self, name: str) -> Path | None:
        """Out of sight at once; what it returns is for ``remove``."""
        # Beside it, not in the trash: a read-only subvolume cannot change its directory.
        gone = self._snapshot(f".gone-{secrets.token_hex(8)}")
        try:
            self._snapshot(name).rename(gone)
        except FileNotFoundError:
            return None
        return gone

    def snapshots(self) -> set[str]:
        return {name for name in os.listdir(self._base / "snapshots") if not name.startswith(".")}

    def _require_snapshot(self, name: str) -> None:
        if not self._snapshot(name).is_dir():
            raise SnapshotNotFoundError(f"The files of snapshot {name!r} are missing.")

    @contextmanager
    def _required(self, name: str) -> Iterator[None]:
        """A copy takes its time, and the snapshot may be deleted meanwhile."""
        self._require_snapshot(name)
        try:
            yield
        except FileNotFoundError:
            self._require_snapshot(name)
            raise

    def upper(self, snapshot: str, layer: str) -> Path:
        """Where one layer of a snapshot is, whether or not it has it."""
        return self._snapshot(snapshot) / layer / "upper"

    # -- sweeping ------------------------------------------------------------------------------------------------------

    def sweep(self, sandboxes: set[str], snapshots: set[str]) -> list[str]:
        """Remove what nobody owns; only for a process that is alone with the home."""
        removed = []
        for place, kept in (("sandboxes", sandboxes), ("snapshots", snapshots), ("trash", set[str]())):
            for directory in (self._base / place).iterdir():
                if directory.name not in kept:
                    self._volumes.remove(directory)
                    removed.append(f"{place}/{directory.name}")
        return removed


@contextmanager
def _told(what: str, otherwise: type[SkerryError] = SnapshotError) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpaceError(
                f"{what}: the disk that holds the sandboxes' files is full.",
                hint="Delete files, snapshots or sandboxes, or make room on the host.",
            ) from error
        raise otherwise(f"{what}: {error.strerror or error}.") from error
