"""The launcher at work: one request after the other, and whatever ends in between."""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import socket
import sys
from typing import Any

from skerry.providers.local.launch.entering import enter
from skerry.providers.local.launch.groups import Group
from skerry.providers.local.launch.kernel import libc
from skerry.providers.local.launch.outfitting import attend, rename
from skerry.providers.local.launch.sandbox import Sandbox, adopt, start
from skerry.providers.local.launch.seeding import seed, sow
from skerry.providers.local.launch.staging import pool_path, stage
from skerry.providers.local.turns import take_short_turns

SYS_KEYCTL, KEYCTL_JOIN_SESSION_KEYRING = {"x86_64": 250}.get(os.uname().machine, 219), 1
FAREWELL_SECONDS = 10
AGAIN = 50
"""Milliseconds until a group that was not empty is looked at again."""


class Launcher:
    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.sandboxes: dict[str, Sandbox] = {}
        self.monitors: dict[int, Sandbox] = {}
        self.occupied: list[Group] = []

    def send(self, message: dict[str, Any], fds: list[int] | None = None) -> None:
        data = json.dumps(message).encode()
        socket.send_fds(self.sock, [data], fds) if fds else self.sock.send(data)

    def handle(self, request: dict[str, Any], fds: list[int]) -> Any:
        op = request["op"]
        if op == "stage":
            return stage(request["expose"], request["idmap"], pool_path(request["pool"], fds))
        if op == "start":
            return self.keep(start(request, fds))
        if op == "adopt":
            return self.keep(adopt(request, fds))
        if op == "forget":
            self.sandboxes.pop(request["key"]).forget()
            return None
        if op == "attend":
            attend(self.sandboxes[request["key"]], self.send)
            return None
        if op == "enter":
            return self.keep(enter(request, fds, self.sandboxes[request["target"]]))
        if op == "seed":
            return seed(request, fds[0])
        if op == "sow":
            return sow(request, fds, self.sandboxes[request["target"]])
        if op == "kill":
            return self.kill(request["key"])
        if op == "rename":
            rename(self.sandboxes[request["key"]], request["hostname"])
            return None
        if op == "detach":
            return self.sandboxes[request["key"]].detach(request["path"])
        raise OSError(errno.ENOSYS, op)

    def keep(self, sandbox: Sandbox) -> int | None:
        self.sandboxes[sandbox.key] = sandbox
        if sandbox.monitor is not None:
            self.monitors[sandbox.monitor] = sandbox
        return sandbox.pid

    def kill(self, key: str) -> bool:
        sandbox = self.sandboxes.get(key)
        if sandbox is None:
            return False
        # Killing PID 1 ends the whole namespace before its monitor sees it gone; then the monitor ends by itself.
        try:
            if sandbox.pidfd is None:
                raise ProcessLookupError
            signal.pidfd_send_signal(sandbox.pidfd, signal.SIGKILL)
        except ProcessLookupError:
            if sandbox.monitor is None:  # one that was adopted, and is gone
                return False
            os.kill(sandbox.monitor, signal.SIGKILL)
        if sandbox.group is not None:
            sandbox.group.thaw()
        return True

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            sandbox = self.monitors.pop(pid, None)
            if sandbox is None:
                continue
            self.sandboxes.pop(sandbox.key, None)
            text = os.pread(sandbox.stderr, 4096, max(0, os.fstat(sandbox.stderr).st_size - 4096))
            os.close(sandbox.stderr)
            sandbox.forget()
            figures = {}
            if sandbox.group is not None and not sandbox.entered:
                figures = sandbox.group.last_figures()
                if not sandbox.group.remove():
                    self.occupied.append(sandbox.group)
            code = os.waitstatus_to_exitcode(status)
            said = text.decode(errors="replace")
            self.send({"ended": sandbox.key, "status": code, "stderr": said, "figures": figures})

    def leave(self) -> None:
        """The server is gone: end every sandbox and remove its group, but wait for none that cannot end."""
        signal.alarm(FAREWELL_SECONDS)
        groups = {id(s.group): s.group for s in self.monitors.values() if s.group is not None}
        for key in [sandbox.key for sandbox in self.monitors.values()]:
            self.kill(key)
        try:
            while self.monitors:
                self.monitors.pop(os.wait()[0], None)
        except ChildProcessError:
            pass
        for group in groups.values():
            group.remove()
            for home in map(os.path.dirname, group.directories()):
                try:
                    if os.path.basename(home).startswith("skerry-"):
                        os.rmdir(home)
                except OSError:
                    pass  # another server uses it
        os._exit(0)

    def receive(self) -> None:
        data, fds, _, _ = socket.recv_fds(self.sock, 1 << 18, 8)
        if not data:
            self.leave()
        request = json.loads(data)
        made: list[int] = []
        try:
            if request["op"] in ("outfit", "christen"):
                return self.sandboxes[request["key"]].tell(request)
            if request["op"] == "attach":
                made = [self.sandboxes[request["key"]].attach(request["path"], request["readOnly"])]
                reply = {"i": request["i"], "r": None}
            else:
                reply = {"i": request["i"], "r": self.handle(request, fds)}
        except (OSError, KeyError) as error:
            reply = {"i": request["i"], "error": str(error)}
            if request["op"] == "attach":
                reply["errno"] = getattr(error, "errno", None)
        for fd in fds:
            os.close(fd)
        self.send(reply, made)
        for fd in made:
            os.close(fd)

    def run(self) -> None:
        wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is the server's to handle
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        poll.register(wake, select.POLLIN)
        while True:
            self.occupied = [group for group in self.occupied if not group.remove()]
            for fd, _ in poll.poll(AGAIN if self.occupied else None):
                if fd == wake:
                    try:
                        os.read(wake, 4096)
                    except BlockingIOError:
                        pass
                    self.reap()
                else:
                    self.receive()


def main(channel: int) -> None:
    """``channel`` is the descriptor of a socket to the server."""
    # What the server's user keeps in its keyring is not for sandboxes to inherit. Where the kernel has none, or a
    # container keeps the call from us, there is nothing to inherit either.
    libc.syscall(SYS_KEYCTL, KEYCTL_JOIN_SESSION_KEYRING, None)
    take_short_turns()
    try:
        Launcher(socket.socket(fileno=channel)).run()
    except (BrokenPipeError, ConnectionResetError):
        sys.exit(0)
