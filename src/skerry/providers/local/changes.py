"""What differs between two states of a sandbox's files, each an image with a layer of the sandbox's own above.

Runs where the files' owner is (see ``mapped``) and imports only the standard library. It reads the layers themselves,
not a mount of them, and so understands what overlayfs writes there: whiteouts, which say that a name of the image is
deleted, and opaque directories, which hide the image's. Every entry is reached by the descriptor of its directory.
"""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, Literal

from skerry.providers.local.idmap import IdMap
from skerry.providers.local.trail import Trail

ADDED, CHANGED, DELETED = "added", "changed", "deleted"
_OPAQUE, _WHITEOUT = "user.overlay.opaque", "user.overlay.whiteout"
_OWN = "user.overlay."
_DEEPEST = 2048
"""Levels of directories; what lies deeper has no path that a program could name."""
_BLOCK = 1 << 20

Parts = tuple[str, ...]


@dataclass(frozen=True)
class Entry:
    """A name in one of the states: where it is, what it is, and which layers go on below it."""

    directory: int
    name: str
    found: os.stat_result
    inside: bool
    """Its owner is written as the sandbox sees it, not as the host does."""
    image: bool
    upper: bool
    lower: bool

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.found.st_mode)

    @property
    def path(self) -> str:
        """For calls that take no descriptor of a directory; only the last name is looked up, and not followed."""
        return f"/proc/self/fd/{self.directory}/{self.name}"


@dataclass(frozen=True)
class Change:
    parts: Parts
    kind: str
    entry: Entry
    """What it is now; of a deleted one, what it was."""


@dataclass(frozen=True)
class Directory:
    upper: int | None
    lower: int | None
    inside: bool

    def names(self) -> set[str]:
        return self.own_names() | self.image_names()

    def own_names(self) -> set[str]:
        return set() if self.upper is None else set(os.listdir(self.upper))

    def image_names(self) -> set[str]:
        return set() if self.lower is None else set(os.listdir(self.lower))

    def entry(self, name: str) -> Entry | None:
        below = None if self.lower is None else _lstat(self.lower, name)
        if self.upper is not None and (found := _lstat(self.upper, name)) is not None:
            path = f"/proc/self/fd/{self.upper}/{name}"
            if _is_whiteout(path, found):
                return None
            merged = stat.S_ISDIR(found.st_mode) and below is not None and stat.S_ISDIR(below.st_mode)
            lower = merged and _attribute(path, _OPAQUE) != b"y"
            return Entry(self.upper, name, found, False, image=False, upper=True, lower=lower)
        if below is None or self.lower is None:
            return None
        return Entry(self.lower, name, below, self.inside, image=True, upper=False, lower=True)


class State:
    """The root of one state; either layer may be missing."""

    def __init__(self, upper: str | None, lower: str | None, inside: bool, stack: ExitStack) -> None:
        self._upper = _top(upper, stack)
        self._lower = _top(lower, stack)
        self._inside = inside

    @property
    def root(self) -> tuple[bool, bool]:
        return self._upper is not None, self._lower is not None

    def open(self, parts: Parts, upper: bool, lower: bool) -> Directory:
        """Good until another one is opened."""
        return Directory(
            self._upper.open(parts) if upper and self._upper is not None else None,
            self._lower.open(parts) if lower and self._lower is not None else None,
            self._inside,
        )


class Comparison:
    def __init__(self, idmap: IdMap, layer: dict[str, Any], kin: bool, stack: ExitStack) -> None:
        self.cut = False
        """There are directories too deep to look into."""
        self._idmap = idmap
        self._kin = kin
        """Both states are of one sandbox: the same inode with the same time of change is the same file."""
        self._prefix: Parts = tuple(part for part in layer["prefix"].split("/") if part)
        self._before = State(layer["before"], layer["lower"], layer["inside"], stack)
        self._after = State(layer["after"], layer["lower"], layer["inside"], stack)

    def changes(self) -> Iterator[Change]:
        """Directories before what is in them. A change is good until the next one is asked for."""
        Layers = tuple[bool, bool] | None
        pending: list[tuple[Parts, Layers, Layers]] = [((), self._before.root, self._after.root)]
        while pending:
            parts, was, now = pending.pop()
            deeper: list[tuple[Parts, Layers, Layers]] = []
            old = None if was is None else self._before.open(parts, *was)
            new = None if now is None else self._after.open(parts, *now)
            for name in sorted(_candidates(old, new)):
                before = None if old is None else old.entry(name)
                after = None if new is None else new.entry(name)
                inner = (*parts, name)
                change = self._change(inner, before, after)
                if change is not None:
                    yield change
                if after is None or not after.is_directory:
                    continue
                layers = (before.upper, before.lower) if before is not None and before.is_directory else None
                if layers == (False, True) and (after.upper, after.lower) == (False, True):
                    continue  # the image's own, on both sides
                if len(inner) < _DEEPEST:
                    deeper.append((inner, layers, (after.upper, after.lower)))
                else:
                    self.cut = True
            pending += reversed(deeper)

    def _change(self, parts: Parts, before: Entry | None, after: Entry | None) -> Change | None:
        parts = (*self._prefix, *parts)
        if before is None:
            return None if after is None else Change(parts, ADDED, after)
        if after is None:
            return Change(parts, DELETED, before)
        return None if self._same(before, after) else Change(parts, CHANGED, after)

    def _same(self, before: Entry, after: Entry) -> bool:
        if before.image and after.image:
            return True
        one, other = before.found, after.found
        if stat.S_IFMT(one.st_mode) != stat.S_IFMT(other.st_mode):
            return False
        regular = stat.S_ISREG(one.st_mode)
        if self._kin and regular and not before.image and not after.image and _identity(one) == _identity(other):
            return True
        if (one.st_mode, self.owner(before)) != (other.st_mode, self.owner(after)):
            return False
        if not before.is_directory and (one.st_size, one.st_mtime_ns) != (other.st_size, other.st_mtime_ns):
            return False
        if stat.S_ISLNK(one.st_mode):
            return _target(before) == _target(after)
        return attributes(before) == attributes(after) and (not regular or _same_content(before, after))

    def owner(self, entry: Entry) -> tuple[int, int]:
        """As the sandbox sees it."""
        uid, gid = entry.found.st_uid, entry.found.st_gid
        if entry.inside:
            return uid, gid
        found = self._idmap.from_host(uid, "uid"), self._idmap.from_host(gid, "gid")
        return (uid if found[0] is None else found[0], gid if found[1] is None else found[1])


# -- what is made of it ------------------------------------------------------------------------------------------------


def list_changes(
    idmap: IdMap, progress: Callable[[int], None] | None, layers: list[dict[str, Any]], kin: bool, limit: int
) -> dict[str, Any]:
    """The first ``limit`` changes as ``[path, kind, type, size]``; names that are not UTF-8 have lone surrogates."""
    found: list[tuple[str, str, str, int]] = []
    cut = False
    for layer in layers:
        with ExitStack() as stack:
            comparison = Comparison(idmap, layer, kin, stack)
            for change in comparison.changes():
                if len(found) == limit:
                    return {"changes": found, "truncated": True}
                entry = change.entry.found
                size = entry.st_size if stat.S_ISREG(entry.st_mode) else 0
                found.append(("/" + "/".join(change.parts), change.kind, _type(entry.st_mode), size))
            cut = cut or comparison.cut
    return {"changes": sorted(found), "truncated": cut}


def list_deleted(idmap: IdMap, progress: Callable[[int], None] | None, layers: list[dict[str, Any]]) -> list[str]:
    """Names of the image that are gone, as paths without a leading slash; of a directory only itself. The sandbox may
    be running."""
    found = []
    for layer in layers:
        with ExitStack() as stack:
            upper, lower = _top(layer["after"], stack), _top(layer["lower"], stack)
            prefix = tuple(part for part in layer["prefix"].split("/") if part)
            if upper is not None and lower is not None:
                found += ["/".join((*prefix, *parts)) for parts in _deleted(upper, lower)]
    return sorted(found)


def _deleted(upper: Trail[str], lower: Trail[str]) -> Iterator[Parts]:
    pending: list[tuple[Parts, bool]] = [((), False)]
    while pending:
        parts, hidden = pending.pop()
        try:
            own, below = upper.open(parts), lower.open(parts)
            names = set(os.listdir(own))
            for name in sorted(names | set(os.listdir(below))) if hidden else sorted(names):
                path = f"/proc/self/fd/{own}/{name}"
                was, found = _lstat(below, name), _lstat(own, name)
                if was is None:
                    continue
                if found is None or _is_whiteout(path, found):
                    yield (*parts, name)
                elif stat.S_ISDIR(was.st_mode) and stat.S_ISDIR(found.st_mode) and len(parts) < _DEEPEST:
                    pending.append(((*parts, name), hidden or _attribute(path, _OPAQUE) == b"y"))
        except (FileNotFoundError, NotADirectoryError):
            continue  # it has just become something else


def write_tar(
    idmap: IdMap, progress: Callable[[int], None] | None, layers: list[dict[str, Any]], kin: bool, out: int
) -> None:
    """A layer as container tools read it: what was added or changed, and ``.wh.NAME`` for what was deleted."""
    with (
        os.fdopen(os.dup(out), "wb", buffering=_BLOCK) as file,
        tarfile.open(fileobj=file, mode="w|", bufsize=_BLOCK, format=tarfile.PAX_FORMAT) as tar,
    ):
        for layer in layers:
            with ExitStack() as stack:
                _add_layer(tar, Comparison(idmap, layer, kin, stack))


def _add_layer(tar: tarfile.TarFile, comparison: Comparison) -> None:
    links: dict[tuple[int, int], str] = {}
    for change in comparison.changes():
        path, entry = "/".join(change.parts), change.entry
        if change.kind == DELETED:
            tar.addfile(tarfile.TarInfo("/".join((*change.parts[:-1], f".wh.{change.parts[-1]}"))))
            continue
        if stat.S_ISSOCK(entry.found.st_mode):
            continue  # tar has no sockets, and they are nothing without the process that listened
        info = _member(path, entry, comparison.owner(entry))
        identity = (entry.found.st_dev, entry.found.st_ino)
        if entry.found.st_nlink > 1 and info.isreg() and not entry.image:
            if identity in links:
                info.type, info.linkname, info.size = tarfile.LNKTYPE, links[identity], 0
            links.setdefault(identity, path)
        if not info.isreg():
            tar.addfile(info)
            continue
        fd = os.open(entry.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=entry.directory)
        with os.fdopen(fd, "rb") as file:
            tar.addfile(info, file)


def _member(path: str, entry: Entry, owner: tuple[int, int]) -> tarfile.TarInfo:
    found = entry.found
    info = tarfile.TarInfo(path)
    headers: dict[str, str] = {}
    info.mode = stat.S_IMODE(found.st_mode)
    info.uid, info.gid = owner
    info.mtime, rest = divmod(found.st_mtime_ns, 10**9)
    if rest:
        headers["mtime"] = f"{info.mtime}.{rest:09d}"
    if stat.S_ISDIR(found.st_mode):
        info.type = tarfile.DIRTYPE
    elif stat.S_ISLNK(found.st_mode):
        info.type, info.linkname = tarfile.SYMTYPE, _target(entry)
    elif stat.S_ISFIFO(found.st_mode):
        info.type = tarfile.FIFOTYPE
    else:
        info.size = found.st_size
    if not stat.S_ISLNK(found.st_mode):
        for name, value in attributes(entry).items():
            headers[f"SCHILY.xattr.{name}"] = value.decode("utf-8", "surrogateescape")
    info.pax_headers = headers
    return info


def _type(mode: int) -> Literal["file", "directory", "symlink", "other"]:
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "directory"
    return "symlink" if stat.S_ISLNK(mode) else "other"


# -- looking at entries ------------------------------------------------------------------------------------------------


def _candidates(old: Directory | None, new: Directory | None) -> set[str]:
    """The names that may differ: where both states show the image's directory, only those in their own layers."""
    if old is None or new is None:
        return set() if new is None else new.names()
    names = old.own_names() | new.own_names()
    if (old.lower is None) != (new.lower is None):
        names |= old.image_names() | new.image_names()
    return names


def attributes(entry: Entry) -> dict[str, bytes]:
    """The extended attributes that are the sandbox's own, and not overlayfs's notes."""
    found = {}
    for name in os.listxattr(entry.path, follow_symlinks=False):
        if not name.startswith(_OWN):
            with suppress(OSError):
                found[name] = os.getxattr(entry.path, name, follow_symlinks=False)
    return found


def _same_content(before: Entry, after: Entry) -> bool:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with ExitStack() as stack:
        one, other = (
            stack.enter_context(os.fdopen(os.open(each.name, flags, dir_fd=each.directory), "rb", buffering=0))
            for each in (before, after)
        )
        while True:
            left, right = one.read(_BLOCK), other.read(_BLOCK)
            if left != right:
                return False
            if not left:
                return True


def _identity(found: os.stat_result) -> tuple[int, int, int, int]:
    return found.st_ino, found.st_ctime_ns, found.st_mtime_ns, found.st_size


def _target(entry: Entry) -> str:
    return os.readlink(entry.name, dir_fd=entry.directory)


def _is_whiteout(path: str, found: os.stat_result) -> bool:
    if stat.S_ISCHR(found.st_mode):
        return found.st_rdev == 0
    return stat.S_ISREG(found.st_mode) and found.st_size == 0 and _attribute(path, _WHITEOUT) is not None


def _attribute(path: str, name: str) -> bytes | None:
    try:
        return os.getxattr(path, name, follow_symlinks=False)
    except OSError:
        return None


def _lstat(directory: int, name: str) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _top(path: str | None, stack: ExitStack) -> Trail[str] | None:
    if path is None or not os.path.isdir(path):
        return None
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    stack.callback(os.close, fd)
    trail = Trail[str](fd)
    stack.callback(trail.close)
    return trail
