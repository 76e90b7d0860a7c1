"""Looking at the files of sandboxes from outside, wherever a home keeps them; and file systems made for a test."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from skerry.providers.local import loops
from skerry.providers.local.pool import Pool


@contextmanager
def opened(home: Path) -> Iterator[Path]:
    """The directory that has ``sandboxes``, ``snapshots`` and ``trash``; a server may be running on it."""
    pool = Pool(home, None)
    if not pool.file.exists():
        yield home
        return
    with tempfile.TemporaryDirectory() as place:
        with pool.locked():
            device = pool.attach()
            subprocess.run(["mount", "-o", "nodiscard,noatime", loops.path_of(device), place], check=True)
            os.close(device)
        try:
            yield Path(place)
        finally:
            subprocess.run(["umount", place], check=True)


def names(home: Path, place: str) -> list[str]:
    with opened(home) as disk:
        return sorted(os.listdir(disk / place))


@contextmanager
def file_system(kind: str, megabytes: int, *, owner: int = 0) -> Iterator[Path]:
    """A small disk with ext4, btrfs or xfs on it, mounted."""
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        image, target = Path(place, "image"), Path(place, "mounted")
        target.mkdir()
        with image.open("wb") as file:
            file.truncate(megabytes << 20)
        quiet = {"ext4": ["-q", "-F"], "btrfs": ["-q"]}[kind]
        subprocess.run([f"mkfs.{kind}", *quiet, str(image)], check=True, stdout=subprocess.DEVNULL)
        subprocess.run(["mount", "-o", "loop", str(image), str(target)], check=True)
        try:
            os.chown(target, owner, owner)
            yield target
        finally:
            subprocess.run(["umount", str(target)], check=True)


def devices_of(home: Path, seconds: float = 20) -> list[str]:
    """The loop devices over files below ``home`` that are still there after a while."""
    until = time.monotonic() + seconds
    while (found := _devices(home)) and time.monotonic() < until:
        time.sleep(0.05)
    return found


def _devices(home: Path) -> list[str]:
    found = []
    for device in Path("/sys/block").glob("loop*"):
        try:
            if str(home) in (device / "loop" / "backing_file").read_text():
                found.append(device.name)
        except OSError:
            continue
    return found
