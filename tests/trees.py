"""Trees with everything a file system can hold, and what is in a tree, to compare byte for byte."""

from __future__ import annotations

import hashlib
import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Thing:
    mode: int
    owner: tuple[int, int]
    modified: int
    content: str
    attributes: tuple[tuple[str, bytes], ...]
    twin: bytes
    """The first name of the same file, by which hard links are told from copies."""
    sparse: bool


def everything(top: Path) -> dict[bytes, Thing]:
    """Every entry below ``top`` by its path."""
    found: dict[bytes, Thing] = {}
    first: dict[int, bytes] = {}
    for directory, names, files in os.walk(os.fsencode(top)):
        names.sort()
        for name in sorted(names + files):
            path = os.path.join(directory, name)
            inside = os.path.relpath(path, os.fsencode(top))
            status = os.lstat(path)
            found[inside] = Thing(
                mode=status.st_mode,
                owner=(status.st_uid, status.st_gid),
                modified=status.st_mtime_ns,
                content=_content(path, status),
                attributes=tuple((n, os.getxattr(path, n, follow_symlinks=False)) for n in _attributes(path)),
                twin=inside if stat.S_ISDIR(status.st_mode) else first.setdefault(status.st_ino, inside),
                sparse=stat.S_ISREG(status.st_mode) and status.st_blocks * 512 < status.st_size // 2,
            )
    return found


def _attributes(path: bytes) -> list[str]:
    return sorted(os.listxattr(path, follow_symlinks=False))


def _content(path: bytes, status: os.stat_result) -> str:
    if stat.S_ISREG(status.st_mode):
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    if stat.S_ISLNK(status.st_mode):
        return os.readlink(path).hex()
    return str(status.st_rdev) if stat.S_ISCHR(status.st_mode) else ""


def build(top: Path, *, owners: tuple[int, int] = (0, 0)) -> None:
    """One of everything: what overlayfs writes into a layer, and what programs do."""
    place = os.fsencode(top)

    def at(name: bytes) -> bytes:
        return os.path.join(place, name)

    def write(name: bytes, content: bytes = b"", mode: int = 0o644) -> bytes:
        with open(at(name), "wb") as file:
            file.write(content)
        os.chmod(at(name), mode)
        return at(name)

    os.mkdir(at(b"d"))
    os.link(write(b"one", b"shared\n"), at(b"d/other"))
    os.link(at(b"one"), at(b"third"))
    write(b"su", b"#!/bin/sh\n", 0o4755)
    write(b"sg", b"", 0o2755)
    write(b"nobody may", b"secret", 0o000)
    write(b"bytes \xff\xfe\n\t'\"\\", b"any name")
    write(b"." * 200 + b"\xf0", b"a long one")
    os.setxattr(write(b"attributed", b"x"), "user.colour", b"\x00\xffblue")
    with open(at(b"sparse"), "wb") as file:
        file.truncate(64 << 20)
        file.seek(32 << 20)
        file.write(b"in the middle")
    with open(at(b"hole at the end"), "wb") as file:
        file.write(b"x" * 4096)
        file.truncate(1 << 20)
    os.symlink(b"/etc/\xffpasswd", at(b"link"))
    os.symlink(b"one", at(b"d/dangling"))
    os.mkfifo(at(b"fifo"), 0o600)
    with socket.socket(socket.AF_UNIX) as listener:
        here = os.open(place, os.O_RDONLY)
        try:
            listener.bind(f"/proc/self/fd/{here}/socket")
        finally:
            os.close(here)
    os.mknod(at(b"whiteout"), stat.S_IFCHR, 0)
    os.mkdir(at(b"opaque"))
    os.setxattr(at(b"opaque"), "user.overlay.opaque", b"y")
    write(b"opaque/inside", b"only this")
    os.mkdir(at(b"closed"))
    write(b"closed/in", b"in a closed directory")
    os.mkdir(at(b"sticky"))
    os.chmod(at(b"sticky"), 0o1777)
    deep = place
    for _ in range(100):
        deep = os.path.join(deep, b"deep")
        os.mkdir(deep)
    if owners != (0, 0):
        os.chown(at(b"d/other"), *owners)
        os.chown(at(b"link"), *owners, follow_symlinks=False)
        os.chown(at(b"closed"), *owners)
        os.chmod(at(b"su"), 0o4755)
    os.chmod(at(b"closed"), 0o000)
    os.utime(at(b"one"), ns=(1_000_000_007, 123_456_789_012_345_678))
    os.utime(at(b"link"), ns=(5, 7), follow_symlinks=False)
    os.utime(at(b"d"), ns=(11, 13_000_000_001))
