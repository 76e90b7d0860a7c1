"""A program that a bridge runs: its pid, its streams, its end."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import os
import re
import signal as signals
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from skerry.errors import ProviderError, SandboxLostError, SkerryError
from skerry.providers.cloudflare import inside
from skerry.runtime.output import read_some, write_all

if TYPE_CHECKING:
    from skerry.providers.cloudflare.portal import BridgePortal

ARGUMENT = 32 << 10
"""Bytes that go along as an argument; more are uploaded. A bridge makes one string of all arguments, and a quoted one
may be twice as long."""
FED_AT_ONCE = 4 << 20
# A bridge may run programs by a shell of its own, which tells of those that were killed, with all of their text.
_OBITUARY = re.compile(
    rb"(?:\A|(?<=\n))(?:[^\n]*sh: line \d+: +\d+ (?:Killed|Terminated|Hangup|Interrupt|Quit)\b.*"
    rb"|(?:Killed|Terminated|Hangup|Quit)\n)\Z",
    re.DOTALL,
)


class BridgeTree:
    def __init__(self, portal: BridgePortal, pid: int) -> None:
        self.pid = pid
        self._portal = portal

    async def kill(
        self, signal: int, *, tree: bool = True, spare: Collection[int] = (), spare_root: bool = False
    ) -> int:
        if not tree and spare_root:
            return 0
        return await self._portal.signal(
            signal, "one" if not tree else "below" if spare_root else "tree", self.pid, spare
        )

    async def children(self) -> Sequence[int]:
        _, out, _ = await self._portal.run("sh", "-c", inside.CHILDREN, "sh", str(self.pid))
        return [int(word) for word in out.split() if word.isdigit()]


class BridgeChild(BridgeTree):
    """A program that the bridge runs, on a connection that lasts as long as it does."""

    master: int | None = None

    def __init__(
        self,
        portal: BridgePortal,
        argv: Sequence[str],
        mark: str,
        stdio: Sequence[int],
        *,
        fifo: str | None,
        encoded: bool,
    ) -> None:
        super().__init__(portal, 0)
        self._decoder = Lines() if encoded else None
        self._mark = mark.encode()
        self._fifo = fifo
        self._parent = 0
        loop = asyncio.get_running_loop()
        self._began: asyncio.Future[None] = loop.create_future()
        self._ended: asyncio.Future[int] = loop.create_future()
        self._killed: set[int] = set()
        self._outputs = {"stdout": os.dup(stdio[1]), "stderr": os.dup(stdio[2])}
        self._input = os.dup(stdio[0]) if fifo is not None else -1
        for fd in (*self._outputs.values(), *([self._input] if fifo is not None else [])):
            os.set_blocking(fd, False)
        self._feeding: asyncio.Task[None] | None = None
        self.task = loop.create_task(self._run(argv))

    async def started(self) -> None:
        await asyncio.shield(self._began)

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    async def kill(
        self, signal: int, *, tree: bool = True, spare: Collection[int] = (), spare_root: bool = False
    ) -> int:
        if self._ended.done() or not self.pid:
            return 0
        if not spare_root:
            self._killed.add(int(signal))
        return await super().kill(signal, tree=tree, spare=spare, spare_root=spare_root)

    async def end(self) -> None:
        with contextlib.suppress(SkerryError):
            await self.kill(signals.SIGKILL)
        await self.abandon()

    async def abandon(self) -> None:
        """Whoever wanted it is gone, or it never began."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def _run(self, argv: Sequence[str]) -> None:
        lost: SkerryError = SandboxLostError("The sandbox is no longer running: it was stopped.")
        try:
            code = await self._follow(argv)
            if not self._began.done():
                raise ProviderError("The bridge ran a program, but not as it was told.")
            sent = code - 128
            self._ended.set_result(-sent if sent in self._killed else code)
        except SkerryError as error:
            # Whoever waits for a program knows one way only in which it is lost.
            lost = error if isinstance(error, SandboxLostError) else SandboxLostError(error.message, hint=error.hint)
            if not self._began.done():
                self._began.set_exception(error)
        except OSError as error:
            if not self._began.done():
                self._began.set_exception(error)
        finally:
            if not self._began.done():
                self._began.set_exception(lost)
            if not self._ended.done():
                self._ended.set_exception(lost)
            for future in (self._began, self._ended):
                future.exception()  # nobody has to be waiting for it
            if self._feeding is not None:
                self._feeding.cancel()
                await asyncio.gather(self._feeding, return_exceptions=True)
            for fd in self._outputs.values():
                os.close(fd)
            if self._input >= 0:
                os.close(self._input)
            self._portal.forget(self)

    async def _follow(self, argv: Sequence[str]) -> int:
        first = bytearray()
        async with contextlib.aclosing(self._portal.bridge.execute(self._portal.id, argv)) as events:
            async for said in events:
                if said.kind == "exit":
                    return said.code
                data = said.data
                if said.kind == "stderr" and not self._began.done():
                    first += data
                    line, end, rest = bytes(first).partition(b"\n")
                    if not end:
                        continue
                    self._begin(line)
                    data = rest
                elif said.kind == "stdout" and self._decoder is not None:
                    data = self._decoder.add(data)
                elif said.kind == "stderr" and self._killed:
                    data = _OBITUARY.sub(b"", data)
                await self._pass_on(said.kind, data)
        raise AssertionError("a bridge's answer ends with an exit, or raises")

    def _begin(self, line: bytes) -> None:
        match line.split():
            case [self._mark, b"P", pid, parent] if pid.isdigit() and parent.isdigit():
                self.pid, self._parent = int(pid), int(parent)
                if self._fifo is not None:
                    self._feeding = asyncio.get_running_loop().create_task(self._feed(self._fifo))
                self._began.set_result(None)
            case [self._mark, b"E", number, where] if number.isdigit():
                raise OSError(int(number), os.strerror(int(number)), where.decode(errors="replace"))
            case [self._mark, b"L"]:
                lost = self._portal.mourn()
                self._began.set_exception(lost)
                raise lost
            case _:
                said = line.decode(errors="replace")[:200]
                raise ProviderError(
                    f"A sandbox of the bridge cannot start programs: {said}", hint="It needs sh and find."
                )

    async def _pass_on(self, stream: str, data: bytes) -> None:
        try:
            await write_all(self._outputs[stream], data)
        except BrokenPipeError:
            return  # nobody reads it any more; the program may go on

    async def _feed(self, fifo: str) -> None:
        """What is written to its stdin here goes to a FIFO there, and its end is told to who holds that open."""
        portal = self._portal
        while data := await self._take():
            if len(data) <= ARGUMENT // 2:
                await portal.run("sh", "-c", inside.FEED, "sh", fifo, base64.b64encode(data).decode())
            else:
                await portal.run("sh", "-c", inside.FEED_FILE, "sh", fifo, await portal.upload(data))
        await portal.signal(signals.SIGUSR1, "one", self._parent)

    async def _take(self) -> bytes:
        data = await read_some(self._input, 1 << 20)
        with contextlib.suppress(BlockingIOError):
            while data and len(data) < FED_AT_ONCE and (more := os.read(self._input, 1 << 20)):
                data += more
        return data


class Lines:
    """Lines of base64, in whatever pieces they come, as the bytes they stand for."""

    def __init__(self) -> None:
        self._rest = b""

    def add(self, data: bytes) -> bytes:
        *lines, self._rest = (self._rest + data).split(b"\n")
        try:
            return b"".join([base64.b64decode(line, validate=True) for line in lines])
        except binascii.Error:
            raise ProviderError("What a program of ours said in a bridge's sandbox arrived garbled.") from None
