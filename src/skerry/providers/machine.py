"""A machine on this kernel, reached through sockets: what sandboxes of this machine and containers have in common."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from skerry.errors import FreezeFailedError, LimitTooLowError, ProviderError, SandboxLostError
from skerry.limits import shown_size
from skerry.models import Limits
from skerry.portal.clock import Clock
from skerry.portal.contract import Portal
from skerry.portal.socket import SocketPortal
from skerry.providers.contract import Measure
from skerry.providers.local.controls import Watch
from skerry.providers.local.launcher import Launcher
from skerry.runtime.faults import Met
from skerry.runtime.runtime import Runtime


class Chores:
    """What runs on while nobody waits for it, until whoever started it ends."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def own(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def finish(self) -> None:
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)


class KernelMachine:
    """Its portal, the lock on its files, and the portals into pid namespaces of their own that were opened into it."""

    runtime = Runtime
    portal: SocketPortal

    def __init__(self, launcher: Launcher, id: str, lock: int, died: Callable[[str], Awaitable[None]]) -> None:
        self.id = id
        self.key = f"{id}/{secrets.token_hex(4)}"
        """What the launcher knows it by."""
        self.clock = Clock()
        self.transparent = False
        self._launcher = launcher
        self._lock = lock
        self._died = died
        self._entered: set[SocketPortal] = set()
        # Held also while it is frozen: the launcher waits for what it starts, and would wait until it is thawed.
        self._entering = asyncio.Lock()
        self._frozen = False
        self._stopping = False
        self._watch: Watch | None = None
        self._last: Measure | None = None

    @property
    def portals(self) -> list[SocketPortal]:
        return [self.portal, *self._entered]

    @property
    def lock(self) -> int:
        """The descriptor of the lock on its files."""
        return self._lock

    def relock(self, lock: int) -> None:
        """Hold another lock instead of the one it has; -1 is none."""
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = lock

    # -- limits --------------------------------------------------------------------------------------------------------

    def met(self) -> Met:
        if self._last is not None:
            return self._last.met
        return Met() if self._watch is None else self._watch.met()

    def unwatch(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    # -- sleep ---------------------------------------------------------------------------------------------------------

    @property
    def frozen(self) -> bool:
        return self._frozen

    async def freeze(self) -> None:
        if self._frozen:
            return
        await self._entering.acquire()
        self._frozen = True
        try:
            await self._stand_still()
        except BaseException as error:
            await self.thaw()
            if isinstance(error, (OSError, ProviderError)):
                reason = error.message.rstrip(".") if isinstance(error, ProviderError) else error.strerror or error
                raise FreezeFailedError(
                    f"The sandbox could not be frozen: {reason}.",
                    hint="Put it to sleep with the stage `hibernate` instead.",
                ) from error
            raise

    async def thaw(self) -> None:
        if not self._frozen:
            return
        await self._go_on()
        self.clock.go_on()
        self.warm_up()

    def warm_up(self) -> None:
        """It is no longer frozen, or about to end."""
        if self._frozen:
            self._frozen = False
            self._entering.release()

    async def _stand_still(self) -> None:
        raise NotImplementedError

    async def _go_on(self) -> None:
        raise NotImplementedError

    # -- more ways in --------------------------------------------------------------------------------------------------

    async def isolate(self) -> Portal:
        async with self._entering:
            portal = await self._enter()
            self._entered.add(portal)
            return portal

    async def _enter(self) -> SocketPortal:
        raise NotImplementedError

    def leave(self, portal: SocketPortal) -> None:
        self._entered.discard(portal)

    async def mount(self, path: str, read_only: bool) -> int:
        return await self._launcher.attach(self.key, path, read_only)

    async def unmount(self, path: str) -> None:
        await self._launcher.detach(self.key, path)

    # -- the end -------------------------------------------------------------------------------------------------------

    async def _farewell(self, grace: float) -> None:
        """SIGTERM for all, and so many seconds to end."""
        # One that ends altogether meanwhile is no error: that is what is wanted.
        with contextlib.suppress(TimeoutError, SandboxLostError):
            async with asyncio.timeout(grace):
                await asyncio.gather(*(portal.end_processes() for portal in self.portals))


def too_low(limits: Limits) -> LimitTooLowError:
    return LimitTooLowError(
        f"The sandbox uses more memory now than {shown_size(limits.memory or 0)}.",
        hint="End some of its processes first, or stop it: the limit can then be set for its next start.",
    )
