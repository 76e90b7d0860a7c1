"""Which process works on a task. It holds a lock on a file of its name for as long as it lives, and the kernel lets go
of it when the process dies in any way: so whoever comes after knows at once what is nobody's.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from skerry.agents.ids import nanoid


class Runner:
    """This process, among those of a home."""

    def __init__(self, home: Path) -> None:
        self._directory = home / "runners"
        self._lock = -1
        self.name = ""

    def open(self, node: str) -> None:
        self.name = f"{node}-{nanoid(8)}"
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(self._directory / self.name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def close(self) -> None:
        if self._lock >= 0:
            (self._directory / self.name).unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = -1

    def lives(self, other: str | None) -> bool:
        """Whether that is another process, and at work."""
        if other is None or other == self.name:
            return False
        path = self._directory / other
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        else:
            path.unlink(missing_ok=True)
            return False
        finally:
            os.close(fd)
