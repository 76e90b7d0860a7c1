"""The system calls that no process in a sandbox may make.

A deny-list, because a sandbox is a whole machine and must run what people run; native ABI only, because a second ABI
would be a second, unfiltered way to every call. Inherited by every process, and impossible to lift.
"""

from __future__ import annotations

import errno
import os
from typing import Any

from skerry.errors import HostUnfitError

# Mounts and namespaces are how a sandbox is made; nothing inside has business making another.
MOUNTS = (
    "mount", "umount2", "pivot_root", "fsopen", "fsmount", "fsconfig", "fspick", "move_mount", "open_tree",
    "mount_setattr", "setns",
)  # fmt: skip

# The kernel itself: modules, boot, clocks, swap, raw I/O, accounting, its log.
KERNEL = (
    "init_module", "finit_module", "delete_module", "kexec_load", "kexec_file_load", "reboot", "swapon", "swapoff",
    "iopl", "ioperm", "acct", "settimeofday", "clock_settime", "clock_adjtime", "adjtimex", "syslog", "quotactl",
    "quotactl_fd", "vhangup", "uselib", "_sysctl", "sysfs", "ustat", "lookup_dcookie", "nfsservctl",
)  # fmt: skip

# Wide and deep interfaces with a history of holes, or that see across sandboxes (keyrings are per host user).
SURFACE = (
    "add_key", "request_key", "keyctl", "bpf", "perf_event_open", "userfaultfd", "fanotify_init", "kcmp",
    "open_by_handle_at", "move_pages", "migrate_pages",
)  # fmt: skip

# Answered with "no such call", so that programs fall back: glibc to clone, others to epoll.
ABSENT = ("clone3", "io_uring_setup", "io_uring_enter", "io_uring_register")

NAMESPACES = {
    "time": 0x80, "mount": 0x20000, "cgroup": 0x2000000, "uts": 0x4000000, "ipc": 0x8000000, "user": 0x10000000,
    "pid": 0x20000000, "net": 0x40000000,
}  # fmt: skip

# AF_UNIX, AF_INET, AF_INET6, AF_NETLINK. The others reach hypervisors (vsock), crypto, radios and dead protocols.
FAMILIES = (1, 2, 10, 16)

TIOCSTI, TIOCLINUX = 0x5412, 0x541C


def compile_filter() -> bytes:
    """The filter as the BPF program that bubblewrap and prctl take."""
    try:
        import pyseccomp as seccomp
    except (ImportError, OSError, RuntimeError) as error:
        raise HostUnfitError(
            f"System calls cannot be filtered here: {error}.", hint="apt-get install libseccomp2"
        ) from error
    denied = seccomp.ERRNO(errno.EPERM)
    rules = seccomp.SyscallFilter(seccomp.ALLOW)
    for name in (*MOUNTS, *KERNEL, *SURFACE):
        _add(rules, denied, name)
    for name in ABSENT:
        _add(rules, seccomp.ERRNO(errno.ENOSYS), name)
    for flag in NAMESPACES.values():
        _add(rules, denied, "unshare", seccomp.Arg(0, seccomp.MASKED_EQ, flag, flag))
        if flag != NAMESPACES["time"]:  # clone's low byte is a signal number
            _add(rules, denied, "clone", seccomp.Arg(0, seccomp.MASKED_EQ, flag, flag))
    for request in (TIOCSTI, TIOCLINUX):
        _add(rules, denied, "ioctl", seccomp.Arg(1, seccomp.MASKED_EQ, 0xFFFFFFFF, request))
    for family in range(64):
        if family not in FAMILIES:
            # The kernel takes it as a 32-bit number, whatever is in the other half of the register.
            found = seccomp.Arg(0, seccomp.MASKED_EQ, 0xFFFFFFFF, family)
            _add(rules, seccomp.ERRNO(errno.EAFNOSUPPORT), "socket", found)
    return _export(rules)


def _add(rules: Any, action: int, name: str, *arguments: Any) -> None:
    try:
        rules.add_rule(action, name, *arguments)
    except (OSError, ValueError) as error:
        # Not every architecture, nor every libseccomp, knows every name; what it has no name for here it has no
        # number for either.
        if getattr(error, "errno", None) not in (None, errno.EDOM, errno.EINVAL, errno.EFAULT):
            raise


def _export(rules: Any) -> bytes:
    memory = os.memfd_create("filter", os.MFD_CLOEXEC)
    with open(memory, "r+b") as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()
