"""What the template does: forks contexts on order, and says when one has ended."""

from __future__ import annotations

import array
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import select
import signal
import site
import socket
import sys
import time
import types
from collections.abc import Iterable
from typing import Any

import skerry_executor
import skerry_programs
import skerry_streams
import skerry_warmth
from skerry_replies import encode
from skerry_shell import Shell

PACKET = 256 * 1024
PR_SET_CHILD_SUBREAPER = 36
HURRY = 30
"""Milliseconds without an order after which the first context is taken to be on its way."""
SETTINGS = ("matplotlibrc", "~/.config/matplotlib/matplotlibrc", "~/.matplotlib/matplotlibrc")
"""What matplotlib reads when it is imported, if it is there."""


class Nursery:
    def __init__(self) -> None:
        self._flusher = skerry_streams.install()
        skerry_programs.flusher = self._flusher
        self._libc = ctypes.CDLL(None)
        self._children: set[int] = set()
        self._shell = Shell.instance()
        self._warm = False
        self._own = set(sys.modules)
        self._preloaded: dict[str, str] = {}

    def warm(self) -> None:
        skerry_warmth.warm(self._shell)
        gc.collect()
        freeze()
        self._warm = True

    def serve(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        woken = wakeups()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._say({"ready": os.getpid(), "version": sys.version.split()[0]})
        waiting = select.poll()
        waiting.register(self._socket, select.POLLIN)
        waiting.register(woken, select.POLLIN)
        while True:
            ready = {fd for fd, _ in waiting.poll(None if self._warm else HURRY)}
            if not ready:
                # Only now: the first context, the one that the template was started for, does not wait for it.
                self.warm()
            if woken in ready:
                drain(woken)
            self._reap()
            if self._socket.fileno() in ready:
                self._take_order()

    def _say(self, message: dict[str, Any]) -> None:
        try:
            self._socket.send(encode(message))
        except OSError:
            os._exit(0)

    def _take_order(self) -> None:
        try:
            data, ancillary, _, _ = self._socket.recvmsg(PACKET, socket.CMSG_SPACE(4 * 8), socket.MSG_CMSG_CLOEXEC)
        except OSError:
            os._exit(0)
        if not data:
            os._exit(0)
        fds = array.array("i")
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
        order = json.loads(data)
        if "fork" in order:
            self._fork(order, list(fds))
        elif "preload" in order:
            self._say({"preloaded": self.preload(order["preload"])})
        for fd in fds:
            os.close(fd)

    def _fork(self, order: dict[str, Any], fds: list[int]) -> None:
        try:
            pid = os.fork()
        except OSError as error:
            self._say({"forked": order["fork"], "error": f"A new process could not be made: {error.strerror}."})
            return
        if pid == 0:
            try:
                self._become_context(order, fds)
            finally:
                os._exit(1)
        self._children.add(pid)
        self._say({"forked": order["fork"], "pid": pid})

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if pid in self._children:
                self._children.remove(pid)
                self._say({"exited": pid, "status": os.waitstatus_to_exitcode(status)})

    def preload(self, names: Iterable[str]) -> list[str]:
        """Import modules for all contexts that come after; returns those that could be."""
        loaded = []
        gc.disable()
        for name in names:
            try:
                importlib.import_module(name)
            except Exception:  # noqa: BLE001 - a library that fails to load is one that is not there
                continue
            loaded.append(name)
        gc.collect()
        freeze()
        self._preloaded = homes({name.partition(".")[0] for name in set(sys.modules) - self._own})
        return loaded

    # -- in the child

    def _become_context(self, order: dict[str, Any], fds: list[int]) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        freeze()
        self._libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        place(fds)
        self._socket.detach()
        os.environ.clear()
        os.environ.update(order["env"])
        time.tzset()
        try:
            os.chdir(order["cwd"])
        except OSError as error:
            message = f"The directory {order['cwd']} cannot be entered: {error.strerror}."
            body = encode({"type": "failed", "message": message})
            os.write(skerry_executor.REPLIES, len(body).to_bytes(4, "big") + body)
            os._exit(1)
        self._shell.moved()
        find_modules()
        if self._preloaded and (order.get("apart") or settings() or hidden(self._preloaded)):
            begin_anew()
        reseed()
        skerry_executor.start(self._shell, self._flusher)


def place(fds: list[int]) -> None:
    """Put /dev/null, stdout, stderr, requests and replies at 0 to 4, and close everything else."""
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 16) for fd in fds]
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    for target, fd in enumerate(high, start=1):
        os.dup2(fd, target, inheritable=target <= 2)
    try:
        others = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        others = list(range(5, 1024))
    for fd in others:
        if fd > 4:
            with contextlib.suppress(OSError):
                os.close(fd)


def find_modules() -> None:
    """Put on ``sys.path`` what PYTHONPATH names, and where pip installs for this user, even if it is not there yet."""
    entries = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[1:1] = [entry for entry in entries if entry not in sys.path]
    if site.ENABLE_USER_SITE:
        site.USER_BASE = site.USER_SITE = None
        mine = site.getusersitepackages()
        if mine not in sys.path:
            packages = (i for i, entry in enumerate(sys.path) if entry.endswith(("site-packages", "dist-packages")))
            sys.path.insert(next(packages, len(sys.path)), mine)


def settings() -> bool:
    """Whether there are settings that what is imported already would have read."""
    return any(os.path.exists(os.path.expanduser(path)) for path in SETTINGS)


def homes(names: Iterable[str]) -> dict[str, str]:
    """From which entry of ``sys.path`` each of these modules came."""
    found = {}
    for name in names:
        module = sys.modules.get(name)
        place = os.path.dirname(getattr(module, "__file__", None) or "")
        if place:
            found[name] = os.path.dirname(place) if hasattr(module, "__path__") else place
    return found


def hidden(preloaded: dict[str, str]) -> bool:
    """Whether something that is imported already would be found elsewhere by now: in a newer version, or the user's."""
    left = set(preloaded)
    for entry in sys.path:
        left -= {name for name in left if preloaded[name] == entry}
        if not left:
            break
        try:
            names = os.listdir(entry or ".")
        except OSError:
            continue
        if not left.isdisjoint(name.partition(".")[0] for name in names):
            return True
    return False


def begin_anew() -> None:
    """Be a Python of its own, that has imported nothing yet; it takes longer, and is right."""
    with open("/proc/self/cmdline", "rb") as file:
        line = file.read().split(b"\0")[:-1]
    for fd in (skerry_executor.REQUESTS, skerry_executor.REPLIES):
        os.set_inheritable(fd, True)
    script = next(index for index, word in enumerate(line) if word.endswith(b"template.py"))
    os.execvp(line[0], [*line[: script + 1], b"context"])


def alone() -> None:
    """What such a Python does."""
    for fd in (skerry_executor.REQUESTS, skerry_executor.REPLIES):
        os.set_inheritable(fd, False)
    flusher = skerry_streams.install()
    skerry_programs.flusher = flusher
    shell = Shell.instance()
    find_modules()
    freeze()
    skerry_executor.start(shell, flusher)


def reseed() -> None:
    """Contexts must not all draw the same numbers. (Python reseeds its own generator when it forks.)"""
    # numpy loads the module when it is first used, and seeds it then.
    random = sys.modules.get("numpy.random")
    if random is not None:
        random.seed()


def freeze() -> None:
    """Keep the collector off what all contexts share, so that their pages stay shared.

    It comes less often than by default: large libraries are imported a tenth faster.
    """
    gc.freeze()
    gc.set_threshold(20_000, 10, 20)
    gc.enable()


def wakeups() -> int:
    """A pipe that every signal writes to: the one way to wait for a packet and for a child at once."""
    woken, wake = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, nothing)
    return woken


def drain(woken: int) -> None:
    with contextlib.suppress(BlockingIOError):
        while os.read(woken, 4096):
            pass


def nothing(number: int, frame: types.FrameType | None) -> None:
    """A handler, so that the signal writes to the wakeup pipe."""


def serve() -> None:
    Nursery().serve(3)
