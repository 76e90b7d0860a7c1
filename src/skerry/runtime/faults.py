"""Limits that were run into: which one, and by which command.

The kernel counts how often it killed for want of memory and refused to fork; what is counted between the beginning and
the end of a command is the command's. It does not count writes that found the disk full, so those are known by what the
program said of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from skerry.limits import Limit, shown_size
from skerry.models import Limits

TAIL = 4096
"""Bytes at the end of stderr in which programs have said why they failed."""
_QUOTA = re.compile(rb"disk quota exceeded|\bEDQUOT\b", re.IGNORECASE)
_FULL = re.compile(rb"no space left on device|\bENOSPC\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Met:
    """How often a machine has run into limits since it was started."""

    memory: int = 0
    """Processes that were killed for want of memory."""
    pids: int = 0
    """Processes that could not be started."""
    disk: int = 0
    """Writes that were refused because the sandbox has written what it may; where the host can count them."""


NOTHING = Met()


class Before(NamedTuple):
    """How things were when a command began."""

    met: Met
    alone: int | None
    """Its number, if no other ran then: it was alone all the time if none began after it."""


@dataclass(frozen=True, slots=True)
class Reached:
    """A limit that was run into, and what that did, in a sentence."""

    limit: Limit
    message: str


class Faults:
    def __init__(
        self,
        met: Callable[[], Met] | None = None,
        limits: Limits | None = None,
        full: Callable[[], bool] | None = None,
    ) -> None:
        """``met`` counts; ``full`` says whether the disk that all sandboxes share is."""
        self.limits = Limits() if limits is None else limits
        self.on_reached: Callable[[Reached, int], None] | None = None
        """Told of every limit that was run into, whether or not a command is known that did, and how often."""
        self._met = met
        self._full = full
        self._told = NOTHING
        self._running = self._begun = 0

    def count(self) -> Met:
        return NOTHING if self._met is None else self._met()

    def begin(self) -> Before:
        """To be called before a command, and each time followed by ``end``."""
        self._running += 1
        self._begun += 1
        return Before(self.count(), self._begun if self._running == 1 else None)

    def end(self, before: Before, failed: bool = False, said: bytes = b"") -> Reached | None:
        """The limit that a command ran into, from what was counted before it and the end of what it wrote to stderr.

        One that succeeded while others ran is not blamed for what they did.
        """
        self._running -= 1
        if failed:
            return self.blame(before.met, said)
        met = self.look()
        return self._counted(before.met, met) if before.alone == self._begun else None

    def blame(self, before: Met, said: bytes) -> Reached | None:
        """The same, of something that failed."""
        return self._counted(before, self.look()) or (self.of_disk(said) if said else None)

    def _counted(self, before: Met, met: Met) -> Reached | None:
        if met.memory > before.memory:
            return self.of_memory()
        if met.disk > before.disk:
            return self.of_quota()
        return self.of_pids() if met.pids > before.pids else None

    def look(self) -> Met:
        """Count, and tell what is new."""
        met = self.count()
        if met == self._told:
            return met
        before = self._told
        self._told = Met(max(met.memory, before.memory), max(met.pids, before.pids), max(met.disk, before.disk))
        if met.memory > before.memory:
            self._tell(self.of_memory(), met.memory - before.memory)
        if met.pids > before.pids:
            self._tell(self.of_pids(), met.pids - before.pids)
        if met.disk > before.disk:
            self._tell(self.of_quota(), met.disk - before.disk)
        return met

    def _tell(self, reached: Reached, count: int = 1) -> None:
        if self.on_reached is not None:
            self.on_reached(reached, count)

    def of_memory(self) -> Reached:
        most = self.limits.memory
        allowed = "all the memory there is" if most is None else f"the {shown_size(most)} of memory it may use"
        return Reached("memory", f"The sandbox needed more than {allowed}, so the kernel killed a process in it.")

    def of_pids(self) -> Reached:
        most = "as many processes" if self.limits.pids is None else f"the {self.limits.pids} processes"
        return Reached("pids", f"The sandbox has {most} and threads that it may have, so one could not be started.")

    def of_quota(self) -> Reached:
        most = "what" if self.limits.disk is None else f"the {shown_size(self.limits.disk)}"
        return Reached("disk", f"The sandbox has written {most} it may have on disk, so a write failed.")

    def of_disk(self, said: bytes) -> Reached | None:
        reached: Reached | None = None
        said = said[-TAIL:]
        if _QUOTA.search(said) and self.limits.disk is not None:
            reached = self.of_quota()
        elif _FULL.search(said):
            if self._full is not None and self._full():
                reached = Reached("disk", "The disk that holds all sandboxes' files is full, so a write failed.")
            else:
                reached = Reached("tmpfs", "A file system in memory, such as /dev/shm, is full, so a write failed.")
        if reached is not None:
            self._tell(reached)
        return reached
