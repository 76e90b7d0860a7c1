"""A root file system that is being filled from an untrusted source.

Every path is resolved here, one component and one descriptor at a time: symbolic links are read and interpreted
*inside* the root, never followed by the kernel, so that no archive can name anything outside of it.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from skerry.errors import InvalidRequestError, TooLargeError
from skerry.providers.local.idmap import NOBODY, IdMap
from skerry.providers.local.trees import remove_at

if TYPE_CHECKING:
    from skerry.providers.local.links import Links

MAX_BYTES = 20 * 10**9
MAX_ENTRIES = 2_000_000
_MAX_LINKS = 40
_MAX_PATH = 4096
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CHUNK = 1 << 20
_SHELLS = ("bin/sh", "bin/bash", "usr/bin/sh", "usr/bin/bash")
# Where the sandbox mounts its own things. They must be real directories: a link there would lead the mount astray.
_MOUNT_POINTS = {
    "proc": 0o555,
    "sys": 0o555,
    "dev": 0o755,
    "run": 0o755,
    "tmp": 0o1777,
    "workspace": 0o755,
    "home": 0o755,
    "root": 0o700,
}


@dataclass(frozen=True)
class Meta:
    """What an entry brings along: permission bits, the owner as seen inside, the time of its last change."""

    mode: int
    uid: int = 0
    gid: int = 0
    mtime: float | None = None


def components(name: str) -> tuple[str, ...]:
    """The parts of an entry's name, made relative as tar does; one that climbs out is refused."""
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    if ".." in parts:
        raise InvalidRequestError(f"The archive holds the name {name[:200]!r}, which contains '..'.")
    if len(os.fsencode(name)) > _MAX_PATH or "\0" in name:
        raise InvalidRequestError(f"The archive holds a name that no Linux path can be: {name[:200]!r}.")
    return parts


class Rootfs:
    def __init__(
        self,
        root: int,
        idmap: IdMap,
        *,
        max_bytes: int = MAX_BYTES,
        max_entries: int = MAX_ENTRIES,
        progress: Callable[[int], None] | None = None,
        links: Links | None = None,
    ) -> None:
        self._root = root
        self._links = links
        self._idmap = idmap
        self._max_bytes = max_bytes
        self._max_entries = max_entries
        self._progress = progress
        self._reported = 0
        self._directories: dict[tuple[str, ...], Meta] = {}
        self._parent: tuple[tuple[str, ...], int] | None = None
        self._fresh: set[tuple[str, ...]] | None = None
        self.bytes = 0
        self.entries = 0

    # -- what archives hold --------------------------------------------------------------------------------------------

    def directory(self, path: tuple[str, ...], meta: Meta) -> None:
        self._count(path)
        if path:
            parent = self._parent_of(path)
            try:
                os.mkdir(path[-1], 0o700, dir_fd=parent)
            except FileExistsError:
                if not stat.S_ISDIR(os.stat(path[-1], dir_fd=parent, follow_symlinks=False).st_mode):
                    self._remove(parent, path[-1])
                    os.mkdir(path[-1], 0o700, dir_fd=self._parent_of(path))
        # Its mode comes last: one without write permission could not be filled.
        self._directories[path] = meta

    def file(self, path: tuple[str, ...], meta: Meta, read: Callable[[int], bytes]) -> None:
        parent = self._make_way(path)
        fd = os.open(
            path[-1], os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=parent
        )
        try:
            while block := read(_CHUNK):
                self._spend(len(block))
                view = memoryview(block)
                while view:
                    view = view[os.write(fd, view) :]
            self._own(fd, meta)
            # After chown, which takes the setuid bits away.
            os.fchmod(fd, meta.mode & 0o7777)
            if meta.mtime is not None:
                os.utime(fd, (meta.mtime, meta.mtime))
        finally:
            os.close(fd)

    def symlink(self, path: tuple[str, ...], meta: Meta, target: str) -> None:
        parent = self._make_way(path)
        uid, gid = self._owner(meta)
        if self._links is not None and self._links.name(target, uid, gid, parent, path[-1]):
            return
        os.symlink(target, path[-1], dir_fd=parent)
        if self._idmap.has_range:
            os.chown(path[-1], uid, gid, dir_fd=parent, follow_symlinks=False)

    def hard_link(self, path: tuple[str, ...], target: tuple[str, ...]) -> None:
        missing = InvalidRequestError(
            f"The archive links {'/'.join(path)!r} to {'/'.join(target)!r}, which it does not hold."
        )
        if path == target or not target:
            raise missing
        try:
            source = self.walk(target[:-1])
        except (FileNotFoundError, NotADirectoryError) as error:
            raise missing from error
        try:
            if stat.S_ISDIR(os.stat(target[-1], dir_fd=source, follow_symlinks=False).st_mode):
                raise missing
            parent = self._make_way(path)
            os.link(target[-1], path[-1], src_dir_fd=source, dst_dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError as error:
            raise missing from error
        finally:
            os.close(source)

    def fifo(self, path: tuple[str, ...], meta: Meta) -> None:
        parent = self._make_way(path)
        os.mkfifo(path[-1], 0o600, dir_fd=parent)
        fd = os.open(path[-1], os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        try:
            self._own(fd, meta)
            os.fchmod(fd, meta.mode & 0o777)
        finally:
            os.close(fd)

    # -- layers --------------------------------------------------------------------------------------------------------

    def begin_layer(self) -> None:
        """What comes now lies over what came before: whiteouts hide only the latter."""
        self._fresh = set()

    def whiteout(self, path: tuple[str, ...]) -> None:
        self._without(path[:-1], lambda parent: self._remove(parent, path[-1]))

    def opaque(self, path: tuple[str, ...]) -> None:
        self._without(path, lambda fd: self._hide_lower(fd, path))

    def _without(self, path: tuple[str, ...], act: Callable[[int], None]) -> None:
        try:
            fd = self.walk(path)
        except (FileNotFoundError, NotADirectoryError):
            return
        try:
            act(fd)
        finally:
            os.close(fd)

    def _hide_lower(self, fd: int, path: tuple[str, ...]) -> None:
        for name in os.listdir(fd):
            inner = (*path, name)
            if self._fresh is None or inner not in self._fresh:
                self._remove(fd, name)
            elif stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
                child = os.open(name, _DIRECTORY, dir_fd=fd)
                try:
                    self._hide_lower(child, inner)
                finally:
                    os.close(child)

    # -- the end -------------------------------------------------------------------------------------------------------

    def require_shell(self) -> None:
        if not any(self.is_program(shell) for shell in _SHELLS):
            raise InvalidRequestError(
                "There is no shell in this root file system: neither /bin/sh nor /bin/bash is a program in it.",
                hint="Import a whole root file system, as `mmdebstrap` or `docker export` write it.",
            )

    def add_mount_points(self) -> None:
        self._forget_parent()
        for name, mode in _MOUNT_POINTS.items():
            if not self._is_directory(name):
                self.directory((name,), Meta(mode))

    def settle(self) -> None:
        """The last step: directories get their owner, mode and time."""
        self._forget_parent()
        self._directories.setdefault((), Meta(0o755))
        for path in sorted(self._directories, key=len, reverse=True):
            self._without(path, partial(self._settle, self._directories[path]))

    def is_program(self, name: str) -> bool:
        """Whether a path, resolved inside, leads to an executable file."""
        path = components(name)
        for _ in range(_MAX_LINKS):
            try:
                parent = self.walk(path[:-1])
            except OSError:
                return False
            try:
                found = os.stat(path[-1], dir_fd=parent, follow_symlinks=False)
                if not stat.S_ISLNK(found.st_mode):
                    return stat.S_ISREG(found.st_mode) and bool(found.st_mode & 0o111)
                target = os.readlink(path[-1], dir_fd=parent)
            except OSError:
                return False
            finally:
                os.close(parent)
            above = () if target.startswith("/") else path[:-1]
            path = (*above, *(part for part in target.split("/") if part not in ("", ".")))
            if not path or path[-1] == "..":
                return False
        return False

    def walk(self, path: Iterable[str], *, create: bool = False) -> int:
        """A descriptor of the directory ``path`` inside the root, for the caller to close."""
        pending = list(reversed(list(path)))
        resolved: list[str] = []
        links = 0
        fd = os.dup(self._root)
        try:
            while pending:
                part = pending.pop()
                if part == "..":
                    # From the top again, so that nothing is ever opened by the name "..".
                    pending = pending + list(reversed(resolved[:-1]))
                    resolved = []
                    fd = _replace(fd, os.dup(self._root))
                    continue
                try:
                    fd = _replace(fd, os.open(part, _DIRECTORY, dir_fd=fd))
                    resolved.append(part)
                    continue
                except FileNotFoundError:
                    if not create:
                        raise
                    os.mkdir(part, 0o700, dir_fd=fd)
                    self._directories[(*resolved, part)] = Meta(0o755)
                    pending.append(part)
                    continue
                except OSError as error:
                    if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                        raise
                target = self._link(fd, part)
                links += 1
                if links > _MAX_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), "/".join((*resolved, part)))
                if target.startswith("/"):
                    resolved = []
                    fd = _replace(fd, os.dup(self._root))
                pending += [step for step in reversed(target.split("/")) if step not in ("", ".")]
        except BaseException:
            os.close(fd)
            raise
        return fd

    def close(self) -> None:
        self._forget_parent()

    # -- within --------------------------------------------------------------------------------------------------------

    @staticmethod
    def _link(fd: int, part: str) -> str:
        try:
            return os.readlink(part, dir_fd=fd)
        except OSError as error:
            if error.errno == errno.EINVAL:
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), part) from error
            raise

    def _is_directory(self, name: str) -> bool:
        try:
            return stat.S_ISDIR(os.stat(name, dir_fd=self._root, follow_symlinks=False).st_mode)
        except FileNotFoundError:
            return False

    def _make_way(self, path: tuple[str, ...]) -> int:
        """The open parent of a new entry, with nothing left at its name."""
        if not path:
            raise InvalidRequestError("The archive's root is not a directory.")
        self._count(path)
        parent = self._parent_of(path)
        try:
            os.stat(path[-1], dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError:
            return parent
        self._remove(parent, path[-1])
        return self._parent_of(path)

    def _parent_of(self, path: tuple[str, ...]) -> int:
        if self._parent is None or self._parent[0] != path[:-1]:
            self._forget_parent()
            self._parent = (path[:-1], self.walk(path[:-1], create=True))
        return self._parent[1]

    def _forget_parent(self) -> None:
        if self._parent is not None:
            os.close(self._parent[1])
            self._parent = None

    def _remove(self, parent: int, name: str) -> None:
        own = os.dup(parent)
        try:
            # The remembered parent may lie in what is removed.
            self._forget_parent()
            remove_at(own, name)
        finally:
            os.close(own)

    def _count(self, path: tuple[str, ...]) -> None:
        self.entries += 1
        if self.entries > self._max_entries:
            raise TooLargeError(f"The image holds more than {self._max_entries} files.")
        if self._fresh is not None:
            self._fresh.update(path[:end] for end in range(1, len(path) + 1))

    def _spend(self, amount: int) -> None:
        self.bytes += amount
        if self.bytes > self._max_bytes:
            raise TooLargeError(f"The image is larger than {self._max_bytes} bytes.")
        if self._progress is not None and self.bytes - self._reported >= 1 << 22:
            self._reported = self.bytes
            self._progress(self.bytes)

    def _settle(self, meta: Meta, fd: int) -> None:
        self._own(fd, meta)
        os.fchmod(fd, meta.mode & 0o7777)
        if meta.mtime is not None:
            os.utime(fd, (meta.mtime, meta.mtime))

    def _own(self, fd: int, meta: Meta) -> None:
        if self._idmap.has_range:
            os.fchown(fd, *self._owner(meta))

    def _owner(self, meta: Meta) -> tuple[int, int]:
        return self._host_id(meta.uid, "uid"), self._host_id(meta.gid, "gid")

    def _host_id(self, inside: int, which: Literal["uid", "gid"]) -> int:
        """Ids that the sandbox does not have become nobody, or root where there is no nobody either."""
        for candidate in (inside, NOBODY, 0):
            host = self._idmap.to_host(candidate, which)
            if host is not None:
                return host
        raise ValueError("An id map always holds 0.")


def _replace(old: int, new: int) -> int:
    os.close(old)
    return new
