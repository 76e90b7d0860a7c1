"""One file of the home as a disk of its own with btrfs on it, so that snapshots take no time on any host.

The file's space is allocated, never promised: a disk of the host that fills up takes nothing from the sandboxes' files,
and a pool that is full says "No space left" to whoever writes, and harms nothing else. It starts small and grows while
the host has room. It is mounted in the launcher's mount namespace and nowhere else, and vanishes with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog

from skerry.errors import HostUnfitError
from skerry.providers.local import btrfs, loops

log = structlog.get_logger(__name__)

FILE, LOCK = "pool.img", "pool.lock"
START = 4 << 30
SMALLEST = 128 << 20
_STEP, _LARGEST_STEP = 1 << 28, 32 << 30
_LOW, _ROOMY = 2 << 30, 8 << 30
_MKFS = ("-q", "--nodiscard", "-m", "single", "-d", "single", "-L", "skerry")
_RECLAIM_EVERY = 5.0
_KEEP_SIZE = 1
_RESERVE = 1 << 30
_libc = ctypes.CDLL(None, use_errno=True)


class Pool:
    """All methods block. Several processes may use one home: what changes the file or its device needs the lock."""

    def __init__(self, home: Path, size: int | None) -> None:
        self._home = home
        self._size = size
        self._root = -1
        self._reclaimed = 0.0
        self.fresh = False
        """Made by this process, and nothing is in it yet."""

    @property
    def file(self) -> Path:
        return self._home / FILE

    @property
    def root(self) -> Path:
        """The top of the mounted pool, as this process reaches it."""
        return Path(f"/proc/self/fd/{self._root}")

    @property
    def descriptors(self) -> tuple[int, ...]:
        return (self._root,) if self._root >= 0 else ()

    def impossible(self) -> str | None:
        """Why there cannot be a pool here, in a sentence; None if nothing speaks against it."""
        if self._size == 0:
            return "SKERRY_POOL_SIZE is 0."
        if shutil.which("mkfs.btrfs", path=_path()) is None:
            return "mkfs.btrfs is not installed."
        if not os.access("/dev/loop-control", os.R_OK | os.W_OK):
            return "There are no loop devices."
        if not _knows_btrfs():
            return "This kernel has no btrfs."
        if _in_memory(next(place for place in (self._home, *self._home.parents) if place.exists())):
            return "The home is in memory, of which a pool would take its share at once."
        return None

    def make(self) -> None:
        """Make the file if there is none; raises ``OSError`` where it does not fit or cannot be allocated."""
        with self.locked():
            if self.file.exists():
                return
            size = self._size or min(START, _free(self._home) // 4)
            if size < SMALLEST:
                raise OSError(errno.ENOSPC, f"a pool needs at least {SMALLEST >> 20} MB")
            fresh = self._home / f"{FILE}.new"
            fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                _allocate(fd, 0, size - size % 4096)
                _make_file_system(fresh)
                # In a container there may be devices that it is not allowed to use.
                os.close(loops.attach(fd, os.fspath(fresh)))
                os.rename(fresh, self.file)
                self.fresh = True
            except BaseException:
                fresh.unlink(missing_ok=True)
                raise
            finally:
                os.close(fd)

    @contextmanager
    def locked(self) -> Iterator[None]:
        lock = os.open(self._home / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def attach(self) -> int:
        """The device to mount, for the caller to close; with the lock held until it is mounted."""
        fd = os.open(self.file, os.O_RDWR | os.O_CLOEXEC)
        try:
            return loops.attach(fd, os.fspath(self.file))
        finally:
            os.close(fd)

    def enter(self, launcher: int, mount: str) -> None:
        """Hold on to the mount in the launcher's namespace. It stays usable should the launcher be replaced."""
        if self._root < 0:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
            self._root = os.open(f"/proc/{launcher}/root{mount}", flags)
            self.fresh = False

    def leave(self) -> None:
        if self._root >= 0:
            os.close(self._root)
            self._root = -1

    # -- growing -------------------------------------------------------------------------------------------------------

    def grow_if_low(self) -> bool:
        """Make the pool larger if little of it is left and the host has room; whether it was."""
        if not self._low():
            return False
        with self.locked():
            if not self._low():  # another process did it
                return False
            size = self.file.stat().st_size
            spare = _free(self._home) - _RESERVE
            step = min(max(size // 2, _STEP), _LARGEST_STEP, spare)
            if step >= _STEP:
                return self._grow(size, size + step - step % 4096)
        if time.monotonic() > self._reclaimed + _RECLAIM_EVERY:
            self._reclaimed = time.monotonic()
            btrfs.reclaim(self.root)
        return False

    def relieve(self) -> None:
        """btrfs has room for files and none for its notes: give it some, or at least what it no longer uses."""
        with self.locked():
            size = self.file.stat().st_size
            if _free(self._home) - _RESERVE < _STEP or not self._grow(size, size + _STEP):
                btrfs.reclaim(self.root)

    def make_room(self, size: int) -> None:
        """Have so much free, and not less than otherwise beside it, if the host has room for that."""
        with self.locked():
            missing = size + self._little() - self._left()
            spare = _free(self._home) - _RESERVE
            if 0 < missing <= spare:
                old = self.file.stat().st_size
                self._grow(old, old + min(max(missing, _STEP), spare) // 4096 * 4096)

    def _grow(self, old: int, new: int) -> bool:
        fd = os.open(self.file, os.O_RDWR | os.O_CLOEXEC)
        try:
            device = loops.find(fd)
            if device is None:
                return False
            try:
                try:
                    _allocate(fd, old, new)
                except OSError as error:
                    log.warning("the pool could not grow", reason=error.strerror)
                    return False
                loops.grown(device)
                btrfs.fill_device(self.root)
            finally:
                os.close(device)
        finally:
            os.close(fd)
        log.info("the pool has grown", bytes=new)
        return True

    def _low(self) -> bool:
        return self._left() < self._little()

    def _left(self) -> int:
        # statvfs does not count what sandboxes have written and is still in memory.
        return _free(self.root) - btrfs.unwritten(self.root)

    def _little(self) -> int:
        found = os.statvfs(self._root)
        size = found.f_blocks * found.f_frsize
        return min(size // 2, max(_LOW, min(size // 8, _ROOMY)))


def _make_file_system(path: Path) -> None:
    program = shutil.which("mkfs.btrfs", path=_path()) or "mkfs.btrfs"
    done = subprocess.run(
        [program, *_MKFS, os.fspath(path)], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    if done.returncode:
        raise OSError(errno.EIO, f"mkfs.btrfs: {done.stderr.strip().rpartition(chr(10))[2]}")


def _allocate(fd: int, old: int, new: int) -> None:
    """Make a file larger by space that is really there; on failure it is as it was."""
    length = ctypes.c_int64(new - old)
    if _libc.fallocate(fd, _KEEP_SIZE, ctypes.c_int64(old), length) != 0:
        number = ctypes.get_errno()
        with contextlib.suppress(OSError):
            os.ftruncate(fd, old)
        raise OSError(number, os.strerror(number))
    os.ftruncate(fd, new)


def _knows_btrfs() -> bool:
    if "\tbtrfs\n" in Path("/proc/filesystems").read_text():
        return True
    with contextlib.suppress(OSError):
        subprocess.run(["modprobe", "-q", "btrfs"], capture_output=True, stdin=subprocess.DEVNULL, check=False)
    return "\tbtrfs\n" in Path("/proc/filesystems").read_text()


def _in_memory(path: Path) -> bool:
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    lines = (line.split() for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines())
    return any(words[2] == number and words[words.index("-") + 1] in ("tmpfs", "ramfs") for words in lines)


def _free(path: Path) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def lost(pool: Pool, reason: str) -> HostUnfitError:
    """The sandboxes' files are in the pool, so there is no starting without it."""
    return HostUnfitError(
        f"The sandboxes' files are in {pool.file}, which cannot be mounted: {reason}.",
        hint="Run the server as root on a kernel with btrfs and loop devices, as the one that made it.",
    )
