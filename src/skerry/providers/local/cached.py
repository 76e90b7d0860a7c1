"""Directories that are put together once in the user's cache, for all homes, and removed when nobody uses them."""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path

UNUSED = 24 * 3600.0


class Cached:
    """A directory, and a lock that says it is in use for as long as this object is."""

    def __init__(self, directory: Path, lock: int) -> None:
        self.directory = directory
        self._lock = lock

    def close(self) -> None:
        os.close(self._lock)


def cached(cache: Path, kind: str, signature: str, fill: Callable[[Path], None]) -> Cached:
    """The directory of this kind made of what ``signature`` names; if there is none yet, ``fill`` gets an empty one."""
    directory = cache / f"{kind}-{hashlib.sha256(signature.encode()).hexdigest()[:16]}"
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = os.open(f"{directory}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)
        os.utime(lock)
        if not directory.exists():
            _make(directory, fill)
            _sweep(cache, kind, directory)
    except BaseException:
        os.close(lock)
        raise
    return Cached(directory, lock)


def _make(directory: Path, fill: Callable[[Path], None]) -> None:
    temporary = directory.with_name(f"{directory.name}.{secrets.token_hex(4)}.new")
    temporary.mkdir(mode=0o755)
    try:
        temporary.chmod(0o755)
        fill(temporary)
        temporary.rename(directory)
    except OSError:
        if not directory.exists():  # else another process was quicker
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _sweep(cache: Path, kind: str, current: Path) -> None:
    """Remove what earlier installations left and nobody has used for a day, and what was never finished."""
    for unfinished in cache.glob(f"{kind}-*.new"):
        if time.time() - unfinished.stat().st_mtime > UNUSED:
            shutil.rmtree(unfinished, ignore_errors=True)
    for lock in cache.glob(f"{kind}-*.lock"):
        directory = lock.with_suffix("")
        if directory == current or time.time() - lock.stat().st_mtime < UNUSED:
            continue
        fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)
            lock.unlink()
        except BlockingIOError:
            continue
        finally:
            os.close(fd)
