"""Attaching a FUSE file system inside a sandbox. Runs in a child of the launcher; imports only the standard library.

The user's path is never looked up on the host: the child enters the sandbox's user and mount namespaces first, and then
walks the path one component at a time, on the sandbox's root file system only and through no symbolic link. The mount
is made by descriptor, so that nothing that is renamed meanwhile leads it astray.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import socket
from typing import Any

CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000
SYS_MOVE_MOUNT, SYS_FSOPEN, SYS_FSCONFIG, SYS_FSMOUNT, SYS_OPENAT2 = 429, 430, 431, 432, 437
MS_REC, MS_SHARED, MS_NOSUID, MS_NODEV = 16384, 1 << 20, 2, 4
FSOPEN_CLOEXEC = FSMOUNT_CLOEXEC = 1
FSCONFIG_SET_FLAG, FSCONFIG_SET_STRING, FSCONFIG_CMD_CREATE = 0, 1, 6
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4
MOVE_MOUNT_F_EMPTY_PATH, MOVE_MOUNT_T_EMPTY_PATH = 0x4, 0x40
MNT_DETACH, AT_FDCWD = 2, -100
RESOLVE_NO_XDEV, RESOLVE_NO_MAGICLINKS, RESOLVE_NO_SYMLINKS = 1, 2, 4
DEVICE = "/dev/fuse"
PATIENCE = 10

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long


def check(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


# -- in the launcher ---------------------------------------------------------------------------------------------------


def attach(pidfd: int, path: str, read_only: bool, users: int = CLONE_NEWUSER) -> tuple[int, int]:
    """Mount at ``path``; descriptors of the connection to the kernel and of the mount itself.

    ``users`` is 0 for a machine whose users are the host's, as those of a container may be.
    """
    fds = _apart(lambda: _attach(pidfd, path, read_only, users))
    return fds[0], fds[1]


def detach(pidfd: int, mount: int, users: int = CLONE_NEWUSER) -> None:
    """Take a mount away again, whatever still uses it."""
    _apart(lambda: _detach(pidfd, mount, users))


def _apart(work: Any) -> list[int]:
    """Run something in a child, which may enter namespaces; the descriptors it made come back, or its error."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        pid = os.fork()
        if pid == 0:
            try:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(PATIENCE)
                fds = work()
                socket.send_fds(theirs, [b"0"], fds) if fds else theirs.send(b"0")
            except OSError as error:
                theirs.send(b"%d" % (error.errno or errno.EIO))
            finally:
                os._exit(0)
        theirs.close()
        said, fds, _, _ = socket.recv_fds(ours, 64, 4)
        os.waitpid(pid, 0)
    number = int(said) if said else errno.ETIMEDOUT
    if number:
        raise OSError(number, os.strerror(number))
    return fds


# -- in the child ------------------------------------------------------------------------------------------------------


def _attach(pidfd: int, path: str, read_only: bool, users: int) -> list[int]:
    if users:
        check(libc.setns(pidfd, users))
    # Between the two: opened in the user namespace the mount is to belong to, but found where the host keeps it.
    try:
        device = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise OSError(errno.ENODEV, os.strerror(errno.ENODEV)) from error
    check(libc.setns(pidfd, CLONE_NEWNS))
    _become_root()
    made: list[tuple[int, str]] = []
    try:
        target = _walk(path, made)
        if os.listdir(_readable(target)):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
        return [device, _mount(device, target, read_only)]
    except OSError:
        for parent, name in reversed(made):
            os.rmdir(name, dir_fd=parent)
        raise


def _detach(pidfd: int, mount: int, users: int) -> list[int]:
    # Named by its descriptor, found through the host's /proc: to change into it would ask its file system, and wait.
    descriptors = os.open("/proc/self/fd", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    check(libc.setns(pidfd, users | CLONE_NEWNS))
    os.fchdir(descriptors)
    check(libc.umount2(b"%d" % mount, MNT_DETACH))
    return []


def _become_root() -> None:
    try:
        os.setgroups([])
    except PermissionError:
        pass  # a single-id map forbids it
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)


def _walk(path: str, made: list[tuple[int, str]]) -> int:
    """A descriptor of the directory, made where it is missing."""
    here = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    for name in path.split("/"):
        if not name:
            continue
        try:
            here = _step(here, name)
        except FileNotFoundError:
            os.mkdir(name, 0o755, dir_fd=here)
            made.append((here, name))
            here = _step(here, name)
    return here


class _How(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("flags", "mode", "resolve")]


def _step(directory: int, name: str) -> int:
    flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
    how = _How(flags, 0, RESOLVE_NO_XDEV | RESOLVE_NO_MAGICLINKS | RESOLVE_NO_SYMLINKS)
    encoded = name.encode()
    return check(libc.syscall(SYS_OPENAT2, directory, encoded, ctypes.byref(how), ctypes.sizeof(how)))


def _readable(directory: int) -> int:
    return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)


def _mount(device: int, target: int, read_only: bool) -> int:
    context = check(libc.syscall(SYS_FSOPEN, b"fuse", FSOPEN_CLOEXEC))
    options = {"source": "bucket", "fd": str(device), "rootmode": "40000", "user_id": "0", "group_id": "0"}
    for name, value in options.items():
        check(libc.syscall(SYS_FSCONFIG, context, FSCONFIG_SET_STRING, name.encode(), value.encode(), 0))
    for name in ["allow_other", "default_permissions", *(["ro"] if read_only else [])]:
        check(libc.syscall(SYS_FSCONFIG, context, FSCONFIG_SET_FLAG, name.encode(), None, 0))
    check(libc.syscall(SYS_FSCONFIG, context, FSCONFIG_CMD_CREATE, None, None, 0))
    flags = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | (MOUNT_ATTR_RDONLY if read_only else 0)
    mount = check(libc.syscall(SYS_FSMOUNT, context, FSMOUNT_CLOEXEC, flags))
    how = MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH
    check(libc.syscall(SYS_MOVE_MOUNT, mount, b"", target, b"", how))
    return mount
