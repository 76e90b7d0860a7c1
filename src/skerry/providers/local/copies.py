"""Copies of trees that belong to sandboxes, byte for byte, where the file system cannot snapshot.

Runs where the files' owner is (see ``mapped``), imports only the standard library, and reaches every entry by the
descriptor of its directory, so that a link in the tree leads nowhere.

A sealed copy comes with an index of what its files were at the source: inode and time of change, which nobody can
forge. A file that is still the same at the next copy becomes a link to the sealed one, and is not read again.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from skerry.providers.local.idmap import IdMap
from skerry.providers.local.trail import Trail

INDEX = "index"
_FICLONE = 0x40049409
_CHUNK = 1 << 26
_DEEPEST = 8192
_SETTLED = 2_000_000_000
"""A file that changed so many nanoseconds before it was copied may change again within the same tick of the clock."""

Parts = tuple[bytes, ...]
Known = dict[bytes, tuple[int, int]]


def copy_layers(
    idmap: IdMap, progress: Callable[[int], None] | None, source: str, target: str, previous: str | None, seal: bool
) -> None:
    """Fill the empty directory ``target`` with the layers in ``source``; with ``seal`` also write the index.

    ``previous`` is a sealed copy of the same sandbox whose files may be linked to.
    """
    with (
        _opened(source) as origin,
        _opened(target) as place,
        _opened_if_there(previous) as sealed,
    ):
        copy = _Copy(origin, place, sealed)
        for name in sorted(_names(origin)):
            if stat.S_ISDIR(os.stat(name, dir_fd=origin, follow_symlinks=False).st_mode):
                copy.layer(name)
        if seal:
            copy.write_index()
        copy.close()


class _Copy:
    def __init__(self, origin: int, place: int, sealed: int | None) -> None:
        self._top, self._place_top = origin, place
        self._origin, self._place, self._linking = (Trail[bytes](fd) for fd in (origin, place, place))
        self._sealed = None if sealed is None else Trail[bytes](sealed)
        self._known = {} if sealed is None else _read_index(sealed)
        self._index: list[bytes] = []
        self._links: dict[tuple[int, int], Parts] = {}
        self._began = time.time_ns()

    def close(self) -> None:
        for trail in (self._origin, self._place, self._linking, self._sealed):
            if trail is not None:
                trail.close()

    def layer(self, name: bytes) -> None:
        """One overlay's directories: what its work directory holds is of no use to another mount."""
        os.mkdir(name, 0o700, dir_fd=self._place_top)
        for part in (b"upper", b"work"):
            origin, place = self._origin.open((name,)), self._place.open((name,))
            with suppress(FileNotFoundError):
                found = os.stat(part, dir_fd=origin, follow_symlinks=False)
                os.mkdir(part, 0o700, dir_fd=place)
                if part == b"upper":
                    self._fill((name, part))
                _settle(self._origin.open((name,)), self._place.open((name,)), part, found)
        _settle(self._top, self._place_top, name, os.stat(name, dir_fd=self._top, follow_symlinks=False))

    def write_index(self) -> None:
        fd = os.open(INDEX, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=self._place_top)
        with os.fdopen(fd, "wb") as file:
            file.writelines(self._index)

    def _fill(self, top: Parts) -> None:
        # A list instead of recursion: a tree may be deeper than Python's stack.
        pending = [top]
        settle: list[tuple[Parts, os.stat_result]] = []
        while pending:
            parts = pending.pop()
            if len(parts) > _DEEPEST:
                raise OSError(errno.ENAMETOOLONG, f"directories are nested more than {_DEEPEST} deep")
            origin, place, old = self._origin.open(parts), self._place.open(parts), self._old(parts)
            for name in _names(origin):
                found = os.stat(name, dir_fd=origin, follow_symlinks=False)
                inner = (*parts, name)
                if stat.S_ISDIR(found.st_mode):
                    os.mkdir(name, 0o700, dir_fd=place)
                    pending.append(inner)
                    settle.append((inner, found))
                elif not self._linked(inner, found, place, old):
                    _copy_entry(origin, place, name, found)
        for parts, found in reversed(settle):
            _settle(self._origin.open(parts[:-1]), self._place.open(parts[:-1]), parts[-1], found)

    def _linked(self, parts: Parts, found: os.stat_result, place: int, old: int | None) -> bool:
        """Whether another name of the same file, or the same file in the sealed copy, could be linked."""
        identity = (found.st_dev, found.st_ino)
        if found.st_nlink > 1 and identity in self._links:
            first = self._links[identity]
            source = self._linking.open(first[:-1])
            os.link(first[-1], parts[-1], src_dir_fd=source, dst_dir_fd=place, follow_symlinks=False)
            return True
        if found.st_nlink > 1:
            self._links[identity] = parts
        if not stat.S_ISREG(found.st_mode):
            return False
        path = b"/".join(parts)
        if found.st_ctime_ns < self._began - _SETTLED:
            self._index.append(b"%d %d %s\0" % (found.st_ino, found.st_ctime_ns, path))
        if old is None or self._known.get(path) != (found.st_ino, found.st_ctime_ns):
            return False
        try:
            os.link(parts[-1], parts[-1], src_dir_fd=old, dst_dir_fd=place, follow_symlinks=False)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EMLINK, errno.EXDEV, errno.EPERM):
                return False
            raise
        return True

    def _old(self, parts: Parts) -> int | None:
        try:
            return None if self._sealed is None else self._sealed.open(parts)
        except OSError:
            return None


def _copy_entry(origin: int, place: int, name: bytes, found: os.stat_result) -> None:
    kind = stat.S_IFMT(found.st_mode)
    if kind == stat.S_IFREG:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        source = _open_file(origin, name)
        try:
            target = os.open(name, flags, 0o600, dir_fd=place)
            try:
                _copy_data(source, target, found.st_size)
            finally:
                os.close(target)
        finally:
            os.close(source)
    elif kind == stat.S_IFLNK:
        os.symlink(os.readlink(name, dir_fd=origin), name, dir_fd=place)
    else:
        # A whiteout is a character device 0:0, the only device that everybody may make.
        os.mknod(name, kind | 0o600, found.st_rdev, dir_fd=place)
    _settle(origin, place, name, found)


def _open_file(origin: int, name: bytes) -> int:
    # O_NOATIME is the owner's, which may be another id of the sandbox than ours.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        return os.open(name, flags | os.O_NOATIME, dir_fd=origin)
    except PermissionError:
        return os.open(name, flags, dir_fd=origin)


def _copy_data(source: int, target: int, size: int) -> None:
    try:
        fcntl.ioctl(target, _FICLONE, source)
        return
    except OSError:
        pass  # another file system than btrfs or xfs
    os.ftruncate(target, size)
    end = 0
    while end < size:
        try:
            start = os.lseek(source, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # the rest is a hole
                return
            raise
        end = min(os.lseek(source, start, os.SEEK_HOLE), size)
        while start < end:
            done = os.copy_file_range(source, target, min(_CHUNK, end - start), start, start)
            if done == 0:
                return
            start += done


def _settle(origin: int, place: int, name: bytes, found: os.stat_result) -> None:
    """Owner, attributes, mode and times, in the order in which none undoes another."""
    made = os.stat(name, dir_fd=place, follow_symlinks=False)
    if (made.st_uid, made.st_gid) != (found.st_uid, found.st_gid):
        os.chown(name, found.st_uid, found.st_gid, dir_fd=place, follow_symlinks=False)
    # xattrs have no calls with a directory's descriptor; /proc resolves only the last name, which is not followed.
    here, there = (os.path.join(f"/proc/self/fd/{fd}".encode(), name) for fd in (origin, place))
    if not stat.S_ISLNK(found.st_mode):
        for attribute in os.listxattr(here, follow_symlinks=False):
            value = os.getxattr(here, attribute, follow_symlinks=False)
            os.setxattr(there, attribute, value, follow_symlinks=False)
        handle = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=place)
        try:
            os.chmod(f"/proc/self/fd/{handle}", stat.S_IMODE(found.st_mode))
        finally:
            os.close(handle)
    os.utime(name, ns=(found.st_atime_ns, found.st_mtime_ns), dir_fd=place, follow_symlinks=False)


def _read_index(sealed: int) -> Known:
    try:
        fd = os.open(INDEX, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=sealed)
    except FileNotFoundError:
        return {}
    with os.fdopen(fd, "rb") as file:
        lines = (line.split(b" ", 2) for line in file.read().split(b"\0") if line)
        return {path: (int(inode), int(changed)) for inode, changed, path in lines}


@contextmanager
def _opened_if_there(path: str | None) -> Iterator[int | None]:
    """The previous copy may be deleted at any moment, and then there is nothing to share with."""
    with ExitStack() as stack:
        fd = None
        if path is not None:
            with suppress(FileNotFoundError):
                fd = stack.enter_context(_opened(path))
        yield fd


@contextmanager
def _opened(path: str) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _names(directory: int) -> list[bytes]:
    return os.listdir(os.fsencode(f"/proc/self/fd/{directory}"))
