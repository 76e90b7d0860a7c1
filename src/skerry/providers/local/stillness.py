"""Holding a sandbox's processes still for a moment, so that its files are all of one point in time.

For sandboxes that have no control group, which would be frozen. By tracing them, not by SIGSTOP: a parent learns that
its child was stopped, and shells and `script` act on it. Nobody learns of a trace. It needs no more privilege than
starting the sandbox did, and ends with the thread that holds it, whatever happens to it.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Sequence

_SEIZE, _INTERRUPT, _DETACH = 0x4206, 0x4207, 17
_WALL = 0x40000000
_PASSES = 100
_PATIENCE = 0.2
"""Seconds to wait for a thread that is deep in the kernel. While it stays there it writes nothing new."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


def while_still(roots: Sequence[int], work: Callable[[], None]) -> None:
    """Do ``work`` while nothing below ``roots`` (pids of init processes, which are left running) executes.

    A process that is being traced already, by a debugger inside, runs on.
    """
    failure: list[BaseException] = []

    def run() -> None:
        held = _Held()
        try:
            held.hold(roots)
            work()
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
            failure.append(error)
        finally:
            held.release()

    thread = threading.Thread(target=run, name="skerry-still")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]


class _Held:
    """The threads that are traced, by the one thread that may say so."""

    def __init__(self) -> None:
        self._seized: set[int] = set()
        self._signals: dict[int, int] = {}
        """Those that have stopped, and the signal each was about to get."""

    def hold(self, roots: Sequence[int]) -> None:
        for _ in range(_PASSES):
            # One that was not stopped yet may have made another meanwhile, so this goes on until nobody is new.
            fresh = [task for task in _tasks_below(roots) if task not in self._seized and self._seize(task)]
            if not fresh:
                return
            self._await(fresh)

    def release(self) -> None:
        for task, number in self._signals.items():
            _trace(_DETACH, task, number)
        # Those that never stopped are let go by the kernel when this thread ends.

    def _seize(self, task: int) -> bool:
        if _trace(_SEIZE, task) != 0:
            return False
        self._seized.add(task)
        _trace(_INTERRUPT, task)
        return True

    def _await(self, tasks: list[int]) -> None:
        until = time.monotonic() + _PATIENCE
        waiting = list(tasks)
        while waiting:
            waiting = [task for task in waiting if not self._stopped(task)]
            if waiting:
                if time.monotonic() > until:
                    return
                time.sleep(0.0001)

    def _stopped(self, task: int) -> bool:
        try:
            found, status = os.waitpid(task, os.WNOHANG | _WALL)
        except ChildProcessError:
            return True
        if found == 0:
            return False
        if os.WIFSTOPPED(status):
            # Above the signal is the event, if it is one: then no signal was about to be delivered.
            self._signals[task] = 0 if status >> 16 else os.WSTOPSIG(status)
        return True


def _trace(request: int, task: int, data: int = 0) -> int:
    return int(_libc.ptrace(request, task, None, data))


def _tasks_below(roots: Sequence[int]) -> list[int]:
    """The threads of everything below that could run."""
    found: list[int] = []
    frontier = list(roots)
    while frontier:
        below: list[int] = []
        for pid in frontier:
            for task in _tasks(pid):
                try:
                    with open(f"/proc/{pid}/task/{task}/children", "rb") as children:
                        below += [int(word) for word in children.read().split()]
                except OSError:
                    continue
        found += [task for pid in below for task in _tasks(pid) if _state(pid, task) not in "TtZX"]
        frontier = below
    return found


def _tasks(pid: int) -> list[int]:
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def _state(pid: int, task: int) -> str:
    try:
        with open(f"/proc/{pid}/task/{task}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2][:1].decode()
    except OSError:
        return "X"
