"""Directories as tar streams, packed and unpacked on the user's side of the wall.

A tar that comes out of a sandbox is hostile input. Unpacking never follows a symbolic link below the target (every
component is opened with O_NOFOLLOW), so that no member can be written elsewhere; links that point outside are left out.
"""

from __future__ import annotations

import io
import os
import posixpath
import stat
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from skerry.client.values import Transfer

_CHUNK = 256 * 1024

Progress = Callable[[int], None]


def pack(root: Path, progress: Progress | None = None) -> Iterator[bytes]:
    """A tar of everything below ``root``, without its owner's name on it. Sockets, FIFOs and devices are left out."""
    held: list[bytes] = []
    size = 0
    for piece in _members(root, progress):
        held.append(piece)
        size += len(piece)
        if size >= _CHUNK:
            yield b"".join(held)
            held, size = [], 0
    yield b"".join(held)


def _members(root: Path, progress: Progress | None) -> Iterator[bytes]:
    with tarfile.TarFile(fileobj=io.BytesIO(), mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in _walk(root):
            member = tar.gettarinfo(path, path.relative_to(root).as_posix())
            if member is None or not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
                continue
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            if not member.isreg():
                yield member.tobuf(tarfile.PAX_FORMAT, errors="surrogateescape")
                continue
            with path.open("rb") as file:
                yield member.tobuf(tarfile.PAX_FORMAT, errors="surrogateescape")
                yield from _exactly(file, member.size, path, progress)
            yield bytes(-member.size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _walk(root: Path) -> Iterator[Path]:
    for entry in sorted(os.scandir(root), key=lambda entry: entry.name):
        path = Path(entry.path)
        yield path
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(path)


def _exactly(file: BinaryIO, size: int, path: Path, progress: Progress | None) -> Iterator[bytes]:
    while size:
        piece = file.read(min(size, _CHUNK))
        if not piece:
            raise OSError(f"{path} became shorter while it was being read.")
        size -= len(piece)
        yield piece
        if progress is not None:
            progress(len(piece))


def measure(root: Path) -> int:
    """The bytes of the regular files below ``root``."""
    if root.is_file():
        return root.stat().st_size
    return sum(path.lstat().st_size for path in _walk(root) if stat.S_ISREG(path.lstat().st_mode))


def unpack(source: BinaryIO, target: Path) -> Transfer:
    """Write a tar below ``target``, and nowhere else."""
    target.mkdir(parents=True, exist_ok=True)
    files = written = 0
    skipped: list[str] = []
    links: list[tuple[tarfile.TarInfo, list[str]]] = []
    directories: list[tuple[list[str], int]] = []
    root = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with tarfile.open(fileobj=source, mode="r:*") as tar:
            for member in tar:
                parts = _parts(member.name)
                if parts is None:
                    skipped.append(f"{member.name}: its name leaves the directory")
                elif member.isdir():
                    with _directory(root, parts):
                        directories += [(parts, member.mode)] if parts else []
                elif member.isreg() and parts:
                    written += _write(root, parts, cast(BinaryIO, tar.extractfile(member)), member.mode)
                    files += 1
                elif (member.issym() or member.islnk()) and parts:
                    links.append((member, parts))
                else:
                    skipped.append(f"{member.name}: it is neither a file nor a directory nor a link")
        # Links come last, so that none of them can stand in the way of a file.
        for member, parts in links:
            if _link(root, parts, member):
                files += 1
            else:
                skipped.append(f"{member.name}: it links to {member.linkname}, which is outside")
        for parts in _leaving(target, [parts for member, parts in links if member.issym()]):
            files -= 1
            skipped.append(f"{'/'.join(parts)}: it leads outside through other links")
        for parts, mode in reversed(directories):
            with _directory(root, parts) as directory:
                os.fchmod(directory, _safe_mode(mode) | 0o700)
    finally:
        os.close(root)
    return Transfer(files, written, skipped)


def _parts(name: str) -> list[str] | None:
    if name.startswith("/") or "\0" in name:
        return None
    parts = [part for part in name.split("/") if part not in ("", ".")]
    return None if ".." in parts else parts


def _safe_mode(mode: int) -> int:
    """No set-id or sticky bits, and nothing that others may write."""
    return mode & 0o755


@contextmanager
def _directory(root: int, parts: list[str]) -> Iterator[int]:
    """The directory ``parts`` below ``root``, made where missing and never reached through a symbolic link."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    current = os.dup(root)
    try:
        for part in parts:
            try:
                inner = os.open(part, flags, dir_fd=current)
            except FileNotFoundError:
                os.mkdir(part, 0o777, dir_fd=current)
                inner = os.open(part, flags, dir_fd=current)
            os.close(current)
            current = inner
        yield current
    finally:
        os.close(current)


def _clear(name: str, directory: int) -> None:
    try:
        os.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        return


def _write(root: int, parts: list[str], content: BinaryIO, mode: int) -> int:
    *parents, name = parts
    size = 0
    with _directory(root, parents) as directory:
        _clear(name, directory)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(name, flags, 0o600, dir_fd=directory), "wb") as file:
            while piece := content.read(_CHUNK):
                size += file.write(piece)
            os.fchmod(file.fileno(), _safe_mode(mode) | 0o600)
    return size


def _link(root: int, parts: list[str], member: tarfile.TarInfo) -> bool:
    *parents, name = parts
    with _directory(root, parents) as directory:
        if member.issym():
            place = posixpath.normpath(posixpath.join("/".join(parents), member.linkname))
            if member.linkname.startswith("/") or place == ".." or place.startswith("../"):
                return False
            _clear(name, directory)
            os.symlink(member.linkname, name, dir_fd=directory)
            return True
        source = _parts(member.linkname)
        if not source or source == parts:
            return False
        *source_parents, source_name = source
        with _directory(root, source_parents) as source_directory:
            try:
                regular = stat.S_ISREG(os.lstat(source_name, dir_fd=source_directory).st_mode)
            except FileNotFoundError:
                return False
            if regular:
                _clear(name, directory)
                os.link(source_name, name, src_dir_fd=source_directory, dst_dir_fd=directory, follow_symlinks=False)
            return regular


def _leaving(target: Path, links: list[list[str]]) -> list[list[str]]:
    """Remove the links that lead outside by way of other links, and say which they were."""
    inside = target.resolve()
    removed = []
    for parts in links:
        path = target.joinpath(*parts)
        if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(inside):
            path.unlink()
            removed.append(parts)
    return removed
