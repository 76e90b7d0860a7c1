"""Control groups of sandboxes, and how a process comes to be in them."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import struct
import sys
from typing import Any

from skerry.providers.local.launch.kernel import write
from skerry.providers.local.turns import take_short_turns

SYS_CLONE3, CLONE_INTO_CGROUP = 435, 0x200000000

# Without letting go of the interpreter: for a call that returns twice.
here = ctypes.PyDLL(None, use_errno=True)
here.syscall.restype = ctypes.c_long


class Group:
    """The control groups of a sandbox, made here and removed when the last of it has ended.

    ``unified`` is one of version 2, ``legacy`` are those of version 1; a host may have both. The server says what is to
    be written to which file, and which are to be read for the last time.
    """

    def __init__(self, request: dict[str, Any]) -> None:
        self.unified: str | None = request["unified"]
        self.legacy: list[str] = request["legacy"]
        self.freezer: list[str] = request["freezer"]
        self.figures: dict[str, str] = request["figures"]
        for directory in self.directories():
            self.make(directory, request["above"])
        for path, text in request["settings"]:
            try:
                write(path, text)
            except OSError as error:
                # Less than that is allowed to the group above, as in a container: that holds, then.
                if error.errno != errno.EINVAL or not path.endswith("/cpu.cfs_quota_us"):
                    raise

    def directories(self) -> list[str]:
        return [*([self.unified] if self.unified else []), *self.legacy]

    def make(self, directory: str, above: list[list[str]]) -> None:
        for attempt in range(5):
            try:
                return os.mkdir(directory)
            except FileExistsError:
                return
            except FileNotFoundError:
                if attempt == 4:  # others of this home make and remove the directory above it, too
                    raise
            home = os.path.dirname(directory)
            os.makedirs(home, exist_ok=True)
            for path, text in above:
                if os.path.dirname(path) == home:
                    try:
                        write(path, text)
                    except OSError as error:
                        print(f"{path}: {error.strerror}", file=sys.stderr)

    def fork(self) -> int:
        """A child that is in the groups before it does anything. To move one there from outside takes the kernel long,
        and to be cloned into one, or to move oneself alone, does not."""
        pid = -1
        if self.unified is not None:
            directory = os.open(self.unified, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            arguments = struct.pack("11Q", CLONE_INTO_CGROUP, 0, 0, 0, signal.SIGCHLD, 0, 0, 0, 0, 0, directory)
            pid = here.syscall(SYS_CLONE3, arguments, len(arguments))
            os.close(directory)
        cloned = pid >= 0
        if not cloned:  # also where a container's own filter keeps clone3 from us
            pid = os.fork()
        if pid == 0:
            try:
                if self.unified is not None and not cloned:
                    write(f"{self.unified}/cgroup.procs", "0")
                for directory_1 in self.legacy:
                    write(f"{directory_1}/tasks", "0")
            except OSError:
                os._exit(126)
        return pid

    def entrances(self) -> list[int]:
        """What a process needs to be in the groups: one to be cloned into, the others to write to."""
        found = []
        try:
            if self.unified is not None:
                found.append(os.open(self.unified, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            for directory in self.legacy:
                found.append(os.open(f"{directory}/tasks", os.O_WRONLY | os.O_CLOEXEC))
        except OSError:
            for fd in found:
                os.close(fd)
            raise
        return found

    def thaw(self) -> None:
        """What was killed while it was frozen can end now."""
        try:
            write(*self.freezer)
        except FileNotFoundError:
            pass

    def last_figures(self) -> dict[str, str]:
        found = {}
        for name, path in self.figures.items():
            try:
                with open(path) as file:
                    found[name] = file.read(16384)
            except OSError:
                pass
        return found

    def remove(self) -> bool:
        """Whether all are gone; an isolated session or a template that was sown may be in them still."""
        gone = True
        for directory in self.directories():
            try:
                os.rmdir(directory)
            except OSError as error:
                gone = gone and error.errno == errno.ENOENT
        return gone


class OthersGroup(Group):
    """Control groups that others made, and remove: of a container, which is entered here."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.unified = request["unified"]
        self.legacy = request["legacy"]

    def thaw(self) -> None:
        """Is up to them."""

    def remove(self) -> bool:
        return True


def fork(group: Group | None) -> int:
    pid = os.fork() if group is None else group.fork()
    if pid == 0:
        take_short_turns()
    return pid
