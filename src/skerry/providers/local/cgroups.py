"""Control groups: one for each running sandbox, so that all of it can be stopped where it is and go on later.

Version 2 is taken wherever a group can be made below the server's own, also beside version 1: freezing needs no
controller. Otherwise the freezer of version 1; otherwise there are none, and processes are stopped by signals. The
launcher makes a sandbox's group and starts it in there; limits of memory, processes and CPU time will be set on the
same groups.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Literal

FREEZE_SECONDS = 5.0
FAREWELL_SECONDS = 5.0

Version = Literal[1, 2]


@dataclass(frozen=True, slots=True)
class Group:
    """The group of one sandbox. It exists once the launcher has started the sandbox in it."""

    version: Version
    directory: Path

    def freeze(self) -> None:
        """Stop every process where it is. Blocks until all stand still; raises ``TimeoutError`` if they do not."""
        try:
            self._freeze_2() if self.version == 2 else self._freeze_1()
        except BaseException:
            with contextlib.suppress(OSError):
                self.thaw()
            raise

    def thaw(self) -> None:
        """Let them go on."""
        if self.version == 2:
            _write(self.directory / "cgroup.freeze", "0")
        else:
            _write(self.directory / "freezer.state", "THAWED")

    def _freeze_2(self) -> None:
        deadline = time.monotonic() + FREEZE_SECONDS
        events = os.open(self.directory / "cgroup.events", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _write(self.directory / "cgroup.freeze", "1")
            told = select.poll()
            told.register(events, select.POLLPRI)
            while b"frozen 1" not in os.pread(events, 4096, 0):
                if time.monotonic() > deadline:
                    raise _not_frozen()
                told.poll(100)
        finally:
            os.close(events)

    def _freeze_1(self) -> None:
        deadline, pause = time.monotonic() + FREEZE_SECONDS, 0.0005
        state = self.directory / "freezer.state"
        _write(state, "FROZEN")
        while state.read_text().strip() != "FROZEN":  # looking is what makes the kernel count again
            if time.monotonic() > deadline:
                raise _not_frozen()
            time.sleep(pause)
            pause = min(pause * 2, 0.02)

    def end(self) -> None:
        """Kill whatever is left in it and remove it."""
        deadline = time.monotonic() + FAREWELL_SECONDS
        while True:
            try:
                self.directory.rmdir()
                return
            except FileNotFoundError:
                return
            except OSError as error:
                if error.errno != errno.EBUSY or time.monotonic() > deadline:
                    raise
            with contextlib.suppress(FileNotFoundError):
                for pid in (self.directory / "cgroup.procs").read_text().split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
                self.thaw()  # in version 1 nothing that is frozen dies
            time.sleep(0.002)


@dataclass(frozen=True, slots=True)
class Cgroups:
    """Where the groups of one home's sandboxes are, below the group of the server itself."""

    version: Version
    directory: Path
    record: Path
    """A file in the home that says where servers have had their groups: the next one may run in another place."""

    @classmethod
    def detect(
        cls, home: Path, mounts: Path = Path("/proc/self/mountinfo"), own: Path = Path("/proc/self/cgroup")
    ) -> Cgroups | None:
        """Groups that this process may make, enter and freeze; None where it may not."""
        name = f"skerry-{sha256(os.fsencode(home.resolve())).hexdigest()[:12]}"
        for version, place in _places(mounts.read_text(), own.read_text()):
            found = cls(version, place / name, home / "cgroups")
            if found._works():
                return found
        return None

    def group(self, key: str) -> Group:
        return Group(self.version, self.directory / key.replace("/", ".").lstrip("."))

    def close(self) -> None:
        """Leave nothing, if no other process of this home is still at it."""
        with contextlib.suppress(OSError):
            self.directory.rmdir()

    def remember(self) -> None:
        """For the server that comes after this one."""
        if str(self.directory) not in _lines(self.record):
            with self.record.open("a") as file:
                file.write(f"{self.directory}\n")

    def _works(self) -> bool:
        probe = self.group(f"probe.{os.getpid()}")
        try:
            probe.directory.mkdir(parents=True)
            if self.version == 2:
                # Entering a group takes leave to write to the one that both are below.
                entered = os.access(self.directory.parent / "cgroup.procs", os.W_OK)
                kind = (probe.directory / "cgroup.type").read_text().strip()
                return entered and kind == "domain" and os.access(probe.directory / "cgroup.freeze", os.W_OK)
            return os.access(probe.directory / "freezer.state", os.W_OK)
        except OSError:
            return False
        finally:
            with contextlib.suppress(OSError):
                probe.directory.rmdir()
                self.directory.rmdir()


def sweep(home: Path) -> list[str]:
    """End what servers of this home that are gone have left in their groups. For one who is alone with the home."""
    removed = []
    record = home / "cgroups"
    for line in _lines(record):
        place = Path(line)
        if not place.name.startswith("skerry-") or not place.is_dir():
            continue
        version: Version = 2 if (place / "cgroup.freeze").exists() else 1
        for directory in [path for path in place.iterdir() if path.is_dir()]:
            Group(version, directory).end()
            removed.append(f"the control group {directory.name}")
    return removed


def _places(mounts: str, own: str) -> Iterator[tuple[Version, Path]]:
    """The group this process is in, in the hierarchies that can freeze, the better one first."""
    groups: dict[str, str] = {}
    for line in own.splitlines():
        _, controllers, path = line.split(":", 2)
        groups.update({name or "unified": path for name in controllers.split(",")})
    found: dict[Version, Path] = {}
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        root, point = before.split()[3:5]
        kind, _, options = after.split(" ", 2)
        if kind == "cgroup2" and "unified" in groups:
            found.setdefault(2, _below(point, root, groups["unified"]))
        elif kind == "cgroup" and "freezer" in options.split(",") and "freezer" in groups:
            found.setdefault(1, _below(point, root, groups["freezer"]))
    for version in (2, 1):
        if version in found:
            yield version, found[version]


def _below(point: str, root: str, path: str) -> Path:
    if root != "/" and (path + "/").startswith(root + "/"):
        path = path[len(root) :]
    return Path(point) / path.lstrip("/")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().split("\n")[:-1]
    except FileNotFoundError:
        return []


def _write(path: Path, text: str) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(file, text.encode())
    finally:
        os.close(file)


def _not_frozen() -> TimeoutError:
    return TimeoutError(f"its processes did not stand still within {FREEZE_SECONDS:g} seconds")
