"""A sandbox as the launcher knows it, and how it comes to be."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
from typing import Any

from skerry.providers.local.attach import attach, detach
from skerry.providers.local.launch.groups import Group, OthersGroup, fork
from skerry.providers.local.launch.kernel import CLONE_NEWUSER
from skerry.providers.local.launch.loopback import listen
from skerry.providers.local.launch.process import arrange, become
from skerry.providers.local.launch.staging import write_maps


class Sandbox:
    def __init__(self, key: str, monitor: int | None, stderr: int, group: Group | None, open_files: int | None) -> None:
        self.key = key
        self.group = group
        self.open_files = open_files
        self.entered = False  # a second PID 1 in a sandbox that has its own
        self.monitor = monitor  # our child: bubblewrap, or the process that entered; none of one that was adopted
        self.stderr = stderr
        self.pid: int | None = None  # host pid of the sandbox's PID 1
        self.pidfd: int | None = None
        self.mounts: dict[str, int] = {}  # what was attached inside, by path
        self.users = CLONE_NEWUSER  # 0 if its users are the host's
        self.readable: list[str] = []  # what is only to be read in a /proc of those who enter
        self.hidden: list[str] = []  # and what is not to be seen there
        self.profile: str | None = None  # of AppArmor, which they are held to
        self.attendant: tuple[int, int] | None = None  # who waits for what it is to become, and where to say it

    def tell(self, request: dict[str, Any]) -> None:
        """Have it outfitted, or named; the answer comes from there. ``stays``: there will be more to tell."""
        if self.attendant is None:
            raise ProcessLookupError(errno.ESRCH, "nobody waits in it")
        os.write(self.attendant[1], json.dumps(request).encode() + b"\n")
        if not request["stays"]:
            self.dismiss()

    def dismiss(self) -> None:
        """Nobody is to wait in it any more."""
        if self.attendant is not None:
            for fd in self.attendant:
                os.close(fd)
            self.attendant = None

    def attach(self, path: str, read_only: bool) -> int:
        """Mount a FUSE file system inside; the descriptor its server speaks to the kernel through."""
        if self.pidfd is None:
            raise ProcessLookupError(errno.ESRCH, "it has ended")
        device, self.mounts[path] = attach(self.pidfd, path, read_only, self.users)
        return device

    def detach(self, path: str) -> bool:
        mounted = self.mounts.pop(path, None)
        if mounted is None:
            return False
        try:
            if self.pidfd is not None:
                detach(self.pidfd, mounted, self.users)
        finally:
            os.close(mounted)
        return True

    def forget(self) -> None:
        if self.attendant is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.attendant[0], signal.SIGKILL)
            self.dismiss()
        for mounted in self.mounts.values():
            os.close(mounted)
        if self.pidfd is not None:
            os.close(self.pidfd)


def adopt(request: dict[str, Any], fds: list[int]) -> Sandbox:
    """A machine that others have started, named by a descriptor of its first process: to enter it and to mount in it.

    ``forget`` ends that; it ends by itself, or by them.
    """
    sandbox = Sandbox(request["key"], None, -1, OthersGroup(request["group"]), request["openFiles"])
    sandbox.pidfd = os.dup(fds[0])
    sandbox.users = CLONE_NEWUSER if request["users"] else 0
    sandbox.readable, sandbox.hidden, sandbox.profile = request["readable"], request["hidden"], request["profile"]
    return sandbox


def start(request: dict[str, Any], fds: list[int]) -> Sandbox:
    """bubblewrap, with the user namespace's maps written by us while it waits."""
    init_socket, filter_fd, *doorway = fds
    info, told = os.pipe()
    blocked, go = os.pipe()
    stderr = os.memfd_create("stderr", os.MFD_CLOEXEC)
    argv = [*request["bwrap"], "--info-fd", "5", "--userns-block-fd", "6", *request["argv"]]
    group = Group(request["group"]) if request["group"] else None
    monitor = fork(group)
    if monitor == 0:
        try:
            arrange([init_socket, filter_fd, told, blocked], stderr, request["openFiles"])
            become(request["runner"])
            os.execve(argv[0], argv, {})
        except OSError as error:
            os.write(2, f"{argv[0]}: {error.strerror}".encode())
        os._exit(127)
    os.close(told)
    os.close(blocked)
    sandbox = Sandbox(request["key"], monitor, stderr, group, request["openFiles"])
    try:
        text = b""
        while chunk := os.read(info, 4096):
            text += chunk
            if text.rstrip().endswith(b"}"):
                sandbox.pid = json.loads(text)["child-pid"]
                sandbox.pidfd = os.pidfd_open(sandbox.pid)
                write_maps(sandbox.pid, request["idmap"])
                for channel in doorway:
                    listen(sandbox.pidfd, request["ports"], request["redirect"], channel)
                os.write(go, b"1")
                break
    except OSError:
        os.kill(monitor, signal.SIGKILL)
        os.waitpid(monitor, 0)
        raise
    finally:
        os.close(info)
        os.close(go)
    return sandbox
