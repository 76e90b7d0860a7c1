"""Directory trees that belong to sandboxes: making room for them, and above all deleting them.

Whatever lies there may be hostile: links that point out of the tree, directories a thousand levels deep or without any
permission, names that change meanwhile, a mount that was left behind. Nothing outside of the tree is ever touched.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from skerry.providers.local.idmap import IdMap
from skerry.providers.local.mapped import run_mapped

STAGING = ".staging-"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_DEPTH = 64
_ATTEMPTS = 10


def remove_tree(path: Path, idmap: IdMap) -> None:
    """Delete a directory tree whose files belong to mapped ids; one that does not exist is already deleted.

    Raises ``OSError`` when something cannot be deleted, ``EBUSY`` when a file system is mounted below ``path``.
    """
    if not os.path.lexists(path):
        return
    run_mapped(idmap, remove_path, os.fspath(path))


def private_directory(path: Path, idmap: IdMap) -> Path:
    """A directory that only those who run sandboxes may enter: what lies in it may be setuid and by anyone."""
    path.mkdir(parents=True, exist_ok=True)
    if idmap.kind == "root":
        os.chown(path, 0, idmap.runner_gid)
        path.chmod(0o710)
    else:
        path.chmod(0o700)
    return path


@contextmanager
def staging(parent: Path, idmap: IdMap) -> Iterator[Path]:
    """A new directory to fill and rename: locked while in use, deleted at the end unless it was renamed away."""
    path = parent / f"{STAGING}{secrets.token_hex(8)}"
    path.mkdir()
    path.chmod(0o755)
    fd = os.open(path, _DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield path
    finally:
        os.close(fd)
        remove_tree(path, idmap)


def sweep_staging(parent: Path, idmap: IdMap) -> list[str]:
    """Delete staging directories whose owner was killed; the names of those that were."""
    swept = []
    for path in sorted(parent.glob(f"{STAGING}*")):
        fd = os.open(path, _DIRECTORY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_tree(path, idmap)
            swept.append(path.name)
        except BlockingIOError:
            continue
        finally:
            os.close(fd)
    return swept


def remove_path(idmap: IdMap, progress: Callable[[int], None] | None, path: str) -> None:
    """What ``remove_tree`` does, where the files' owner is."""
    parent, name = os.path.split(os.path.abspath(path))
    parent_fd = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        remove_at(parent_fd, name)
    finally:
        os.close(parent_fd)


def remove_at(parent: int, name: str) -> None:
    """Delete a file or a whole tree by its name in an open directory; no symbolic link is followed."""
    if _unlinked(parent, name):
        return
    fd = open_directory(parent, name)
    try:
        _Sweep(fd, _mount_of(parent)).run()
    finally:
        os.close(fd)
    os.rmdir(name, dir_fd=parent)


def open_directory(parent: int, name: str) -> int:
    """Open a directory for reading, giving its owner the permission first where that is missing."""
    try:
        return os.open(name, _DIRECTORY, dir_fd=parent)
    except PermissionError:
        make_accessible(parent, name)
        return os.open(name, _DIRECTORY, dir_fd=parent)


def make_accessible(parent: int, name: str) -> None:
    """chmod u+rwx of a directory. chmod has no "do not follow links", but a descriptor's /proc link is not one."""
    handle = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        os.chmod(f"/proc/self/fd/{handle}", stat.S_IMODE(os.fstat(handle).st_mode) | 0o700)
    finally:
        os.close(handle)


class _Sweep:
    """Empties one directory. What lies too deep is moved up to the top first, so that neither descriptors nor the
    stack grow with the depth of the tree."""

    def __init__(self, top: int, mount: int) -> None:
        self._top = top
        self._mount = mount
        self._token = f".sweep-{secrets.token_hex(8)}"
        self._moved = 0

    def run(self) -> None:
        # Someone may still be writing; whoever never stops is reported, not waited for.
        for _ in range(_ATTEMPTS):
            moved = self._moved
            self._empty(self._top, 0)
            while self._moved != moved:
                moved = self._moved
                self._empty(self._top, 0)
            if not os.listdir(self._top):
                return
        raise OSError(errno.ENOTEMPTY, "The directory is being written to while it is deleted")

    def _empty(self, fd: int, depth: int) -> None:
        if _mount_of(fd) != self._mount:
            raise OSError(errno.EBUSY, "A file system is mounted inside the directory to delete")
        self._make_writable(fd)
        for name in os.listdir(fd):
            if _unlinked(fd, name):
                continue
            if depth >= _MAX_DEPTH:
                self._move_up(fd, name)
                continue
            try:
                child = open_directory(fd, name)
            except (FileNotFoundError, NotADirectoryError):
                continue
            try:
                self._empty(child, depth + 1)
            finally:
                os.close(child)
            try:
                os.rmdir(name, dir_fd=fd)
            except FileNotFoundError:
                continue
            except OSError as error:
                if error.errno != errno.ENOTEMPTY:
                    raise

    def _make_writable(self, fd: int) -> None:
        mode = os.fstat(fd).st_mode
        if mode & 0o700 != 0o700:
            os.fchmod(fd, stat.S_IMODE(mode) | 0o700)

    def _move_up(self, fd: int, name: str) -> None:
        # A directory that is moved has its ".." rewritten, which needs permission to write to it.
        make_accessible(fd, name)
        self._moved += 1
        os.rename(name, f"{self._token}-{self._moved}", src_dir_fd=fd, dst_dir_fd=self._top)


def _unlinked(parent: int, name: str) -> bool:
    """Unlink a name unless it is a directory; a name that is gone counts as unlinked."""
    try:
        os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        return True
    except (IsADirectoryError, PermissionError):
        if stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            return False
        raise
    return True


def _mount_of(fd: int) -> int:
    # st_dev would not do: a bind mount of the same file system has the same one.
    with open(f"/proc/self/fdinfo/{fd}") as lines:
        for line in lines:
            if line.startswith("mnt_id:"):
                return int(line.split()[1])
    raise OSError(errno.ENOSYS, "The kernel does not tell the mounts of descriptors")
