"""The kernel's FUSE protocol, version 7: what comes in and what goes out, as bytes."""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from struct import Struct, error
from typing import NamedTuple

MAJOR, MINOR = 7, 31
OLDEST_MINOR = 23
"""Linux 3.15, and so every kernel that lets a user namespace mount FUSE."""
MAX_WRITE = 1 << 20
PAGE = 4096
LARGEST_REQUEST = MAX_WRITE + 4 * PAGE
MAX_NAME = 255
ROOT = 1


class Opcode(IntEnum):
    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    SYMLINK = 6
    MKNOD = 8
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    RENAME = 12
    LINK = 13
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    FSYNC = 20
    FLUSH = 25
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    FSYNCDIR = 30
    ACCESS = 34
    CREATE = 35
    INTERRUPT = 36
    DESTROY = 38
    BATCH_FORGET = 42
    READDIRPLUS = 44
    RENAME2 = 45
    SYNCFS = 50


class Feature(IntFlag):
    ASYNC_READ = 1 << 0
    ATOMIC_O_TRUNC = 1 << 3
    BIG_WRITES = 1 << 5
    AUTO_INVAL_DATA = 1 << 12
    DO_READDIRPLUS = 1 << 13
    READDIRPLUS_AUTO = 1 << 14
    PARALLEL_DIROPS = 1 << 18
    MAX_PAGES = 1 << 22


# Not among them: the kernel's write-back cache. With it a program's close() would say nothing about where its data is,
# and sizes would be the kernel's own, whatever the bucket holds.
FEATURES = (
    Feature.ASYNC_READ
    | Feature.ATOMIC_O_TRUNC
    | Feature.BIG_WRITES
    | Feature.AUTO_INVAL_DATA
    | Feature.DO_READDIRPLUS
    | Feature.READDIRPLUS_AUTO
    | Feature.PARALLEL_DIROPS
    | Feature.MAX_PAGES
)

KEEP_CACHE = 1 << 1
ATTR_SIZE, ATTR_MTIME, ATTR_HANDLE, ATTR_MTIME_NOW = 1 << 3, 1 << 5, 1 << 6, 1 << 8
RENAME_NOREPLACE = 1
NOTIFY_INVAL_ENTRY = 3

_IN = Struct("<IIQQIIIHH")
_OUT = Struct("<IiQ")
_ATTR = Struct("<6Q10I")
_ENTRY = Struct("<4Q2I")
_ATTR_OUT = Struct("<QII")
_OPEN_OUT = Struct("<QII")
_DIRENT = Struct("<QQII")
_INIT_IN = Struct("<4I")
_INIT_OUT = Struct("<4I2H2I2H8I")
_SETATTR = Struct("<IIQQQQQQIIIIIIII")
_TRANSFER = Struct("<QQIIQII")
_STATFS = Struct("<5Q4I24x")
_U32 = Struct("<I")
_2U32 = Struct("<II")
_4U32 = Struct("<IIII")
_U64 = Struct("<Q")
_FORGET_ONE = Struct("<QQ")
_RENAME2 = Struct("<QII")
_FLUSH = Struct("<QIIQ")
_FSYNC = Struct("<QII")
_GETATTR = Struct("<IIQ")
HEADER = _IN.size


class BadRequest(OSError):
    """What the kernel sent is not what it sends."""

    def __init__(self) -> None:
        super().__init__(errno.EIO, "a request of the wrong shape")


@dataclass(slots=True)
class Request:
    opcode: int
    unique: int
    node: int
    body: memoryview


class Transfer(NamedTuple):
    """A read or a write."""

    handle: int
    offset: int
    size: int
    flags: int


class Attributes(NamedTuple):
    """What ``SETATTR`` asks for; None for what stays."""

    size: int | None
    mtime: float | None
    now: bool
    handle: int | None


class Attr(NamedTuple):
    node: int
    directory: bool
    size: int
    mtime: float
    links: int = 1

    def pack(self) -> bytes:
        seconds = int(self.mtime)
        nano = int((self.mtime - seconds) * 1e9)
        # Buckets keep no modes. Every file may be executed, or no script and no program in one ever could.
        mode = (stat.S_IFDIR if self.directory else stat.S_IFREG) | 0o755
        blocks = (self.size + 511) // 512
        when = (seconds, seconds, seconds, nano, nano, nano)
        return _ATTR.pack(self.node, self.size, blocks, *when, mode, self.links, 0, 0, 0, PAGE, 0)


# -- in ----------------------------------------------------------------------------------------------------------------


def parse(data: memoryview) -> Request:
    if len(data) < HEADER:
        raise BadRequest
    length, opcode, unique, node, *_ = _IN.unpack_from(data)
    if length != len(data):
        raise BadRequest
    return Request(opcode, unique, node, data[HEADER:])


def _unpack(layout: Struct, body: memoryview) -> tuple[int, ...]:
    try:
        return layout.unpack_from(body)
    except error:
        raise BadRequest from None


def init(body: memoryview) -> tuple[int, int, int, int]:
    """The kernel's major and minor version, its readahead and its flags."""
    major, minor, readahead, flags = _unpack(_INIT_IN, body)
    return major, minor, readahead, flags


def number(body: memoryview) -> int:
    return _unpack(_U64, body)[0]


def forgets(body: memoryview) -> list[tuple[int, int]]:
    count = _unpack(_U32, body)[0]
    rest = body[8:]
    if count * _FORGET_ONE.size > len(rest):
        raise BadRequest
    return [_FORGET_ONE.unpack_from(rest, index * _FORGET_ONE.size) for index in range(count)]


def name(body: memoryview, skip: int = 0) -> str:
    return names(body, skip, 1)[0]


def names(body: memoryview, skip: int, count: int) -> list[str]:
    parts = bytes(body[skip:]).split(b"\0")
    if len(parts) != count + 1 or parts[-1]:
        raise BadRequest
    return [text(part) for part in parts[:-1]]


def text(raw: bytes) -> str:
    if len(raw) > MAX_NAME:
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
    try:
        found = raw.decode()
    except UnicodeDecodeError:
        # Keys are text. A name that is none cannot be kept.
        raise OSError(errno.EILSEQ, os.strerror(errno.EILSEQ)) from None
    if found in ("", ".", "..") or "/" in found:
        raise BadRequest
    return found


def open_flags(body: memoryview) -> int:
    return _unpack(_2U32, body)[0]


def create(body: memoryview) -> tuple[int, str]:
    return _unpack(_4U32, body)[0], name(body, _4U32.size)


def mkdir(body: memoryview) -> str:
    return name(body, _2U32.size)


def transfer(body: memoryview) -> Transfer:
    handle, offset, size, _, _, flags, _ = _unpack(_TRANSFER, body)
    return Transfer(handle, offset, size, flags)


def written(body: memoryview) -> tuple[Transfer, memoryview]:
    found = transfer(body)
    data = body[_TRANSFER.size :]
    if len(data) != found.size:
        raise BadRequest
    return found, data


def released(body: memoryview) -> int:
    return _unpack(_FLUSH, body)[0]


def synced(body: memoryview) -> int:
    return _unpack(_FSYNC, body)[0]


def rename(body: memoryview, second: bool) -> tuple[int, int, str, str]:
    """The new directory, the flags, the old name and the new one."""
    if second:
        directory, flags, _ = _unpack(_RENAME2, body)
    else:
        directory, flags = _unpack(_U64, body)[0], 0
    old, new = names(body, _RENAME2.size if second else _U64.size, 2)
    return directory, flags, old, new


def setattr_(body: memoryview) -> Attributes:
    valid, _, handle, size, _, _, mtime, _, _, nano, *_ = _unpack(_SETATTR, body)
    return Attributes(
        size=size if valid & ATTR_SIZE else None,
        mtime=mtime + nano / 1e9 if valid & ATTR_MTIME else None,
        now=bool(valid & ATTR_MTIME_NOW),
        handle=handle if valid & ATTR_HANDLE else None,
    )


# -- out ---------------------------------------------------------------------------------------------------------------


def reply(unique: int, size: int) -> bytes:
    return _OUT.pack(_OUT.size + size, 0, unique)


def failure(unique: int, number: int) -> bytes:
    return _OUT.pack(_OUT.size, -number, unique)


def forget_name(parent: int, name: str) -> bytes:
    """A message, not an answer: the kernel had better look this name up anew."""
    raw = name.encode()
    body = _RENAME2.pack(parent, len(raw), 0) + raw + b"\0"
    return _OUT.pack(_OUT.size + len(body), NOTIFY_INVAL_ENTRY, 0) + body


def init_out(minor: int, readahead: int, flags: int, background: int) -> bytes:
    pages = MAX_WRITE // PAGE
    wanted = FEATURES & flags
    threshold = background * 3 // 4
    return _INIT_OUT.pack(
        MAJOR, min(minor, MINOR), readahead, wanted, background, threshold, MAX_WRITE, 1, pages, 0, *(0,) * 8
    )


def entry(attr: Attr, valid: float) -> bytes:
    return _ENTRY.pack(attr.node, 0, *_valid(valid)) + attr.pack()


def no_entry(valid: float) -> bytes:
    """There is no such name, and the kernel may remember that for a while."""
    return _ENTRY.pack(0, 0, *_valid(valid)) + bytes(_ATTR.size)


def _valid(seconds: float) -> tuple[int, int, int, int]:
    whole = int(seconds)
    nano = int((seconds - whole) * 1e9)
    return whole, whole, nano, nano


def attr_out(attr: Attr, valid: float) -> bytes:
    whole = int(valid)
    return _ATTR_OUT.pack(whole, int((valid - whole) * 1e9), 0) + attr.pack()


def open_out(handle: int, flags: int = 0) -> bytes:
    return _OPEN_OUT.pack(handle, flags, 0)


def write_out(size: int) -> bytes:
    return _2U32.pack(size, 0)


def dirent(node: int, offset: int, name: bytes, directory: bool) -> bytes:
    kind = (stat.S_IFDIR if directory else stat.S_IFREG) >> 12
    return _DIRENT.pack(node, offset, len(name), kind) + name + bytes(-len(name) % 8)


def dirent_size(name: bytes, plus: bool) -> int:
    return _DIRENT.size + len(name) + -len(name) % 8 + (_ENTRY.size + _ATTR.size if plus else 0)


def statfs(block: int, blocks: int, free: int) -> bytes:
    return _STATFS.pack(blocks, free, free, 1 << 30, 1 << 30, block, MAX_NAME, block, 0)
