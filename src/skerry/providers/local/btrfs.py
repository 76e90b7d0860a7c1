"""What btrfs can do beyond files: subvolumes, snapshots of them in constant time, and growing while mounted.

Everything is an ioctl on a directory. Making and snapshotting one's own subvolumes needs no privilege.
"""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path

FIRST_INODE = 256
"""The inode of the top directory of every subvolume, and of nothing else."""

_SUBVOL_CREATE_V2, _SNAP_CREATE_V2, _SNAP_DESTROY = 0x50009418, 0x50009417, 0x5000940F
_SUBVOL_GETFLAGS, _SUBVOL_SETFLAGS = 0x80089419, 0x4008941A
_RESIZE, _FS_INFO, _SYNC = 0x50009403, 0x8400941F, 0x9408
_INO_LOOKUP, _QUOTA_CTL, _QGROUP_LIMIT = 0xD0009412, 0xC0109428, 0x8030942B
_QUOTA_SIMPLE = 4
_LIMIT_REFERENCED, _NO_LIMIT = 1, 2**64 - 1
_READ_ONLY = 1 << 1
_ARGUMENTS = 4096
_NAME, _NAME_V2 = 8, 56
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def is_btrfs(path: Path) -> bool:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, _FS_INFO, bytearray(1024))
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def identifier(path: Path) -> str:
    """The UUID of the file system, as /sys/fs/btrfs spells it."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        told = bytearray(1024)
        fcntl.ioctl(fd, _FS_INFO, told)
    finally:
        os.close(fd)
    digits = told[16:32].hex()
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def unwritten(path: Path) -> int:
    """Bytes in memory that have no place on the disk yet, of the whole file system; 0 where that is not told."""
    try:
        return int(Path("/sys/fs/btrfs", identifier(path), "allocation/data/bytes_may_use").read_text())
    except (OSError, ValueError):
        return 0


def count_simply(path: Path) -> None:
    """Have the kernel count for each subvolume what was written in it and still exists, wherever it is shared.

    Unlike full quotas it costs nothing measurable, because it asks only who wrote a block, not who sees it. Raises
    ``OSError`` where the kernel (before Linux 6.7) or the caller (not root) cannot.
    """
    if _qgroups(path).is_dir():
        return
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, _QUOTA_CTL, bytearray(struct.pack("=QQ", _QUOTA_SIMPLE, 0)))
    finally:
        os.close(fd)


def subvolume_id(path: Path) -> int:
    fd = os.open(path, _DIRECTORY)
    try:
        told = bytearray(_ARGUMENTS)
        struct.pack_into("=QQ", told, 0, 0, FIRST_INODE)
        fcntl.ioctl(fd, _INO_LOOKUP, told)
    finally:
        os.close(fd)
    (found,) = struct.unpack_from("=Q", told)
    return int(found)


def limit(path: Path, size: int | None) -> None:
    """Refuse, with EDQUOT, what would make the bytes written in a subvolume more than ``size``."""
    arguments = struct.pack(
        "=6Q", subvolume_id(path), _LIMIT_REFERENCED, _NO_LIMIT if size is None else size, _NO_LIMIT, 0, 0
    )
    fd = os.open(path, _DIRECTORY)
    try:
        fcntl.ioctl(fd, _QGROUP_LIMIT, bytearray(arguments))
    finally:
        os.close(fd)


def written(path: Path) -> int | None:
    """The bytes that count against the limit of a subvolume, those still in memory included; None if none do."""
    return written_in(_qgroups(path), subvolume_id(path))


def written_in(groups: Path, subvolume: int) -> int | None:
    group = groups / f"0_{subvolume}"
    try:
        return sum(int((group / name).read_text()) for name in ("referenced", "rsv_data"))
    except (OSError, ValueError):
        return None


def _qgroups(path: Path) -> Path:
    return Path("/sys/fs/btrfs", identifier(path), "qgroups")


def is_subvolume(path: Path) -> bool:
    try:
        return os.lstat(path).st_ino == FIRST_INODE and is_btrfs(path)
    except (FileNotFoundError, NotADirectoryError):
        return False


def create(path: Path) -> None:
    _within(path, _SUBVOL_CREATE_V2, _arguments(path.name))


def snapshot(source: Path, target: Path, *, writable: bool) -> None:
    """All that was written before this call, also what is still in memory, is in ``target``."""
    fd = os.open(source, _DIRECTORY)
    try:
        _within(target, _SNAP_CREATE_V2, _arguments(target.name, fd, 0 if writable else _READ_ONLY))
    finally:
        os.close(fd)


def destroy(path: Path) -> None:
    """Out of sight at once; the kernel frees the space in the background."""
    arguments = bytearray(_ARGUMENTS)
    _put(arguments, _NAME, path.name)
    _within(path, _SNAP_DESTROY, arguments)


def make_writable(path: Path) -> None:
    fd = os.open(path, _DIRECTORY)
    try:
        flags = bytearray(8)
        fcntl.ioctl(fd, _SUBVOL_GETFLAGS, flags)
        (value,) = struct.unpack("=Q", flags)
        if value & _READ_ONLY:
            fcntl.ioctl(fd, _SUBVOL_SETFLAGS, struct.pack("=Q", value & ~_READ_ONLY))
    finally:
        os.close(fd)


def fill_device(path: Path) -> None:
    """Let a mounted file system use all of a device that has grown."""
    arguments = bytearray(_ARGUMENTS)
    _put(arguments, _NAME, "max")
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, _RESIZE, arguments)
    finally:
        os.close(fd)


def reclaim(path: Path) -> None:
    """Write everything out, and free now what removed subvolumes held; that would otherwise be done within minutes."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, _SYNC)
    finally:
        os.close(fd)


def _arguments(name: str, fd: int = 0, flags: int = 0) -> bytearray:
    arguments = bytearray(_ARGUMENTS)
    struct.pack_into("=qQQ", arguments, 0, fd, 0, flags)
    _put(arguments, _NAME_V2, name)
    return arguments


def _put(arguments: bytearray, offset: int, name: str) -> None:
    raw = os.fsencode(name)
    arguments[offset : offset + len(raw)] = raw


def _within(path: Path, request: int, arguments: bytearray) -> None:
    parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(parent, request, arguments)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(parent)
