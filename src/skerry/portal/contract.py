"""The portal: the only way through the wall of a sandbox.

Four verbs (spawn, open, connect, listen) and the few path operations that have no descriptor. Paths are resolved by
the kernel *inside* the sandbox; only descriptors cross. Everything above (sessions, files, processes) is written
against this contract and runs unchanged on every implementation, and ``tests/portal/test_contract.py`` holds all of
them to it.

Errors of the file system are raised as plain ``OSError`` with the errno of the sandbox; a portal that is gone raises
``SandboxLostError``.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

from skerry.portal.clock import Clock

_INTERNALS = ("--expose-internals", "--no-force-async-hooks-checks")
_TRANSFORM = ("--experimental-transform-types", "--disable-warning=ExperimentalWarning")
NODE_FLAGS = {"javascript": _INTERNALS, "typescript": (*_INTERNALS, *_TRANSFORM)}
"""What executors need of Node: its own parser and module loader, for code that is no file; enums in imported files."""


class Stat(NamedTuple):
    """What ``lstat``/``stat`` said inside, with the owner as the sandbox sees it."""

    name: str
    mode: int
    size: int
    mtime_ns: int
    inode: int
    uid: int
    gid: int
    target: str | None = None


class Tree(Protocol):
    """A process inside and everything that descends from it, detached or not."""

    pid: int

    async def kill(
        self, signal: int, *, tree: bool = True, spare: Collection[int] = (), spare_root: bool = False
    ) -> int:
        """Signal the process and all that descends from it; how many were signalled.

        ``spare`` names direct children to leave alone, with all that descends from them; ``spare_root`` leaves the
        process itself alone. Together they end one command of a shell that lives on.
        """
        ...

    async def children(self) -> Sequence[int]:
        """The pids of its direct children now."""
        ...


class Child(Tree, Protocol):
    """A process that ``spawn`` started."""

    master: int | None
    """The terminal's master side when a pty was asked for. The caller owns and closes it."""

    async def wait(self) -> int:
        """Its exit status as Popen.returncode has it: negative for a signal. May be awaited many times.

        Raises ``SandboxLostError`` when the sandbox ended first.
        """
        ...


class Listener(Protocol):
    async def close(self) -> None: ...


class Portal(Protocol):
    python: Sequence[str]
    """The argv that runs Skerry's own Python inside, isolated (-I -S), with a script to follow."""

    tools: str
    """Where ``tools.py`` is, inside."""

    code: Mapping[str, Sequence[Sequence[str]]]
    """For each language the argv that start its executors inside, to be tried in this order."""

    clock: Clock
    """The machine's own time, for deadlines of what runs inside."""

    scratch: str
    """A directory inside for FIFOs and command files: in memory, gone with the sandbox, not part of its files."""

    async def spawn(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str,
        stdio: Sequence[int],
        pty: tuple[int, int] | None = None,
    ) -> Child:
        """Start a process inside; descriptor n of it is ``stdio[n]``, which stays the caller's to close.

        With ``pty=(columns, rows)`` the first three come from a new terminal and ``stdio`` holds the ones from 3 on.
        """
        ...

    def tree(self, pid: int) -> Tree:
        """The tree of a process that another one inside started. Raises nothing: it may have ended meanwhile."""
        ...

    async def open(self, path: str, flags: int, mode: int = 0o666) -> int:
        """Open a file inside and return the descriptor, close-on-exec. FIFOs never block."""
        ...

    async def connect(self, port: int, host: str = "localhost") -> socket.socket:
        """A connected, non-blocking socket to a port inside. ``localhost`` tries IPv4, then IPv6."""
        ...

    async def listen(self, port: int, accept: Callable[[socket.socket], Awaitable[None]]) -> Listener:
        """Call ``accept`` with every connection made to a loopback port inside. Port 0 is not allowed."""
        ...

    def datagrams(self, port: int) -> socket.socket | None:
        """A non-blocking UDP socket on a loopback port inside, for the caller to close, or None where there is none."""
        ...

    async def stat(self, path: str, *, follow: bool = True) -> Stat: ...

    async def list(self, path: str) -> list[Stat]:
        """The entries of a directory, unsorted, each as ``lstat`` sees it; never more than 200,000."""
        ...

    async def mkdir(self, path: str, mode: int = 0o777, *, parents: bool = False) -> None: ...

    async def unlink(self, path: str) -> None: ...

    async def rmdir(self, path: str) -> None: ...

    async def rename(self, old: str, new: str) -> None: ...

    async def chmod(self, path: str, mode: int) -> None: ...

    async def fifo(self, path: str) -> None:
        """Make a FIFO, in place of whatever had that name."""
        ...

    async def sow(self, fds: Sequence[int]) -> bool:
        """Have a Python template begin inside that was imported outside; its descriptors 3 and 2 are ``fds``.

        False where there is none to be had, now or ever: it is then to be spawned.
        """
        ...

    async def isolate(self) -> Portal:
        """A portal into the same machine whose processes and the others' cannot see or signal each other.

        Raises ``UnsupportedError`` where the host cannot; closing it ends its processes.
        """
        ...

    async def close(self) -> None:
        """End every process behind this portal and release it."""
        ...
