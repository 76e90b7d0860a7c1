"""Which process runs which sandbox: a file for each, locked for as long as it does. It also says whether its workspace
was made: a start may fail, and an engine be away, at any time."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from skerry.errors import SandboxBusyError


class Locks:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def prepare(self) -> None:
        self._folder.mkdir(exist_ok=True)

    def acquire(self, id: str) -> int:
        """It is held for as long as the descriptor is open. Raises ``SandboxBusyError``."""
        while True:
            fd = os.open(self._folder / id, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                raise SandboxBusyError(
                    f"Sandbox {id!r} is run by another process with the same home.",
                    hint="Use it there, or stop it there.",
                ) from None
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), os.stat(self._folder / id)):
                    return fd
            os.close(fd)  # of a file that was deleted between the two

    @staticmethod
    def prepared(lock: int) -> bool:
        return os.pread(lock, 1, 0) == b"1"

    @staticmethod
    def set_prepared(lock: int, prepared: bool) -> None:
        os.pwrite(lock, b"1" if prepared else b"0", 0)

    def forget(self, id: str) -> None:
        (self._folder / id).unlink(missing_ok=True)
