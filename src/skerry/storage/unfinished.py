"""What was begun and must be put right if its process ends: a file for each, locked for as long as it is worked on."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

YOUNG = 60.0
"""Seconds that a record may take to get its lock and its name."""


class Unfinished:
    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @contextmanager
    def begun(self, name: str, facts: dict[str, Any]) -> Iterator[None]:
        """Recorded until the block has ended without an error: whoever fails to clean up leaves the record behind."""
        fd = self._write(name, facts)
        try:
            yield
            self.settled(name)
        finally:
            os.close(fd)

    def leave(self, name: str, facts: dict[str, Any]) -> None:
        """Record what somebody else has to put right."""
        os.close(self._write(name, facts))

    def _write(self, name: str, facts: dict[str, Any]) -> int:
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary = self._directory / f".{name}"
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            os.write(fd, json.dumps(facts).encode())
            os.rename(temporary, self._directory / f"{name}.json")
        except BaseException:
            os.close(fd)
            raise
        return fd

    def left(self, prefix: str = "") -> list[tuple[str, dict[str, Any]]]:
        """Those nobody works on any more. Each stays until it is ``settled``."""
        try:
            names = sorted(os.listdir(self._directory))
        except FileNotFoundError:
            return []
        found = []
        for name in names:
            path = self._directory / name
            if name.startswith("."):
                self._forget_torn(path)
            elif name.startswith(prefix) and name.endswith(".json"):
                try:
                    with path.open("rb") as file:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        found.append((path.stem, json.load(file)))
                except (BlockingIOError, FileNotFoundError):
                    continue
        return found

    def settled(self, name: str) -> None:
        (self._directory / f"{name}.json").unlink(missing_ok=True)

    @staticmethod
    def _forget_torn(path: Path) -> None:
        """A record whose writer ended before it had its name: nothing had begun."""
        try:
            if time.time() - path.stat().st_mtime < YOUNG:
                return
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
        except (BlockingIOError, FileNotFoundError):
            return
