"""Machines that were started without files: how they are given some, and a name."""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

from skerry.providers.local.launch.kernel import (
    CLONE_NEWNS,
    CLONE_NEWUSER,
    CLONE_NEWUTS,
    MNT_DETACH,
    MS_BIND,
    MS_MOVE,
    MS_NODEV,
    MS_NOSUID,
    MS_RDONLY,
    MS_REMOUNT,
    PR_SET_PDEATHSIG,
    SYS_PIVOT_ROOT,
    check,
    libc,
    mount,
)
from skerry.providers.local.launch.process import become
from skerry.providers.local.launch.sandbox import Sandbox

LINGER = 0.1
"""Seconds before a process ends that is not needed any more: to end one is work, too, and others are being started."""


def rename(target: Sandbox, hostname: str) -> None:
    """Give a machine that was started in advance the name it turned out to have."""
    pid = os.fork()
    if pid == 0:
        try:
            check(libc.setns(target.pidfd, CLONE_NEWUSER | CLONE_NEWUTS), "setns")
            socket.sethostname(hostname)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def attend(target: Sandbox, answer: Callable[[dict[str, Any]], None]) -> None:
    """Have somebody wait in a machine that was started without files, to outfit it as soon as there are some, and to
    name it, which may be later.

    Most of what that takes, a process in those namespaces, is there when it is needed. It also gives the answers.
    """
    if target.pidfd is None:
        raise ProcessLookupError(errno.ESRCH, "it has ended")
    waiting, told = os.pipe()
    pid = os.fork()
    if pid:
        os.close(waiting)
        target.attendant = os.pidfd_open(pid), told
        return
    try:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        check(libc.setns(target.pidfd, CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWUTS), "setns")
        become([0, 0])
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # forgotten when ids change
        os.umask(0o022)
        for line in os.fdopen(waiting, "rb"):
            request = json.loads(line)
            try:
                if request["op"] == "outfit":
                    outfit(request)
                socket.sethostname(request["hostname"])
                if select.select([target.pidfd], [], [], 0)[0]:
                    raise ProcessLookupError(errno.ESRCH, "it has ended")
                answer({"i": request["i"], "r": None})
            except OSError as error:
                answer({"i": request["i"], "error": str(error)})
            if not request["stays"]:
                time.sleep(LINGER)
                break
    finally:
        os._exit(0)


def outfit(request: dict[str, Any]) -> None:
    """Give a machine that was started without files a root to live on; what it has already is moved there.

    Nothing of the sandbox runs yet, so that nothing changes while it is looked at. The root it had goes, and with it
    all that it was shown so that this could be done.
    """
    root = request["root"]
    for lower, upper, work, place in request["overlays"]:
        layers = f"lowerdir={lower},upperdir={upper},workdir={work},userxattr"
        mount("overlay", spot(root, place), "overlay", 0, layers)
    for place in request["moved"]:
        mount(place, spot(root, place), None, MS_MOVE)
    for source, place in request["shown"]:
        mount(source, spot(root, place), None, MS_BIND)
        mount(None, spot(root, place), None, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV)
    os.chdir(root)
    check(libc.syscall(SYS_PIVOT_ROOT, b".", b"."), "pivot_root")
    check(libc.umount2(b".", MNT_DETACH), "umount")


def spot(root: str, place: str) -> str:
    """A directory below a root that is not ours yet: a link there would lead elsewhere."""
    path = root
    for name in filter(None, place.split("/")):
        path = f"{path}/{name}"
        if os.path.islink(path):
            raise OSError(errno.ELOOP, f"{place} is a link")
        if not os.path.isdir(path):
            os.mkdir(path, 0o755)
    return path
