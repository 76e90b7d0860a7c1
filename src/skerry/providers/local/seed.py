"""The seed: one Python beside the launcher that has everything imported, and forks itself into sandboxes.

What it is and what it does is in ``runtime/interpreter/inside/python/skerry_seed.py``; this is the server's side of it.
Only a server that is root can have one: to go into a sandbox one must be more than the sandbox is.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence

import structlog

from skerry.errors import SandboxStartError
from skerry.portal.packets import Packets, close_all
from skerry.providers.local.launcher import Launcher

log = structlog.get_logger(__name__)

FONTS = ("/usr/share/fonts", "/usr/local/share/fonts")
"""matplotlib lists them when it is imported."""
LATER = 1.0
"""Seconds after its first use: a program that runs one piece of code and ends does not pay for the second."""


class Seed:
    def __init__(self, launcher: Launcher, argv: Sequence[str], shown: Sequence[tuple[str, str]]) -> None:
        self._launcher = launcher
        self._argv = argv
        self._shown = [*shown, *((place, place) for place in FONTS if os.path.isdir(place))]
        self._packets: Packets | None = None
        self._control = -1
        self._ready: asyncio.Future[bool] | None = None
        self._starting: asyncio.Task[None] | None = None

    async def sow(self, target: str, capabilities: Sequence[int], fds: Sequence[int]) -> bool:
        """Have a template begin in a sandbox, with these descriptors; False if there is no seed now."""
        if self._packets is None or self._ready is None or not self._ready.done():
            if self._starting is None:
                self._starting = asyncio.get_running_loop().create_task(self._later())
            return False
        try:
            await self._launcher.sow(target, [self._control, *fds], capabilities)
        except SandboxStartError:
            return False  # the seed has just ended, or the launcher has
        return True

    async def _later(self) -> None:
        await asyncio.sleep(LATER)
        await self.open()

    async def open(self) -> bool:
        """Start it, if that was not done yet; whether it could be."""
        if self._ready is None:
            self._ready = asyncio.get_running_loop().create_future()
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._control = ours.fileno()
            self._packets = Packets(ours, self._packet, self._lost)
            try:
                await self._launcher.seed(theirs.fileno(), self._shown, self._argv)
            except SandboxStartError as error:
                self._packets.lose(error.message)
            finally:
                theirs.close()
        return await asyncio.shield(self._ready)

    def _packet(self, data: bytes, fds: list[int]) -> None:
        close_all(fds)
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(True)

    def _lost(self, reason: str) -> None:
        self._packets = None
        assert self._ready is not None
        if self._ready.done():
            self._ready = self._starting = None  # it worked, and another is made for the next one who asks
        else:
            self._ready.set_result(False)
            log.info("there is no seed; Python is started in each sandbox", reason=reason)

    async def close(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        if self._packets is not None:
            self._packets.lose("it was closed")
