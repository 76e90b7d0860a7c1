"""A second PID 1 in a machine that has its own."""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Any

from skerry.providers.local.launch.groups import fork
from skerry.providers.local.launch.kernel import (
    CLONE_NEWCGROUP,
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUTS,
    MS_BIND,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_RDONLY,
    MS_REC,
    MS_REMOUNT,
    MS_SHARED,
    MS_SLAVE,
    PR_CAPBSET_DROP,
    PR_CAPBSET_READ,
    PR_SET_NO_NEW_PRIVS,
    PR_SET_PDEATHSIG,
    PR_SET_SECCOMP,
    check,
    libc,
    mount,
    write,
)
from skerry.providers.local.launch.process import arrange, become, open_null
from skerry.providers.local.launch.sandbox import Sandbox

SECCOMP_MODE_FILTER = 2


def enter(request: dict[str, Any], fds: list[int], target: Sandbox) -> Sandbox:
    """A second PID 1 in the same machine, in a pid namespace of its own that is a sibling of the first.

    Nothing of the sandbox is executed or looked up before the filter is in place and the capabilities are gone.
    """
    init_socket, filter_fd = fds
    stderr = os.memfd_create("stderr", os.MFD_CLOEXEC)
    told, tell = os.pipe()
    program = os.read(filter_fd, 1 << 16)
    monitor = fork(target.group)
    if monitor == 0:
        status = 127
        try:
            os.close(told)
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            spaces = target.users | CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP
            check(libc.setns(target.pidfd, spaces), "setns")
            become([0, 0])
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # forgotten when ids change
            mount(None, "/", None, MS_REC | MS_SHARED)  # a bucket that is mounted later is seen here too
            check(libc.unshare(CLONE_NEWPID | CLONE_NEWNS), "unshare")
            first = os.fork()
            if first == 0:
                confine(request, init_socket, stderr, program, target)
            os.write(tell, b"%d" % first)
            os.close(tell)
            status = os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) & 0xFF
        except OSError as error:
            os.write(stderr, str(error.strerror).encode())
        os._exit(status)
    os.close(tell)
    sandbox = Sandbox(request["key"], monitor, stderr, target.group, target.open_files)
    sandbox.entered = True
    pid = os.read(told, 32)
    os.close(told)
    if pid:
        sandbox.pid = int(pid)
        try:
            sandbox.pidfd = os.pidfd_open(sandbox.pid)
        except ProcessLookupError:
            pass
    return sandbox


def confine(request: dict[str, Any], init_socket: int, stderr: int, program: bytes, target: Sandbox) -> None:
    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]

    try:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.setsid()
        mount(None, "/", None, MS_REC | MS_SLAVE)
        mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
        os.chdir("/")
        cover(target.readable, target.hidden)
        if target.profile is not None:
            write("/proc/self/attr/apparmor/exec", f"exec {target.profile}")
        arrange([init_socket], stderr, target.open_files)
        for capability in range(64):
            if capability not in request["capabilities"] and libc.prctl(PR_CAPBSET_READ, capability, 0, 0, 0) == 1:
                check(libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0), "capabilities")
        check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
        wrapped = Program(len(program) // 8, program)
        check(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(wrapped), 0, 0), "seccomp")
        os.execve(request["argv"][0], request["argv"], {})
    except OSError as error:
        os.write(2, str(error.strerror).encode())
    os._exit(127)


def cover(readable: list[str], hidden: list[str]) -> None:
    """Of a fresh /proc, what the container's own has covered as well: where root inside is root outside, much of it
    could be written to without any capability."""
    for path in readable:
        if os.path.exists(path):
            mount(path, path, None, MS_BIND | MS_REC)
            mount(None, path, None, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC)
    null = open_null()
    for path in hidden:
        if os.path.isdir(path):
            mount("tmpfs", path, "tmpfs", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, "size=0")
        elif os.path.exists(path):
            mount(f"/proc/self/fd/{null}", path, None, MS_BIND)
    os.close(null)
