"""A running sandbox of this machine: a process tree that the launcher started, in a control group of its own."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from skerry.errors import (
    SandboxLostError,
    SandboxStartError,
    SkerryError,
)
from skerry.models import Limits
from skerry.portal.socket import SocketPortal
from skerry.providers.contract import Measure
from skerry.providers.local.controls import Controls, Watch, figured
from skerry.providers.local.disk import Hold
from skerry.providers.local.stillness import while_still
from skerry.providers.machine import KernelMachine, too_low
from skerry.runtime.faults import Met

if TYPE_CHECKING:
    from skerry.providers.local.provider import LocalProvider

START_TIMEOUT = 30.0


class LocalMachine(KernelMachine):
    def __init__(
        self,
        provider: LocalProvider,
        id: str,
        lock: int,
        limits: Limits,
        died: Callable[[str], Awaitable[None]],
    ) -> None:
        super().__init__(provider.launcher, id, lock, died)
        self._provider = provider
        self.started_with = limits
        self.disk = 0
        """Bytes it may write, once it is held to that."""
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def ended(self, status: int, stderr: str, figures: Mapping[str, str]) -> None:
        """Called when nothing of the sandbox runs any more."""
        self._last = figured(figures)
        starved = " for want of memory" if self._last.met.memory else ""
        if not self._ended.done():
            self._ended.set_result(
                stderr or (f"it was killed{starved}" if starved else f"it ended with status {status}")
            )
        if not self._stopping:
            self._provider.chores.own(self._mourn(stderr or f"its init was killed{starved}"))

    def become(self, id: str, lock: int, died: Callable[[str], Awaitable[None]]) -> None:
        """One that was nobody's is that sandbox from now on."""
        self.id, self._died = id, died
        self.relock(lock)

    async def _mourn(self, reason: str) -> None:
        await self._release()
        await self._died(reason)
        group = self._provider.group(self.key)
        if group is not None and group.directory.exists():  # the launcher is gone as well, which would remove it
            await asyncio.to_thread(group.end)

    def lost(self, reason: str) -> None:
        """The portal broke: whatever is left behind it is ended, and ``ended`` will be called."""
        if not self._ended.done():
            self._provider.chores.own(self._provider.launcher.kill(self.key))

    # -- limits --------------------------------------------------------------------------------------------------------

    def met(self) -> Met:
        return replace(super().met(), disk=self._provider.refused(self))

    def measure(self) -> Measure:
        if self._last is not None:
            return self._last
        group = self._provider.group(self.key)
        found = Measure() if group is None else Controls(group).measure()
        return replace(found, disk=self._provider.written(self))

    async def limit(self, limits: Limits) -> None:
        group = self._provider.group(self.key)
        try:
            if group is not None:
                Controls(group).change(limits)
            await self._provider.limit_disk(self, limits)
        except FileNotFoundError:
            return  # it has just ended
        except OSError as error:
            if error.errno not in (errno.EBUSY, errno.EINVAL):
                raise
            raise too_low(limits) from error

    # -- sleep ---------------------------------------------------------------------------------------------------------

    async def _stand_still(self) -> None:
        group = self._provider.group(self.key)
        if group is None:
            await asyncio.gather(*(portal.stop_processes() for portal in self.portals))
        for portal in self.portals:
            portal.hold()
        self.clock.stop()
        if group is not None:
            await asyncio.to_thread(group.freeze)

    async def _go_on(self) -> None:
        group = self._provider.group(self.key)
        if group is not None:
            with contextlib.suppress(FileNotFoundError):  # it has just died
                group.thaw()
        for portal in self.portals:
            portal.release()
        if group is None:
            with contextlib.suppress(SandboxLostError):
                await asyncio.gather(*(portal.continue_processes() for portal in self.portals))

    @contextlib.asynccontextmanager
    async def stillness(self) -> AsyncIterator[Hold | None]:
        """How to do something while it stands still for a moment; None if it does already."""
        if self._frozen:
            yield None
            return
        roots, group = self._provider.launcher.roots(self.key), self._provider.group(self.key)

        def hold(work: Callable[[], None]) -> None:
            if group is None:
                return while_still(roots, work)
            try:
                group.freeze()
            except OSError:  # something in it cannot be stopped just now
                return while_still(roots, work)
            try:
                work()
            finally:
                group.thaw()

        async with self._entering:
            yield hold

    # -- the beginning and the end -------------------------------------------------------------------------------------

    async def stop(self, grace: float = 0.0) -> None:
        self._stopping = True
        if grace:
            await self._farewell(grace)
        await self._release()

    async def _release(self) -> None:
        self.warm_up()
        for portal in list(self._entered):
            await portal.close()
        self._entered.clear()
        await self.portal.close()
        if not self._ended.done() and await self._provider.launcher.kill(self.key):
            await self._ended
        self._provider.ended(self)
        self.unwatch()
        self.relock(-1)

    async def started(self) -> None:
        """Wait until init answers; raise with what bubblewrap said if it never does."""
        group = self._provider.group(self.key)
        if group is not None:
            with contextlib.suppress(FileNotFoundError):  # it has ended already
                self._watch = Watch(group)
        ready = asyncio.ensure_future(self.portal.ready())
        try:
            async with asyncio.timeout(START_TIMEOUT):
                waits: set[asyncio.Future[Any]] = {ready, self._ended}
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            await ready
        except (TimeoutError, SkerryError) as error:
            self._stopping = True
            await self._release()
            reason = self._ended.result() if self._ended.done() else "it did not answer in time"
            raise SandboxStartError(
                f"The sandbox could not be started: {reason}.", hint="`skerry doctor` checks this machine."
            ) from error
        finally:
            ready.cancel()

    async def _enter(self) -> SocketPortal:
        portal = await self._provider.entrance.enter(self, SocketPortal)
        await self._provider.entered(self)
        return portal

    async def sow(self, fds: Sequence[int]) -> bool:
        sown = await self._provider.sow(self, fds)
        if sown:
            await self._provider.entered(self, soon=True)
        return sown
