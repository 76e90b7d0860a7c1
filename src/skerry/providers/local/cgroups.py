"""Control groups: one for each running sandbox, so that it can be stopped where it is, held to limits and measured.

A host has them in one of three ways, and ``Cgroups`` is whichever it finds:

- version 2 alone: one hierarchy for everything, in which controllers must be handed down level by level;
- version 1: a hierarchy for each controller;
- both (hybrid): the controllers in version 1, and version 2 beside them, which needs none to freeze.

The launcher makes a sandbox's groups and starts it in them, so that nothing of it ever runs outside.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Literal

FREEZE_SECONDS = 5.0
FAREWELL_SECONDS = 5.0

Version = Literal[1, 2]
Write = tuple[Path, str]
"""A file of a group, and what to write to it."""

CONTROLLERS = ("memory", "pids", "cpu")
HANDED_DOWN = "cgroup.subtree_control"
SERVER = "skerry-server"
"""Where a server that is alone in a group moves to, because in version 2 only groups without processes hand down."""


@dataclass(frozen=True, slots=True)
class Group:
    """The groups of one sandbox. They exist once the launcher has started the sandbox in them."""

    version: Version
    directory: Path
    """The one it is frozen by."""
    controllers: Mapping[str, tuple[Version, Path]] = field(default_factory=dict)

    @property
    def directories(self) -> list[Path]:
        return list(dict.fromkeys([self.directory, *(path for _, path in self.controllers.values())]))

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
            write(self.directory / "cgroup.freeze", "0")
        else:
            write(self.directory / "freezer.state", "THAWED")

    def _freeze_2(self) -> None:
        deadline = time.monotonic() + FREEZE_SECONDS
        events = os.open(self.directory / "cgroup.events", os.O_RDONLY | os.O_CLOEXEC)
        try:
            write(self.directory / "cgroup.freeze", "1")
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
        write(state, "FROZEN")
        while state.read_text().strip() != "FROZEN":  # looking is what makes the kernel count again
            if time.monotonic() > deadline:
                raise _not_frozen()
            time.sleep(pause)
            pause = min(pause * 2, 0.02)

    def processes(self) -> list[int]:
        """The ids of all that are in it, as this process knows them."""
        try:
            return [int(pid) for pid in (self.directory / "cgroup.procs").read_text().split()]
        except OSError:
            return []

    def end(self) -> None:
        """Kill whatever is left in it and remove it."""
        for directory in self.directories:
            self._end(directory)

    def _end(self, directory: Path) -> None:
        deadline = time.monotonic() + FAREWELL_SECONDS
        while True:
            try:
                directory.rmdir()
                return
            except FileNotFoundError:
                return
            except OSError as error:
                if error.errno != errno.EBUSY or time.monotonic() > deadline:
                    raise
            with contextlib.suppress(FileNotFoundError):
                for pid in (directory / "cgroup.procs").read_text().split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
                self.thaw()  # in version 1 nothing that is frozen dies
            time.sleep(0.002)


@dataclass(frozen=True, slots=True)
class Cgroups:
    """Where the groups of one home's sandboxes are: all below one group of the home's, in each hierarchy."""

    version: Version
    directory: Path
    record: Path
    """A file in the home that says where servers have had their groups: the next one may run in another place."""
    controllers: Mapping[str, tuple[Version, Path]] = field(default_factory=dict)
    """The home's group in the hierarchy of each controller that can be used."""

    @classmethod
    def detect(
        cls, home: Path, mounts: Path = Path("/proc/self/mountinfo"), own: Path = Path("/proc/self/cgroup")
    ) -> Cgroups | None:
        """Groups that this process may make, enter and freeze; None where it may not."""
        name = f"skerry-{sha256(os.fsencode(home.resolve())).hexdigest()[:12]}"
        places = _Places.read(mounts.read_text(), own.read_text())
        controllers = {kind: (1, place / name) for kind, place in places.legacy.items() if kind in CONTROLLERS}
        for version, place in places.freezers():
            handed = places.handing_down() if version == 2 and not controllers else None
            if handed is not None:
                everything = {kind: (2, handed[0] / name) for kind in handed[1]}
                found = cls(2, handed[0] / name, home / "cgroups", everything)  # type: ignore[arg-type]
                if found._works():
                    return found
            held = {kind: there for kind, there in controllers.items() if _usable(there[1], kind)}
            found = cls(version, place / name, home / "cgroups", held)  # type: ignore[arg-type]
            if found._works():
                return found
        return None

    def group(self, key: str) -> Group:
        name = key.replace("/", ".").lstrip(".")
        below: dict[str, tuple[Version, Path]] = {}
        for kind, (version, path) in self.controllers.items():
            # A busy sandbox below the same group as a quiet one would use up the turns that both have against the rest
            # of the machine. In version 1 nothing speaks against having them side by side.
            flat = kind == "cpu" and version == 1
            below[kind] = version, path.with_name(f"{path.name}.{name}") if flat else path / name
        return Group(self.version, self.directory / name, below)

    @property
    def directories(self) -> list[Path]:
        return list(dict.fromkeys([self.directory, *(path for _, path in self.controllers.values())]))

    def handing(self) -> list[Write]:
        """What makes the home's own group pass its controllers on to those below it."""
        kinds = [kind for kind, (version, _) in self.controllers.items() if version == 2]
        return [(self.directory / HANDED_DOWN, " ".join(f"+{kind}" for kind in kinds))] if kinds else []

    def close(self) -> None:
        """Leave nothing, if no other process of this home is still at it."""
        for directory in self.directories:
            with contextlib.suppress(OSError):
                directory.rmdir()

    def remember(self) -> None:
        """For the server that comes after this one."""
        known = _lines(self.record)
        fresh = [str(path) for path in self.directories if str(path) not in known]
        if fresh:
            with self.record.open("a") as file:
                file.write("".join(f"{line}\n" for line in fresh))

    def _works(self) -> bool:
        probe = self.group(f"probe.{os.getpid()}")
        try:
            probe.directory.mkdir(parents=True)
            for path, text in self.handing():
                write(path, text)
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
    removed: dict[str, None] = {}
    for line in _lines(home / "cgroups"):
        place = Path(line)
        if not place.name.startswith("skerry-"):
            continue
        version: Version = 2 if (place / "cgroup.freeze").exists() else 1
        inside = [path for path in place.iterdir() if path.is_dir()] if place.is_dir() else []
        for directory in [*inside, *place.parent.glob(f"{place.name}.*")]:
            Group(version, directory).end()
            removed[f"the control group {directory.name.removeprefix(f'{place.name}.')}"] = None
    return list(removed)


@dataclass(frozen=True, slots=True)
class _Places:
    """The groups a process is in."""

    unified: Path | None
    legacy: Mapping[str, Path]
    top: Path | None = None
    """Where version 2 is mounted: what is above cannot be seen."""

    @classmethod
    def read(cls, mounts: str, own: str) -> _Places:
        groups: dict[str, str] = {}
        for line in own.splitlines():
            _, controllers, path = line.split(":", 2)
            groups.update({name or "unified": path for name in controllers.split(",")})
        unified = top = None
        legacy: dict[str, Path] = {}
        for line in mounts.splitlines():
            before, _, after = line.partition(" - ")
            root, point = before.split()[3:5]
            kind, _, options = after.split(" ", 2)
            if kind == "cgroup2" and "unified" in groups and unified is None:
                unified, top = _below(point, root, groups["unified"]), Path(point)
            elif kind == "cgroup":
                for name in options.split(","):
                    if name in groups:
                        legacy.setdefault(name, _below(point, root, groups[name]))
        return cls(unified, legacy, top)

    def freezers(self) -> Iterator[tuple[Version, Path]]:
        """The hierarchies that can freeze, the better one first."""
        if self.unified is not None:
            yield 2, self.unified
        if "freezer" in self.legacy:
            yield 1, self.legacy["freezer"]

    def handing_down(self) -> tuple[Path, list[str]] | None:
        """The nearest group of version 2, upwards from our own, below which we may use controllers; and which ones."""
        place = self.unified
        if place is not None and place.name == SERVER:  # moved there before
            place = place.parent
        while place is not None:
            kinds = hand_down(place)
            if kinds:
                return place, kinds
            place = place.parent if self.top is not None and place != self.top and place.parent != place else None
        return None


def places_of(own: Path, mounts: Path = Path("/proc/self/mountinfo")) -> _Places:
    """Of a process, by its ``/proc/PID/cgroup``."""
    return _Places.read(mounts.read_text(), own.read_text())


def hand_down(place: Path, pid: int | None = None) -> list[str]:
    """Have a group of version 2 pass controllers on, if it is ours to do so; those that it passes on then."""
    try:
        there = [kind for kind in CONTROLLERS if kind in (place / "cgroup.controllers").read_text().split()]
    except OSError:
        return []
    if not there or not os.access(place / "cgroup.procs", os.W_OK):
        return []
    found = _handed(place, there)
    if found != there:
        found = _hand(place, there) or found
    if not found and _step_aside(place, pid or os.getpid()):
        found = _hand(place, there)
    return found


def _hand(place: Path, kinds: list[str]) -> list[str]:
    for kind in kinds:
        with contextlib.suppress(OSError):
            write(place / HANDED_DOWN, f"+{kind}")
    return _handed(place, kinds)


def _handed(place: Path, kinds: list[str]) -> list[str]:
    try:
        handed = (place / HANDED_DOWN).read_text().split()
    except OSError:
        return []
    return [kind for kind in kinds if kind in handed]


def _step_aside(place: Path, pid: int) -> bool:
    """Move into a group below, if nobody else is in this one, as in a scope or service that was delegated to us."""
    try:
        if (place / "cgroup.procs").read_text().split() != [str(pid)]:
            return False
        (place / SERVER).mkdir(exist_ok=True)
        write(place / SERVER / "cgroup.procs", str(pid))
    except OSError:
        return False
    return True


def _usable(directory: Path, kind: str) -> bool:
    """Whether groups of version 1 can be made there and set."""
    probe = directory / f"probe.{os.getpid()}"
    try:
        probe.mkdir(parents=True)
        file = {"memory": "memory.limit_in_bytes", "pids": "pids.max", "cpu": "cpu.cfs_quota_us"}[kind]
        return os.access(probe / file, os.W_OK) and os.access(probe / "tasks", os.W_OK)
    except OSError:
        return False
    finally:
        with contextlib.suppress(OSError):
            probe.rmdir()
            directory.rmdir()


def _below(point: str, root: str, path: str) -> Path:
    if root != "/" and (path + "/").startswith(root + "/"):
        path = path[len(root) :]
    return Path(point) / path.lstrip("/")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().split("\n")[:-1]
    except FileNotFoundError:
        return []


def write(path: Path, text: str) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(file, text.encode())
    finally:
        os.close(file)


def write_all(writes: Iterable[Write]) -> None:
    for path, text in writes:
        write(path, text)


def _not_frozen() -> TimeoutError:
    return TimeoutError(f"its processes did not stand still within {FREEZE_SECONDS:g} seconds")
