"""Processes that are forked into sandboxes, from one that has loaded already what they need."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
from typing import Any

from skerry.providers.local.launch.kernel import (
    CLONE_NEWNS,
    MNT_DETACH,
    MS_BIND,
    MS_NODEV,
    MS_NOSUID,
    MS_RDONLY,
    MS_REC,
    MS_REMOUNT,
    PR_SET_PDEATHSIG,
    SYS_PIVOT_ROOT,
    check,
    libc,
    mount,
)
from skerry.providers.local.launch.process import arrange
from skerry.providers.local.launch.sandbox import Sandbox
from skerry.providers.local.launch.staging import STAGE


def seed(request: dict[str, Any], control: int) -> int:
    """A Python that forks itself into sandboxes: in a root that holds nothing but what it was given, read-only.

    All of it lies in a mount namespace of its own.
    """
    pid = os.fork()
    if pid:
        return pid
    try:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        check(libc.unshare(CLONE_NEWNS), "unshare")
        root = f"{STAGE}/seed"
        mount("seed", root, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=64m")
        for source, target in request["shown"]:
            place = f"{root}{target}"
            if not os.path.isdir(place):
                os.makedirs(place)
            mount(source, place, None, MS_BIND)
            mount(None, place, None, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV)
        for name in ("dev", "proc", "tmp", "root"):
            os.mkdir(f"{root}/{name}")
        mount("/proc", f"{root}/proc", None, MS_BIND | MS_REC)
        for name in ("null", "urandom"):
            os.close(os.open(f"{root}/dev/{name}", os.O_CREAT | os.O_WRONLY, 0o666))
            mount(f"/dev/{name}", f"{root}/dev/{name}", None, MS_BIND)
        os.chdir(root)
        check(libc.syscall(SYS_PIVOT_ROOT, b".", b"."), "pivot_root")
        check(libc.umount2(b".", MNT_DETACH), "umount")
        os.chdir("/")
        arrange([control], os.open("/dev/null", os.O_WRONLY), None)
        os.execve(request["argv"][0], request["argv"], {"HOME": "/root", "PATH": "/usr/bin:/bin"})
    finally:
        os._exit(127)


def sow(request: dict[str, Any], fds: list[int], target: Sandbox) -> None:
    """Tell a seed to fork itself into a sandbox, named by a descriptor that cannot come to mean another."""
    if target.pidfd is None:
        raise ProcessLookupError(errno.ESRCH, "it has ended")
    group = target.group
    order = {
        "capabilities": request["capabilities"],
        "unified": group is not None and group.unified is not None,
        "openFiles": target.open_files,
    }
    entrances = [] if group is None else group.entrances()
    try:
        with socket.socket(fileno=os.dup(fds[0])) as control:
            socket.send_fds(control, [json.dumps(order).encode()], [target.pidfd, *fds[1:], *entrances])
    finally:
        for fd in entrances:
            os.close(fd)
