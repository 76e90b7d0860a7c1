"""The system calls that no process in a sandbox may make.

A deny-list, because a sandbox is a whole machine and must run what people run; native ABI only, because a second ABI
would be a second, unfiltered way to every call. Inherited by every process, and impossible to lift.
``docs/security.md`` shows these tables; a test sees to it.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any, NamedTuple

from skerry.errors import HostUnfitError


class Refusal(NamedTuple):
    """Calls that are answered with an error instead of being made."""

    calls: tuple[str, ...]
    answer: int
    why: str


WHOLE = (
    Refusal(
        ("mount", "umount2", "pivot_root", "setns"),
        errno.EPERM,
        "mounts and namespaces are what a sandbox is made of; nothing inside has business changing them",
    ),
    Refusal(
        ("fsopen", "fsmount", "fsconfig", "fspick", "move_mount", "open_tree", "open_tree_attr", "mount_setattr"),
        errno.EPERM,
        "the same by the newer mount interface, whose parsers of mount options had holes of their own",
    ),
    Refusal(
        ("init_module", "finit_module", "delete_module", "kexec_load", "kexec_file_load", "reboot"),
        errno.EPERM,
        "code in the kernel, another kernel, no kernel",
    ),
    Refusal(("swapon", "swapoff", "acct", "quotactl", "quotactl_fd"), errno.EPERM, "the host's disks and accounts"),
    Refusal(("settimeofday", "clock_settime", "clock_adjtime", "adjtimex"), errno.EPERM, "the clock is everybody's"),
    Refusal(("iopl", "ioperm"), errno.EPERM, "ports of the hardware"),
    Refusal(("syslog", "vhangup"), errno.EPERM, "the kernel's log and the host's terminals"),
    Refusal(
        ("uselib", "_sysctl", "sysfs", "ustat", "lookup_dcookie", "nfsservctl", "modify_ldt"),
        errno.EPERM,
        "remains that no program of today calls, and some of which had holes",
    ),
    Refusal(
        ("add_key", "request_key", "keyctl"),
        errno.EPERM,
        "keyrings belong to users of the host, so that sandboxes would share them",
    ),
    Refusal(
        ("bpf", "perf_event_open", "userfaultfd", "fanotify_init"),
        errno.EPERM,
        "wide and deep interfaces, the usual first step of attacks on the kernel",
    ),
    Refusal(("open_by_handle_at",), errno.EPERM, "opens files by number, past the paths that lead to them"),
    Refusal(("kcmp", "move_pages", "migrate_pages"), errno.EPERM, "looks into the kernel's and others' memory"),
    Refusal(
        ("clone3", "io_uring_setup", "io_uring_enter", "io_uring_register"),
        errno.ENOSYS,
        "a filter cannot look into their arguments; told that there is no such call, programs use clone and epoll",
    ),
)
"""Refused whatever their arguments."""

LATER = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429,
    "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "clone3": 435, "mount_setattr": 442,
    "quotactl_fd": 443, "open_tree_attr": 467,
}  # fmt: skip
"""Numbers of calls that the installed libseccomp may be too old to know. From 424 on all architectures share them."""

NAMESPACES = {
    "time": 0x80, "mount": 0x20000, "cgroup": 0x2000000, "uts": 0x4000000, "ipc": 0x8000000, "user": 0x10000000,
    "pid": 0x20000000, "net": 0x40000000,
}  # fmt: skip

UNIX, INET, INET6, NETLINK = 1, 2, 10, 16
FAMILIES = (UNIX, INET, INET6, NETLINK)
# Routes, sockets (of one's own network namespace) and devices that come and go.
NETLINK_PROTOCOLS = (0, 4, 15)
# DCCP, L2TP, SCTP and UDP-Lite: asking for one loads a module of the kernel that hardly anybody uses.
RARE_PROTOCOLS = (33, 115, 132, 136)

IOCTLS = {"TIOCSTI": 0x5412, "TIOCLINUX": 0x541C, "TIOCSETD": 0x5423}
RLIMIT_CORE = 4

PARTLY = (
    Refusal(("unshare", "clone"), errno.EPERM, "with a flag for a new namespace of any kind, user namespaces included"),
    Refusal(
        ("socket", "socketpair"),
        errno.EAFNOSUPPORT,
        "for any family but Unix, IPv4, IPv6 and netlink: packets, hypervisors (vsock), the kernel's crypto, radios",
    ),
    Refusal(
        ("socket",),
        errno.EPROTONOSUPPORT,
        "for netlink but routes, sockets and device events (no netfilter, no audit); for SCTP, DCCP, L2TP, UDP-Lite",
    ),
    Refusal(
        ("ioctl",),
        errno.EPERM,
        "with TIOCSTI and TIOCLINUX, which type into terminals, and TIOCSETD, which loads line disciplines",
    ),
    Refusal(
        ("setrlimit", "prlimit64"),
        0,
        "of core dumps: it seems to work and does nothing (`EPERM`, if the old limit is asked for in the same call). "
        "With its limit of 1 a crash inside does not start the host's core handler; with 0 or more it would",
    ),
)
"""Refused with these arguments."""

_INT = 0xFFFFFFFF
"""The kernel takes these arguments as 32-bit numbers, whatever is in the other half of the register."""


def compile_filter() -> bytes:
    """The filter as the BPF program that bubblewrap and prctl take."""
    try:
        import pyseccomp as seccomp
    except (ImportError, OSError, RuntimeError) as error:
        raise HostUnfitError(
            f"System calls cannot be filtered here: {error}.", hint="apt-get install libseccomp2"
        ) from error
    rules = seccomp.SyscallFilter(seccomp.ALLOW)
    # Not only the thread that tried.
    rules.set_attr(seccomp.Attr.ACT_BADARCH, seccomp.KILL_PROCESS)

    def refuse(answer: int, call: str, **only: int) -> None:
        """``only``: what the arguments of that place must be, as 32-bit numbers."""
        found = [seccomp.Arg(int(place[1:]), seccomp.MASKED_EQ, _INT, value) for place, value in only.items()]
        _add(rules, seccomp.ERRNO(answer), call, *found)

    for refusal in WHOLE:
        for call in refusal.calls:
            refuse(refusal.answer, call)
    for flag in NAMESPACES.values():
        with_flag = seccomp.Arg(0, seccomp.MASKED_EQ, flag, flag)
        _add(rules, seccomp.ERRNO(errno.EPERM), "unshare", with_flag)
        if flag != NAMESPACES["time"]:  # clone's low byte is a signal number
            _add(rules, seccomp.ERRNO(errno.EPERM), "clone", with_flag)
    for family in range(64):
        if family not in FAMILIES:
            refuse(errno.EAFNOSUPPORT, "socket", _0=family)
        if family != UNIX:
            refuse(errno.EAFNOSUPPORT, "socketpair", _0=family)
    for protocol in range(32):
        if protocol not in NETLINK_PROTOCOLS:
            refuse(errno.EPROTONOSUPPORT, "socket", _0=NETLINK, _2=protocol)
    for family in (INET, INET6):
        for protocol in RARE_PROTOCOLS:
            refuse(errno.EPROTONOSUPPORT, "socket", _0=family, _2=protocol)
    for request in IOCTLS.values():
        refuse(errno.EPERM, "ioctl", _1=request)
    refuse(0, "setrlimit", _0=RLIMIT_CORE)
    of_core = seccomp.Arg(1, seccomp.MASKED_EQ, _INT, RLIMIT_CORE)
    fresh = seccomp.Arg(2, seccomp.NE, 0)
    _add(rules, seccomp.ERRNO(0), "prlimit64", of_core, fresh, seccomp.Arg(3, seccomp.EQ, 0))
    # Who asks for the old value in the same call would find nothing there.
    _add(rules, seccomp.ERRNO(errno.EPERM), "prlimit64", of_core, fresh, seccomp.Arg(3, seccomp.NE, 0))
    return _export(rules)


def write_filter(path: Path) -> bytes:
    """The filter, which is also in this file from now on."""
    program = compile_filter()
    fresh = path.with_suffix(f".{os.getpid()}")
    fresh.write_bytes(program)
    fresh.chmod(0o444)
    fresh.replace(path)
    return program


def number(call: str) -> int | None:
    """The number of a call here; None where this architecture has no such call."""
    import pyseccomp as seccomp

    found = int(seccomp.resolve_syscall(seccomp.system_arch(), call))
    if found == -1:  # unknown, where other negative numbers mean: known, and not of this architecture
        if call not in LATER:
            raise HostUnfitError(
                f"The installed libseccomp does not know the system call {call!r}, so it cannot be refused.",
                hint="apt-get install --only-upgrade libseccomp2",
            )
        return LATER[call]
    return found if found >= 0 else None


def _add(rules: Any, action: int, call: str, *arguments: Any) -> None:
    place = number(call)
    if place is not None:
        rules.add_rule(action, place, *arguments)


def _export(rules: Any) -> bytes:
    memory = os.memfd_create("filter", os.MFD_CLOEXEC)
    with open(memory, "r+b") as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()
