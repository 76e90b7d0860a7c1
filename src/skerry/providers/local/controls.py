"""What is written to the files of control groups for a limit, and what is read from them, in both versions."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from skerry.models import Limits
from skerry.providers.contract import Measure
from skerry.providers.local.cgroups import Cgroups, Group, Version, Write, write
from skerry.runtime.faults import Met

PERIOD = 100_000
"""Microseconds over which processor time is counted."""
LEAST_QUOTA = 1000
NO_LIMIT = {1: "-1", 2: "max"}
WEIGHT = 100
"""Of all sandboxes together on each processor, which is what a service of the host has."""
KEPT_FOR_THE_HOST = 0.1
"""The share of the machine's memory that all sandboxes together leave alone."""


@dataclass(frozen=True, slots=True)
class Controls:
    """The files of one sandbox's groups."""

    group: Group

    def settings(self, limits: Limits) -> list[Write]:
        """For groups that were just made. A limit that was not given is none."""
        found: list[Write] = []
        for kind, (version, directory) in self.group.controllers.items():
            found += _SETTINGS[kind](version, directory, limits)
        return found

    def change(self, limits: Limits) -> None:
        """Of groups that exist. Raises ``OSError``: EBUSY when more memory is in use than it is to have."""
        controllers = dict(self.group.controllers)
        if "memory" in controllers:  # the only one that may be refused, so it comes first
            self._change_memory(*controllers.pop("memory"), limits)
        for kind, (version, directory) in controllers.items():
            for path, text in _SETTINGS[kind](version, directory, limits):
                try:
                    write(path, text)
                except OSError as error:
                    if error.errno != errno.EINVAL or kind != "cpu":  # more than the group above has: that holds, then
                        raise

    def _change_memory(self, version: Version, directory: Path, limits: Limits) -> None:
        if limits.memory is not None and (self.measure().memory or 0) > limits.memory:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        writes = _memory(version, directory, limits)
        # In version 1 memory may never be more than memory with swap, whichever way they move.
        with contextlib.suppress(OSError):
            write(*writes[0])
        for path, text in (*writes[1:], writes[0]):
            write(path, text)

    def figures(self) -> dict[str, str]:
        """The files that are to be read for the last time before the groups are removed."""
        return {f"{kind} {name}": str(path) for (kind, name), path in self._files().items()}

    def _files(self) -> dict[tuple[str, str], Path]:
        found: dict[tuple[str, str], Path] = {}
        for kind, (version, directory) in self.group.controllers.items():
            for name in _FIGURES[kind, version]:
                found[kind, name] = directory / name
        if self.group.version == 2:  # it counts processor time whatever its controllers
            found["cpu", "cpu.stat"] = self.group.directory / "cpu.stat"
        return found

    def measure(self) -> Measure:
        return figured({f"{kind} {name}": _read(path) for (kind, name), path in self._files().items()})


class Watch:
    """How often limits were met, from files that are kept open: this is asked with every command."""

    def __init__(self, group: Group) -> None:
        self._files: list[tuple[str, int]] = []
        self._texts: list[bytes] = []
        self._met = Met()
        try:
            for kind in ("memory", "pids"):
                version, directory = group.controllers.get(kind, (0, None))
                if directory is not None:
                    name = _EVENT_FILES[kind, version]
                    self._files.append((kind, os.open(directory / name, os.O_RDONLY | os.O_CLOEXEC)))
        except OSError:
            self.close()
            raise

    def met(self) -> Met:
        try:
            texts = [os.pread(fd, 256, 0) for _, fd in self._files]
        except OSError:  # the group is gone, and the launcher has told what was in it
            return self._met
        if texts != self._texts:
            self._texts = texts
            counts = zip((kind for kind, _ in self._files), texts, strict=True)
            self._met = Met(**{kind: _count(text, _EVENT_WORDS[kind]) for kind, text in counts})
        return self._met

    def close(self) -> None:
        while self._files:
            os.close(self._files.pop()[1])


def above(groups: Cgroups, memory: int | None) -> list[Write]:
    """What is set once, on the group that holds all sandboxes: the host and its server come first."""
    found = groups.handing()
    for kind, (version, directory) in groups.controllers.items():
        if kind == "cpu" and version == 2:
            found.append((directory / "cpu.weight", str(min(10_000, WEIGHT * len(os.sched_getaffinity(0))))))
        elif kind == "memory" and memory is not None:
            found.append((directory / ("memory.max" if version == 2 else "memory.limit_in_bytes"), str(memory)))
    return found


def figured(texts: Mapping[str, str]) -> Measure:
    """From the texts of ``figures``."""
    stat = texts.get("memory memory.stat", "")
    used = _number(texts.get("memory memory.current") or texts.get("memory memory.usage_in_bytes"))
    cached = _count(stat.encode(), b"\ntotal_inactive_file ") or _count(stat.encode(), b"\ninactive_file ")
    nanoseconds = _number(texts.get("cpu cpuacct.usage"))
    if texts.get("cpu cpu.stat"):
        nanoseconds = _count(texts["cpu cpu.stat"].encode(), b"usage_usec ") * 1000
    return Measure(
        cpu_seconds=None if nanoseconds is None else nanoseconds / 1e9,
        memory=None if used is None else max(0, used - cached),
        memory_peak=_number(texts.get("memory memory.peak") or texts.get("memory memory.max_usage_in_bytes")),
        processes=_number(texts.get("pids pids.current")),
        met=_met(texts),
    )


def _met(texts: Mapping[str, str]) -> Met:
    memory = texts.get("memory memory.events") or texts.get("memory memory.oom_control") or ""
    return Met(
        memory=_count(memory.encode(), b"oom_kill "),
        pids=_count(texts.get("pids pids.events", "").encode(), b"max "),
    )


def _count(text: bytes, word: bytes) -> int:
    """The number after a word; 0 where there is none."""
    start = text.find(word)
    if start < 0:
        return 0
    start += len(word)
    end = text.find(b"\n", start)
    digits = text[start : len(text) if end < 0 else end].strip()
    return int(digits) if digits.isdigit() else 0


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.strip().isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _memory(version: Version, directory: Path, limits: Limits) -> list[Write]:
    amount = NO_LIMIT[version] if limits.memory is None else str(limits.memory)
    if version == 2:
        return [(directory / "memory.max", amount), (directory / "memory.swap.max", "0")]
    swap = directory.parent / "memory.memsw.limit_in_bytes"
    if not swap.exists() and not (directory / swap.name).exists():  # the kernel does not count swap
        return [(directory / "memory.limit_in_bytes", amount), (directory / "memory.swappiness", "0")]
    return [(directory / "memory.limit_in_bytes", amount), (directory / swap.name, amount)]


def _pids(version: Version, directory: Path, limits: Limits) -> list[Write]:
    return [(directory / "pids.max", "max" if limits.pids is None else str(limits.pids))]


def _cpu(version: Version, directory: Path, limits: Limits) -> list[Write]:
    quota = None if limits.cpu is None else max(LEAST_QUOTA, round(limits.cpu * PERIOD))
    if version == 2:
        return [(directory / "cpu.max", f"{'max' if quota is None else quota} {PERIOD}")]
    return [(directory / "cpu.cfs_quota_us", "-1" if quota is None else str(quota))]


_SETTINGS = {"memory": _memory, "pids": _pids, "cpu": _cpu}
_FIGURES: Mapping[tuple[str, int], tuple[str, ...]] = {
    ("memory", 1): ("memory.usage_in_bytes", "memory.max_usage_in_bytes", "memory.stat", "memory.oom_control"),
    ("memory", 2): ("memory.current", "memory.peak", "memory.stat", "memory.events"),
    ("pids", 1): ("pids.current", "pids.events"),
    ("pids", 2): ("pids.current", "pids.events"),
    ("cpu", 1): ("cpuacct.usage",),  # where both are mounted as one
    ("cpu", 2): (),
}
_EVENT_FILES = {
    ("memory", 1): "memory.oom_control",
    ("memory", 2): "memory.events",
    ("pids", 1): "pids.events",
    ("pids", 2): "pids.events",
}
_EVENT_WORDS = {"memory": b"oom_kill ", "pids": b"max "}
