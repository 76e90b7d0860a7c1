"""A container that runs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from skerry.errors import (
    FreezeFailedError,
    LimitTooLowError,
    ProviderError,
    SandboxLostError,
    UnsupportedError,
)
from skerry.limits import shown_size
from skerry.models import Limits
from skerry.portal.clock import Clock
from skerry.portal.socket import SocketChild, SocketPortal
from skerry.providers.contract import Measure
from skerry.providers.docker.containers import resources
from skerry.providers.local.cgroups import CONTROLLERS, Group, places_of
from skerry.providers.local.controls import Controls, Watch
from skerry.runtime.faults import Met
from skerry.runtime.runtime import Runtime

if TYPE_CHECKING:
    from skerry.providers.docker.provider import DockerProvider

log = structlog.get_logger(__name__)

PATIENCE = 10.0
"""Seconds that a container has to end by itself once its first process has been let go."""
_NULL = os.makedev(1, 3)


class DockerPortal(SocketPortal):
    """As any, but nothing of the host's devices goes in: root in a container may be root outside, and would own it."""

    _null = -1

    async def prepare(self) -> None:
        """While nothing runs inside that could have put something else in its place."""
        self._null = await self.open("/dev/null", os.O_RDWR)

    async def spawn(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str,
        stdio: Sequence[int],
        pty: tuple[int, int] | None = None,
    ) -> SocketChild:
        given = [self._null if _is_null(fd) else fd for fd in stdio]
        return await super().spawn(argv, env=env, cwd=cwd, stdio=given, pty=pty)

    async def close(self) -> None:
        if self._null >= 0:
            os.close(self._null)
            self._null = -1
        await super().close()


def _is_null(fd: int) -> bool:
    found = os.fstat(fd)
    return stat.S_ISCHR(found.st_mode) and found.st_rdev == _NULL


def group_of(pid: int) -> Group:
    """The control groups that a container's first process is in; made by the engine, and only read here."""
    places = places_of(Path(f"/proc/{pid}/cgroup"))
    legacy = {kind: (1, place) for kind, place in places.legacy.items() if kind in (*CONTROLLERS, "cpuacct")}
    # Where the two are not mounted as one, what was used is with the second.
    if "cpuacct" in legacy:
        legacy["cpu"] = legacy.pop("cpuacct")
    if places.unified is not None and not legacy:
        return Group(2, places.unified, {kind: (2, places.unified) for kind in CONTROLLERS})
    return Group(1, places.legacy.get("freezer", Path("/nowhere")), legacy)  # type: ignore[arg-type]


class DockerMachine:
    runtime = Runtime

    portal: DockerPortal

    def __init__(
        self, provider: DockerProvider, id: str, name: str, lock: int, died: Callable[[str], Awaitable[None]]
    ) -> None:
        self.id = id
        self.name = name
        self.clock = Clock()
        self.transparent = False
        self._provider = provider
        self._lock = lock
        self._died = died
        self._stopping = False
        self._frozen = False
        self._group: Group | None = None
        self._watch: Watch | None = None
        self._last: Measure | None = None

    def begun(self, pid: int) -> None:
        self._group = group_of(pid)
        with contextlib.suppress(OSError):  # it has ended already, or they cannot be seen
            self._watch = Watch(self._group)

    def lost(self, reason: str) -> None:
        """Its first process has ended, or talks nonsense: what is left of it ends, too."""
        if not self._stopping:
            self._stopping = True
            self._provider.own(self._mourn())

    async def _mourn(self) -> None:
        why = "its init was killed"
        try:
            state = await self._end()
            if state.get("OOMKilled"):
                why = "its init was killed for want of memory"
        except ProviderError as error:
            log.warning("the engine does not say what became of a container", reason=error.message)
        await self._release()
        await self._died(why)

    # -- limits --------------------------------------------------------------------------------------------------------

    def met(self) -> Met:
        if self._last is not None:
            return self._last.met
        return Met() if self._watch is None else self._watch.met()

    def measure(self) -> Measure:
        if self._last is not None:
            return self._last
        return Measure() if self._group is None else Controls(self._group).measure()

    async def limit(self, limits: Limits) -> None:
        used = self.measure().memory or 0
        try:
            if limits.memory is not None and used > limits.memory:
                raise ProviderError("It uses more.")
            await self._provider.engine.update(self.name, resources(limits))
        except ProviderError as error:
            if limits.memory is None or (self.measure().memory or 0) < limits.memory * 0.8:
                raise
            raise LimitTooLowError(
                f"The sandbox uses more memory now than {shown_size(limits.memory)}.",
                hint="End some of its processes first, or stop it: the limit can then be set for its next start.",
            ) from error

    # -- sleep ---------------------------------------------------------------------------------------------------------

    @property
    def frozen(self) -> bool:
        return self._frozen

    async def freeze(self) -> None:
        if self._frozen:
            return
        self._frozen = True
        self.portal.hold()
        self.clock.stop()
        try:
            await self._provider.engine.pause(self.name)
        except BaseException as error:
            await self.thaw()
            if isinstance(error, ProviderError):
                raise FreezeFailedError(
                    f"The sandbox could not be frozen: {error.message}",
                    hint="Put it to sleep with the stage `hibernate` instead.",
                ) from error
            raise

    async def thaw(self) -> None:
        if not self._frozen:
            return
        await self._provider.engine.unpause(self.name)
        self.portal.release()
        self.clock.go_on()
        self._frozen = False

    # -- mounts --------------------------------------------------------------------------------------------------------

    async def mount(self, path: str, read_only: bool) -> int:
        raise UnsupportedError("File systems of this server cannot be mounted in a container that runs.")

    async def unmount(self, path: str) -> None:
        raise UnsupportedError("File systems of this server cannot be mounted in a container that runs.")

    # -- the end -------------------------------------------------------------------------------------------------------

    async def stop(self, grace: float = 0.0) -> None:
        already, self._stopping = self._stopping, True
        try:
            if grace and not already and not self._frozen:
                # One that ends altogether meanwhile is no error: that is what is wanted.
                with contextlib.suppress(TimeoutError, SandboxLostError):
                    async with asyncio.timeout(grace):
                        await self.portal.end_processes()
            await self._end()
        except ProviderError as error:
            # Its first process was let go, and has ended unless it was paused; the engine is asked again at its start.
            log.warning("the engine does not say that a container has ended", sandbox=self.id, reason=error.message)
        finally:
            await self._release()

    async def _end(self) -> dict[str, Any]:
        """Let go of its first process, with which all others end; what the engine says of it then."""
        if self._last is None:
            self._last = replace(self.measure(), met=self.met())
        frozen, self._frozen = self._frozen, False
        await self.portal.close()
        engine = self._provider.engine
        if not frozen:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PATIENCE):
                    await engine.wait(self.name)
        found = await engine.inspect(self.name)
        state: dict[str, Any] = {} if found is None else found["State"]
        if state.get("Running"):
            await engine.kill(self.name)
            await engine.wait(self.name)
        if state.get("OOMKilled") and not self._last.met.memory:
            self._last = replace(self._last, met=replace(self._last.met, memory=1))
        return state

    async def _release(self) -> None:
        await self.portal.close()
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        self.relock(-1)

    def relock(self, lock: int) -> None:
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = lock
