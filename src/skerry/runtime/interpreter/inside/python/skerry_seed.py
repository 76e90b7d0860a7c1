"""The seed: a Python *outside* that has everything imported, of which a sandbox's template is a fork that went inside.

Importing pandas and matplotlib takes half a second in every sandbox; a fork of a process that did it once takes
milliseconds, and its pages are shared by all of them. Orders come one per packet on descriptor 3, a SOCK_SEQPACKET
socket:

    {"capabilities": [0, 1, …], "unified": true, "openFiles": null} + [pidfd of a sandbox's PID 1,
        the template's socket, its stderr, a seccomp filter, the ways into its control groups …]

It says ``{"ready": true}`` first, nothing later, and exits when the socket is closed. It runs in an empty root with no
environment: there is nothing in its memory that the code which later runs in a copy of it may not read.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
from typing import Any

from skerry_nursery import PR_SET_CHILD_SUBREAPER, Nursery, drain, wakeups

CONTROL = 3
EXPENDABLE = "500"
"""As all processes of a sandbox but its init: when memory runs out, they go first."""
PRELOADED = ("numpy", "pandas", "matplotlib.pyplot")
# All at once: user, mount, cgroup, uts, ipc, pid and net.
NAMESPACES = 0x10000000 | 0x20000 | 0x2000000 | 0x4000000 | 0x8000000 | 0x20000000 | 0x40000000
PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 4, 22, 24, 38
PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE = 47, 2
SECCOMP_MODE_FILTER = 2
CAPABILITY_VERSION = 0x20080522

CLONE_INTO_CGROUP, SYS_CLONE3 = 1 << 33, 435
SYS_SCHED_SETATTR = {"x86_64": 314}.get(os.uname().machine, 274)
TURN_NANOSECONDS = 200_000
TURN_OF_THREADS = sys.getswitchinterval()

libc = ctypes.CDLL(None, use_errno=True)
here = ctypes.PyDLL(None)
here.syscall.restype = ctypes.c_long


class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def serve() -> None:
    nursery = Nursery()
    nursery.preload(PRELOADED)
    nursery.warm()
    forget_places()
    control = socket.socket(fileno=CONTROL)
    woken = wakeups()
    # Templates become children of this process when the one that went inside with them has ended.
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    end_threads()
    # A thread that waits for its turn while this one is cloned would be waited for in the clone, where it is not.
    sys.setswitchinterval(3600)
    control.send(b'{"ready": true}')
    waiting = select.poll()
    waiting.register(control, select.POLLIN)
    waiting.register(woken, select.POLLIN)
    while True:
        ready = {fd for fd, _ in waiting.poll()}
        if woken in ready:
            drain(woken)
            reap()
        if CONTROL in ready:
            data, fds, _, _ = socket.recv_fds(control, 4096, 16)
            if not data:
                os._exit(0)
            order = json.loads(data)
            if fork(order["unified"], fds[4:]) == 0:
                try:
                    plant(nursery, order, fds)
                finally:
                    os._exit(1)
            for fd in fds:
                os.close(fd)


def end_threads() -> None:
    """A first fork of the usual kind ends the threads that libraries have begun: clone3 would leave them half there."""
    if os.fork() == 0:
        os._exit(0)


def fork(unified: bool, entrances: list[int]) -> int:
    """A child that is in the sandbox's control groups before it does anything: cloned into the first of them if that is
    of version 2, and by itself into the others."""
    pid = -1
    if unified:
        arguments = struct.pack("11Q", CLONE_INTO_CGROUP, 0, 0, 0, signal.SIGCHLD, 0, 0, 0, 0, 0, entrances[0])
        pid = here.syscall(SYS_CLONE3, arguments, len(arguments))
        if pid < 0:
            # A filter of the container we run in keeps clone3 from us; the directory leads to the file as well.
            entrance = os.open("cgroup.procs", os.O_WRONLY | os.O_CLOEXEC, dir_fd=entrances[0])
            os.dup2(entrance, entrances[0])
            os.close(entrance)
    cloned = pid >= 0
    if not cloned:
        pid = os.fork()
    if pid == 0:
        try:
            for entrance in entrances[1:] if cloned else entrances:
                os.write(entrance, b"0")
        except OSError:
            os._exit(1)
    return int(pid)


def plant(nursery: Nursery, order: dict[str, Any], fds: list[int]) -> None:
    """Go into a sandbox and be its template there.

    Nothing of the sandbox is executed or looked up before the filter is in place and the capabilities are gone.
    """
    sys.setswitchinterval(TURN_OF_THREADS)
    inside, template, stderr, filtering, *_ = fds
    program = os.read(filtering, 1 << 16)
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write(EXPENDABLE)
    if os.sched_getscheduler(0) == os.SCHED_OTHER:  # as all that runs in a sandbox: with short turns of the processor
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        libc.syscall(SYS_SCHED_SETATTR, 0, struct.pack("IIQiIQQQ", 48, 0, 0, nice, 0, TURN_NANOSECONDS, 0, 0), 0)
    if order["openFiles"] is not None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = min(hard, order["openFiles"])
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, most), most))
    check(libc.setns(inside, NAMESPACES), "setns")
    os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    if os.fork() != 0:  # only a child is in the pid namespace
        os._exit(0)
    os.setsid()
    os.dup2(stderr, 2)
    os.dup2(template, CONTROL)
    os.closerange(CONTROL + 1, 1 << 16)
    confine(order["capabilities"], program)
    nursery.serve(CONTROL)


def confine(capabilities: list[int], program: bytes) -> None:
    """What the programs started inside are: without most capabilities, for good, and filtered."""
    for capability in range(64):
        if capability not in capabilities:
            libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    mask = sum(1 << capability for capability in capabilities)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    check(libc.capset(header, (ctypes.c_uint32 * 6)(low, low, low, high, high, high)), "capset")
    for capability in capabilities:
        check(libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, capability, 0, 0), "ambient capabilities")
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    wrapped = Program(len(program) // 8, program)
    check(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(wrapped), 0, 0), "seccomp")
    # A change of ids took it away; without it not even its own /proc entries are its own.
    check(libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0), "dumpable")


def forget_places() -> None:
    """matplotlib remembers where its settings are. They are elsewhere for whoever comes after."""
    matplotlib = sys.modules.get("matplotlib")
    for name in ("get_configdir", "get_cachedir"):
        known = getattr(matplotlib, name, None)
        if known is not None and hasattr(known, "__wrapped__"):
            setattr(matplotlib, name, known.__wrapped__)


def reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
