"""The way into a machine on this kernel: the launcher starts an init there, and a portal leads to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from skerry.portal.clock import Clock
from skerry.portal.contract import Portal
from skerry.portal.socket import SocketPortal
from skerry.providers.local import bubblewrap
from skerry.providers.local.doorway import Doorway
from skerry.providers.local.launcher import Ended, Launcher
from skerry.providers.local.toolbox import SCRATCH, Toolbox

TIMEOUT = 30.0
AnyPortal = TypeVar("AnyPortal", bound=SocketPortal)


class Entered(Protocol):
    """A machine that is entered."""

    clock: Clock

    @property
    def key(self) -> str:
        """What the launcher knows it by."""
        ...

    def leave(self, portal: SocketPortal) -> None:
        """One of the portals into it is closed."""
        ...


@contextlib.contextmanager
def filtering(program: bytes) -> Iterator[int]:
    """A descriptor to read the filter of system calls from."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    try:
        os.write(writer, program)
        os.close(writer)
        yield reader
    finally:
        os.close(reader)


@dataclass(frozen=True, slots=True)
class Entrance:
    launcher: Launcher
    toolbox: Toolbox
    filter: bytes

    async def begin(
        self,
        launch: Callable[..., Awaitable[int | None]],
        *keys: str,
        kind: type[AnyPortal],
        ended: Ended,
        on_lost: Callable[[str], None] | None = None,
        isolate: Callable[[], Awaitable[Portal]] | None = None,
        sow: Callable[[Sequence[int]], Awaitable[bool]] | None = None,
        on_close: Callable[[], Awaitable[None]] | None = None,
        code: Mapping[str, Sequence[Sequence[str]]] | None = None,
        clock: Clock | None = None,
        doorway: Doorway | None = None,
        **arguments: Any,
    ) -> AnyPortal:
        """Have the launcher start an init; the portal to it, which may not be ready yet."""
        more = [] if doorway is None else [doorway.channel]
        if doorway is not None:
            arguments |= {"ports": doorway.ports, "redirect": doorway.redirect}
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with filtering(self.filter) as filter:
                await launch(*keys, fds=[theirs.fileno(), filter, *more], ended=ended, **arguments)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return kind(
            ours,
            python=self.toolbox.python,
            tools=self.toolbox.tools,
            code=code or self.toolbox.code,
            scratch=SCRATCH,
            clock=clock,
            on_lost=on_lost,
            isolate=isolate,
            sow=sow,
            on_close=on_close,
        )

    async def enter(self, machine: Entered, kind: type[AnyPortal]) -> AnyPortal:
        """A portal into a pid namespace of its own in a machine that runs."""
        key = f"{machine.key}+{secrets.token_hex(4)}"
        gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def close() -> None:
            machine.leave(portal)
            if await self.launcher.kill(key):
                await gone

        portal = await self.begin(
            self.launcher.enter,
            key,
            machine.key,
            kind=kind,
            ended=lambda status, stderr, figures: gone.set_result(None),
            on_close=close,
            clock=machine.clock,
            argv=list(self.toolbox.init),
            capabilities=list(bubblewrap.CAPABILITIES.values()),
        )
        try:
            async with asyncio.timeout(TIMEOUT):
                await portal.ready()
        except BaseException:
            await portal.close()
            raise
        return portal
