"""The floor under all of it: bubblewrap itself, with nothing around it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from skerry.providers.local.idmap import IdMap
from skerry.providers.local.launcher import bubblewrap as bubblewrap_path
from skerry.providers.local.trees import remove_tree

_LINKS = ("bin", "sbin", "lib", "lib64")


class Bubblewrap:
    """Runs commands over an overlay, each with a fresh upper layer, as a sandbox of ours has it."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._count = 0
        self._lower = place / "lower"
        self._lower.mkdir(parents=True)
        for name in ("usr", "proc", "dev", "tmp"):
            (self._lower / name).mkdir()
        self._directories = []
        for name in _LINKS:
            path = Path("/", name)
            if path.is_symlink():
                (self._lower / name).symlink_to(os.readlink(path))
            elif path.is_dir():
                (self._lower / name).mkdir()
                self._directories.append(str(path))

    def line(self, *command: str) -> Sequence[str]:
        self._count += 1
        layer = self._place / str(self._count)
        upper, work = layer / "upper", layer / "work"
        upper.mkdir(parents=True)
        work.mkdir()
        shown = [part for path in ("/usr", *self._directories) for part in ("--ro-bind", path, path)]
        root = ["--overlay-src", str(self._lower), "--overlay", str(upper), str(work), "/", *shown]
        confinement = ["--unshare-all", "--die-with-parent", "--new-session", "--clearenv"]
        system = ["--proc", "/proc", "--dev", "/dev"]
        return [str(bubblewrap_path()), *confinement, *root, *system, "--setenv", "PATH", "/usr/bin:/bin", *command]

    def run(self, *command: str) -> None:
        subprocess.run(self.line(*command), capture_output=True, check=True)

    def run_together(self, count: int, *command: str) -> None:
        started = [
            subprocess.Popen(self.line(*command), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            for _ in range(count)
        ]
        failed = [process.args for process in started if process.wait()]
        if failed:
            raise OSError(f"{len(failed)} of {count} failed")


@contextmanager
def bubblewrap(scratch: Path) -> Iterator[Bubblewrap]:
    place = scratch / "bubblewrap"
    try:
        yield Bubblewrap(place)
    finally:
        remove_tree(place, IdMap.detect())
