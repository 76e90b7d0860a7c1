"""Process trees as /proc shows them: finding and signalling everything that descends from a process."""

from __future__ import annotations

import errno
import os
import signal


def process(pid: int) -> tuple[int, int, int]:
    """Parent, session and start of a process; raises ``ProcessLookupError`` for one that is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rsplit(b")", 1)[1].split()
    except (FileNotFoundError, IndexError):
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH)) from None
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
        if fields[0] not in (b"Z", b"X"):
            found[int(name)] = int(fields[1]), int(fields[3]), int(fields[19])
    return found


class Family:
    """A process and all that descends from it. Remembers whom it has seen, so that those who were reparented when the
    root ended are still found. A process is its id *and* its start, since ids are used again."""

    def __init__(self, root: int, start: int) -> None:
        self.root = root
        self.start = start
        self._seen: dict[int, int] = {}

    def members(self, since: int | None = None, spare_root: bool = False) -> list[int]:
        processes = alive()
        self._seen = {
            pid: start for pid, start in self._seen.items() if pid in processes and processes[pid][2] == start
        }
        rooted = self.root in processes and processes[self.root][2] == self.start
        children: dict[int, list[int]] = {}
        for pid, (parent, _, _) in processes.items():
            children.setdefault(parent, []).append(pid)
        if rooted:
            frontier = children.get(self.root, [])
        else:
            session = [] if self.root in processes else [p for p, (_, sid, _) in processes.items() if sid == self.root]
            frontier = [*session, *self._seen]
        # A job that an earlier command left behind in this shell is not part of a later one, nor are its children.
        frontier = [pid for pid in frontier if since is None or processes[pid][2] >= since]
        chosen: set[int] = set()
        while frontier:
            pid = frontier.pop()
            if pid not in chosen and pid != self.root:
                chosen.add(pid)
                frontier += children.get(pid, [])
        self._seen.update({pid: processes[pid][2] for pid in chosen})
        return [*chosen, self.root] if rooted and not spare_root else list(chosen)

    def signal(self, number: int, since: int | None = None, spare_root: bool = False) -> int:
        return sum(send(pid, number) for pid in self.members(since, spare_root))

    def kill(self, since: int | None = None, spare_root: bool = False) -> int:
        # Stop everything before killing anything: a parent that is killed first lets its children slip away, and one
        # that still runs may fork faster than /proc can be read.
        killed: set[int] = set()
        for _ in range(20):
            stopped: list[int] = []
            for _ in range(200):
                fresh = [pid for pid in self.members(since, spare_root) if pid not in stopped and pid not in killed]
                if not fresh:
                    break
                for pid in fresh:
                    send(pid, signal.SIGSTOP)
                stopped += fresh
            if not stopped:
                break
            for pid in sorted(stopped, key=lambda pid: pid == self.root):
                send(pid, signal.SIGKILL)
            killed.update(stopped)
        return len(killed)


def send(pid: int, number: int) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
