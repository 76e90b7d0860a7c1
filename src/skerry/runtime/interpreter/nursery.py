"""Where Python contexts come from: one process inside that has everything imported and forks them.

A fork takes milliseconds and shares its memory with its parent, where a Python of its own would import for a tenth of
a second (with pandas and matplotlib, for most of one) and hold all of that once more.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import structlog

from skerry.errors import InvalidRequestError, LanguageUnavailableError, SandboxLostError
from skerry.portal.contract import Child, Portal, Tree
from skerry.portal.packets import PACKET, Nonsense, Packets, close_all
from skerry.runtime.capture import Pump
from skerry.runtime.commands import end_tree
from skerry.runtime.interpreter.executor import Executor, Pipes
from skerry.runtime.output import pipe

log = structlog.get_logger(__name__)

PRELOADED = ("numpy", "pandas", "matplotlib.pyplot")
INFLUENCES = (
    *("PYTHONHASHSEED", "PYTHONOPTIMIZE", "PYTHONWARNINGS", "PYTHONMALLOC", "PYTHONDEVMODE"),
    *("MPL", "MATPLOTLIB", "OMP_", "OPENBLAS_", "MKL_", "BLIS_", "NUMEXPR_", "NPY_", "PANDAS_"),
)
"""How variables begin that are read when Python starts or these are imported: a template has to have the same."""

Born = tuple[int, asyncio.Future[int]]
"""A fork: its pid, and its exit status when it comes."""


class Nursery:
    """A template process, started by ``open``. When it dies, the contexts it forked live on."""

    def __init__(self, portal: Portal) -> None:
        self._portal = portal
        self._child: Child | None = None
        self._tree: Tree | None = None
        self._influences: dict[str, str] = {}
        self._packets: Packets | None = None
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._forks: dict[int, asyncio.Future[Born]] = {}
        self._exits: dict[int, asyncio.Future[int]] = {}
        self._preloading: asyncio.Future[None] | None = None
        self._count = 0
        self._stderr = b""
        self._errors: Pump | None = None
        self._watching: asyncio.Task[None] | None = None
        self.preloaded: set[str] = set()

    @property
    def alive(self) -> bool:
        return self._packets is not None and self._ready.done() and not self._ready.cancelled()

    async def open(self, env: Mapping[str, str]) -> None:
        """Start the first of the candidates that has IPython. Raises ``OSError`` with what it said if none works."""
        candidates = self._portal.code["python"]
        self._influences = _influences(env)
        for last, argv in enumerate(candidates, 1):
            try:
                # The last of them is Skerry's own, and that may have been imported outside already.
                if last < len(candidates) or self._influences or not await self._sown():
                    await self._start(partial(self._spawn, argv, env))
                return
            except OSError:
                if last == len(candidates):
                    raise
        raise LanguageUnavailableError(
            "Python code cannot be run here: IPython is not installed beside Skerry.",
            hint="Install it where the server runs: pip install ipython numpy pandas matplotlib.",
        )

    async def _start(self, begin: Callable[[Sequence[int]], Awaitable[bool]]) -> bool:
        """Begin a template with a socket and a pipe for its errors; False if there is none of this kind."""
        self._ready = asyncio.get_running_loop().create_future()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        reader, writer = pipe("read", size=4096)
        begun = False
        try:
            begun = await begin([theirs.fileno(), writer])
        finally:
            theirs.close()
            os.close(writer)
            if not begun:
                ours.close()
                os.close(reader)
        if not begun:
            return False
        self._stderr = b""
        errors = self._errors = Pump(reader, self._complained)
        self._packets = Packets(ours, self._packet, self._lost)
        try:
            await asyncio.shield(self._ready)
        except asyncio.CancelledError:
            if not self._ready.cancelled():
                raise  # the caller was cancelled, not the template lost
            if self._child is not None:
                with contextlib.suppress(SandboxLostError):
                    await self._child.wait()
            errors.drain()
            errors.close()
            raise OSError(self._stderr.decode(errors="replace").strip()[-500:] or "it ended at once") from None
        # Whatever it says from now on, it must not wait for a reader.
        errors.settle()
        return True

    async def _sown(self) -> bool:
        try:
            return await self._start(self._portal.sow)
        except OSError as error:
            log.warning("a template could not be sown", reason=str(error))
            return False

    async def _spawn(self, argv: Sequence[str], env: Mapping[str, str], fds: Sequence[int]) -> bool:
        null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        try:
            child = await self._portal.spawn(argv, env=env, cwd="/", stdio=[null, null, fds[1], fds[0]])
        finally:
            os.close(null)
        self._tree = self._child = child
        self._watching = asyncio.get_running_loop().create_task(self._watch(child))
        return True

    def _complained(self, data: bytes) -> None:
        self._stderr = (self._stderr + data)[-4096:]

    async def fork(self, cwd: str, env: Mapping[str, str]) -> Executor:
        """A new executor, not yet ready. Raises ``OSError`` when the template cannot make one."""
        if self._packets is None:
            raise OSError("its template has ended")
        self._count += 1
        number = self._count
        apart = _influences(env) != self._influences
        order = json.dumps({"fork": number, "cwd": cwd, "env": dict(env), "apart": apart}).encode()
        if len(order) > PACKET:
            raise InvalidRequestError("The environment of a context may hold at most about 90 KB.")
        pipes = Pipes.open(interrupts=False)
        answer: asyncio.Future[Born] = asyncio.get_running_loop().create_future()
        self._forks[number] = answer
        try:
            if not await self._packets.send(order, pipes.theirs):
                raise OSError("its template has ended")
            pipes.close_theirs()
            pid, exited = await answer
        except BaseException:
            pipes.close()  # without which the fork, if it comes after all, ends by itself
            raise
        finally:
            self._forks.pop(number, None)
        return Executor(self._portal.tree(pid), pipes, asyncio.shield(exited))

    async def preload(self, modules: Sequence[str] = PRELOADED) -> None:
        """Import modules in the template, for the contexts that come after."""
        while self._preloading is not None:
            await asyncio.shield(self._preloading)
        missing = [module for module in modules if module not in self.preloaded]
        if self._packets is not None and missing:
            preloading = self._preloading = asyncio.get_running_loop().create_future()
            self.preloaded |= set(missing)  # one that cannot be imported is not tried again
            await self._packets.send(json.dumps({"preload": missing}).encode())
            await asyncio.shield(preloading)

    async def close(self) -> None:
        # Before its socket is closed: it would end by that, and what it started would no longer be found below it.
        if self._child is not None:
            await end_tree(self._child, signal.SIGKILL)
        elif self._tree is not None:
            with contextlib.suppress(SandboxLostError):
                await self._tree.kill(signal.SIGKILL)
        if self._packets is not None:
            self._packets.lose("it was closed")
        if self._errors is not None:
            self._errors.close()
        if self._watching is not None:
            await asyncio.gather(self._watching, return_exceptions=True)

    async def _watch(self, child: Child | None) -> None:
        """When the sandbox ends, nobody is left to say that a fork has."""
        try:
            if child is not None:
                await child.wait()
            else:
                await self._portal.stat("/")
        except SandboxLostError as lost:
            for exited in self._exits.values():
                exited.set_exception(lost)
                exited.exception()  # nobody has to be waiting for it
            self._exits.clear()

    # -- what the template says ----------------------------------------------------------------------------------------

    def _packet(self, data: bytes, fds: list[int]) -> None:
        close_all(fds)
        try:
            message = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise Nonsense("a message that is not JSON") from error
        if not isinstance(message, dict):
            raise Nonsense("a message that is not an object")
        if "ready" in message:
            if self._tree is None:
                pid = message["ready"]
                if type(pid) is not int or pid < 2:
                    raise Nonsense("a process that is none")
                self._tree = self._portal.tree(pid)
            if not self._ready.done():
                self._ready.set_result(None)
        elif "forked" in message:
            self._forked(message)
        elif "exited" in message:
            self._exited(message)
        elif "preloaded" in message:
            self._preload_ended()
        else:
            raise Nonsense("a message of no known kind")

    def _forked(self, message: dict[str, Any]) -> None:
        number, pid = message["forked"], message.get("pid")
        answer = self._forks.get(number) if type(number) is int else None
        if answer is None or answer.done():
            return
        if type(pid) is int and pid > 1:
            self._exits[pid] = asyncio.get_running_loop().create_future()
            answer.set_result((pid, self._exits[pid]))
        else:
            answer.set_exception(OSError(str(message.get("error", "it said nothing sensible"))[:500]))

    def _exited(self, message: dict[str, Any]) -> None:
        pid, status = message["exited"], message.get("status")
        if type(pid) is not int or type(status) is not int or not -128 <= status <= 255:
            raise Nonsense("an end that is none")
        exited = self._exits.pop(pid, None)
        if exited is not None:
            exited.set_result(status)

    def _lost(self, reason: str) -> None:
        self._packets = None
        if self._child is None and self._exits:
            self._watching = asyncio.get_running_loop().create_task(self._watch(None))
        if not self._ready.done():
            self._ready.cancel()
        for answer in self._forks.values():
            if not answer.done():
                answer.set_exception(OSError(f"its template ended: {reason}"))
        self._preload_ended()

    def _preload_ended(self) -> None:
        preloading, self._preloading = self._preloading, None
        if preloading is not None and not preloading.done():
            preloading.set_result(None)


def _influences(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(INFLUENCES)}
