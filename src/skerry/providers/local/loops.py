"""Loop devices: a file of the host as a disk.

One file must never be behind two devices, because each would keep its own idea of what is on it. So a device is looked
for first, and callers hold a lock of their own around looking and making.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

_GET_FREE, _CONFIGURE, _GET_STATUS, _SET_CAPACITY = 0x4C82, 0x4C0A, 0x4C05, 0x4C07
_AUTOCLEAR, _DIRECT_IO = 4, 16
_INFO = struct.Struct("=5Q4I64s64s32s2Q")
_CONFIG = struct.Struct("=2I232s64s")
_BLOCK = 4096
_MAJOR = 7
_ATTEMPTS = 50


def attach(file: int, name: str) -> int:
    """A device over an open file, for the caller to close; the kernel frees it when the last user does."""
    found = find(file)
    if found is not None:
        return found
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    try:
        for _ in range(_ATTEMPTS):
            device = _open(fcntl.ioctl(control, _GET_FREE))
            try:
                _configure(device, file, name)
                return device
            except OSError as error:
                os.close(device)
                if error.errno != errno.EBUSY:  # somebody else took it meanwhile
                    raise
    finally:
        os.close(control)
    raise OSError(errno.EBUSY, "Every free loop device was taken by somebody else")


def find(file: int) -> int | None:
    """The device that is over this file already, opened; it stays while it is open."""
    wanted = os.fstat(file)
    for number in _numbers():
        try:
            device = _open(number)
        except OSError:
            continue
        if _backing(device) == (wanted.st_dev, wanted.st_ino):
            return device
        os.close(device)
    return None


def path_of(device: int) -> str:
    """A path by which the device can be mounted."""
    path = f"/dev/loop{os.minor(os.fstat(device).st_rdev)}"
    with contextlib.suppress(OSError):
        if os.stat(path).st_rdev == os.fstat(device).st_rdev:
            return path
    return f"/proc/self/fd/{device}"


def grown(device: int) -> None:
    """The file has become larger."""
    fcntl.ioctl(device, _SET_CAPACITY)


def _configure(device: int, file: int, name: str) -> None:
    label = os.fsencode(name)[-63:]
    for flags in (_AUTOCLEAR | _DIRECT_IO, _AUTOCLEAR):
        info = _INFO.pack(0, 0, 0, 0, 0, 0, 0, 0, flags, label, b"", b"", 0, 0)
        try:
            fcntl.ioctl(device, _CONFIGURE, _CONFIG.pack(file, _BLOCK, info, b""))
            return
        except OSError as error:
            # Not every file system can do direct I/O; without, pages are cached twice.
            if error.errno != errno.EINVAL or not flags & _DIRECT_IO:
                raise


def _backing(device: int) -> tuple[int, int] | None:
    info = bytearray(_INFO.size)
    try:
        fcntl.ioctl(device, _GET_STATUS, info)
    except OSError:
        return None
    disk, inode, *_ = _INFO.unpack(info)
    return disk, inode


def _numbers() -> Iterator[int]:
    """The devices that are in use. Others are not opened: to do so would make them exist."""
    try:
        names = os.listdir("/sys/block")
    except OSError:
        names = [name for name in os.listdir("/dev") if name[4:].isdigit()]
    for name in names:
        if name.startswith("loop") and _used(name):
            yield int(name[4:])


def _used(name: str) -> bool:
    return os.path.exists(f"/sys/block/{name}/loop/backing_file") or not os.path.isdir("/sys/block")


def _open(number: int) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC
    path = Path(f"/dev/loop{number}")
    try:
        return os.open(path, flags)
    except FileNotFoundError:
        # A container's /dev is often a plain directory, in which new devices do not appear.
        made = Path(f"/dev/.skerry-loop-{secrets.token_hex(6)}")
        os.mknod(made, stat.S_IFBLK | 0o600, os.makedev(_MAJOR, number))
        try:
            return os.open(made, flags)
        finally:
            made.unlink()
