"""Process trees as /proc shows them: finding and signalling everything that descends from a process.

Also runs inside sandboxes, under init.py, so it takes nothing but the standard library.
"""

from __future__ import annotations

import errno
import os
import time
from _signal import SIGCONT, SIGKILL, SIGSTOP, SIGTERM  # signal itself imports enum, which costs a sandbox milliseconds

TYPE_CHECKING = False  # importing typing costs more than everything else here
if TYPE_CHECKING:
    from collections.abc import Collection

DEAD = (b"Z", b"X")
LOOKS = 10
FAREWELL = 0.25
PATIENCE = 10.0
"""Seconds; a root that is spared may go on forking for ever."""


def process(pid: int, alive: bool = False) -> tuple[int, int, int]:
    """Parent, session and start of a process; raises ``ProcessLookupError`` for one that is gone (or not alive)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rsplit(b")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError, IndexError):
        fields = []
    if not fields or (alive and fields[0] in DEAD):
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
    return int(fields[1]), int(fields[3]), int(fields[19])


def alive() -> dict[int, tuple[int, int, int]]:
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rsplit(b")", 1)[1].split()
        except (OSError, IndexError):
            continue
        if fields[0] not in DEAD:
            found[int(name)] = int(fields[1]), int(fields[3]), int(fields[19])
    return found


class Family:
    """A process and all that descends from it. Remembers whom it has seen, so that those who were reparented when the
    root ended are still found. A process is its id *and* its start, since ids are used again."""

    def __init__(self, root: int, start: int) -> None:
        self.root = root
        self.start = start
        self._seen: dict[int, int] = {}

    def members(self, spare: Collection[int] = (), spare_root: bool = False) -> list[int]:
        processes = alive()
        self._seen = {
            pid: start for pid, start in self._seen.items() if pid in processes and processes[pid][2] == start
        }
        rooted = self.root in processes and processes[self.root][2] == self.start
        below: dict[int, list[int]] = {}
        for pid, (parent, _, _) in processes.items():
            below.setdefault(parent, []).append(pid)
        if rooted:
            frontier = below.get(self.root, [])
        else:
            session = [] if self.root in processes else [p for p, (_, sid, _) in processes.items() if sid == self.root]
            frontier = [*session, *self._seen]
        # A job that an earlier command left behind in this shell is not part of a later one, nor are its children.
        frontier = [pid for pid in frontier if pid not in spare]
        chosen: set[int] = set()
        while frontier:
            pid = frontier.pop()
            if pid not in chosen and pid != self.root:
                chosen.add(pid)
                frontier += below.get(pid, [])
        self._seen.update({pid: processes[pid][2] for pid in chosen})
        return [*chosen, self.root] if rooted and not spare_root else list(chosen)

    def signal(self, number: int, spare: Collection[int] = (), spare_root: bool = False) -> int:
        # The root first: a shell that sees its child end before it gets the signal itself would remark on it.
        return sum(send(pid, number) for pid in reversed(self.members(spare, spare_root)))

    def kill(self, spare: Collection[int] = (), spare_root: bool = False) -> int:
        """Everything is stopped before anything is killed: a parent that dies first lets its children slip away.

        The root goes last, because those whose parent ends become its children. A look that finds nobody proves little
        while a process forks and ends between two reads of it, so only many such looks in a row do.
        """
        ending = not spare_root and self._is_rooted()
        if ending:
            send(self.root, SIGSTOP)
        killed = set(self._kill(self.members(spare, spare_root=True)))
        found_none, deadline = 0, time.monotonic() + PATIENCE
        while found_none < LOOKS and time.monotonic() < deadline:
            fresh = [pid for pid in self._descendants(spare) if pid not in killed]
            found_none = 0 if fresh else found_none + 1
            killed.update(self._kill(fresh))
        if ending:
            killed.update(self._kill([self.root]))
        # A killed process is still there for a moment, and whoever asked would find it.
        deadline = time.monotonic() + FAREWELL
        while any(_lives(pid) for pid in killed) and time.monotonic() < deadline:
            time.sleep(0.0005)
        return len(killed)

    def _kill(self, pids: list[int]) -> list[int]:
        stopped = [pid for pid in pids if send(pid, SIGSTOP)]
        for pid in stopped:
            send(pid, SIGKILL)
        return stopped

    def _is_rooted(self) -> bool:
        try:
            return process(self.root, alive=True)[2] == self.start
        except ProcessLookupError:
            return False

    def _descendants(self, spare: Collection[int]) -> list[int]:
        """Those alive below the root, found from parent to child, which is much faster than reading all of /proc."""
        found: list[int] = []
        frontier = [self.root] if self._is_rooted() else []
        while frontier:
            parent = frontier.pop()
            for pid in children(parent):
                try:
                    process(pid, alive=True)
                except ProcessLookupError:
                    continue
                if parent != self.root or pid not in spare:
                    found.append(pid)
                    frontier.append(pid)
        return found


_stood_still: set[int] = set()


def halt() -> None:
    """Stop every process but this one. A signal to all is one step for the kernel: none forks its way past it."""
    _stood_still.clear()
    _stood_still.update(pid for pid in alive() if _stands_still(pid))
    _to_all(SIGSTOP)


def resume() -> None:
    """Let them go on, but for those that stood still before: a job somebody stopped stays so. Children come first,
    because a shell that is awake before its child takes the child for stopped."""
    own = os.getpid()
    for pid in sorted(alive(), reverse=True):
        if pid != own and pid not in _stood_still:
            send(pid, SIGCONT)


def end() -> None:
    """Ask every process but this one to end; those that stand still must go on to hear it."""
    _to_all(SIGTERM)
    _to_all(SIGCONT)


def _stands_still(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rsplit(b")", 1)[1].split()[0] == b"T"
    except (OSError, IndexError):
        return False


def _to_all(number: int) -> None:
    try:
        os.kill(-1, number)
    except (ProcessLookupError, PermissionError):
        return  # there is nobody, or nobody who could be reached


def _lives(pid: int) -> bool:
    try:
        process(pid, alive=True)
    except ProcessLookupError:
        return False
    return True


def children(pid: int) -> list[int]:
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                found += [int(child) for child in file.read().split()]
    except (FileNotFoundError, ProcessLookupError):
        return found
    return found


def send(pid: int, number: int) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
