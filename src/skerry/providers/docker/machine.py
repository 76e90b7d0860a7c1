"""A container that runs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import stat
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from skerry.errors import ProviderError, UnsupportedError
from skerry.models import Limits
from skerry.portal.socket import SocketChild, SocketPortal
from skerry.providers.contract import Measure
from skerry.providers.docker.description import resources
from skerry.providers.local.cgroups import CONTROLLERS, Group, places_of
from skerry.providers.local.controls import Controls, Watch
from skerry.providers.machine import KernelMachine, too_low

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

    def prepare_as(self, first: DockerPortal) -> None:
        """Of another portal into the same container, which is no longer empty."""
        self._null = os.dup(first._null)

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


@dataclass(frozen=True, slots=True)
class Walls:
    """What the engine has put around a container, for those who enter it later: all of it must hold for them too."""

    pidfd: int
    group: Group
    """The control groups it is held to its limits by; made by the engine, and only read here."""
    groups: Mapping[str, Any]
    """All that it is in."""
    users: bool
    """Whether its users are others than the host's."""
    readable: list[str]
    hidden: list[str]
    """What of /proc may only be read there, and what may not be seen."""
    profile: str | None
    """Its AppArmor profile."""

    @classmethod
    def around(cls, pid: int, settings: Mapping[str, Any]) -> Walls:
        """``pid`` is of its first process, which must be shown to live after this; ``settings`` are the engine's."""
        places = places_of(Path(f"/proc/{pid}/cgroup"))
        return cls(
            pidfd=os.pidfd_open(pid),
            group=_limiting(places.unified, places.legacy),
            groups={
                "unified": None if places.unified is None else str(places.unified),
                "legacy": sorted({str(path) for path in places.legacy.values()}),
            },
            users=_other_users(pid),
            readable=[path for path in settings.get("ReadonlyPaths") or () if path.startswith("/proc/")],
            hidden=[path for path in settings.get("MaskedPaths") or () if path.startswith("/proc/")],
            profile=_profile(pid),
        )


def _limiting(unified: Path | None, legacy: Mapping[str, Path]) -> Group:
    found = {kind: (1, place) for kind, place in legacy.items() if kind in (*CONTROLLERS, "cpuacct")}
    # Where the two are not mounted as one, what was used is with the second.
    if "cpuacct" in found:
        found["cpu"] = found.pop("cpuacct")
    if unified is not None and not found:
        return Group(2, unified, {kind: (2, unified) for kind in CONTROLLERS})
    return Group(1, legacy.get("freezer", Path("/nowhere")), found)  # type: ignore[arg-type]


def _other_users(pid: int) -> bool:
    try:
        return os.stat(f"/proc/{pid}/ns/user").st_ino != os.stat("/proc/self/ns/user").st_ino
    except PermissionError:  # a server that is not root may not see it, and enters nothing
        return False


def _profile(pid: int) -> str | None:
    try:
        said = Path(f"/proc/{pid}/attr/apparmor/current").read_text().strip("\0\n")
    except OSError:
        return None
    return None if said == "unconfined" else said.rpartition(" (")[0] or said


class DockerMachine(KernelMachine):
    portal: DockerPortal

    def __init__(
        self, provider: DockerProvider, id: str, name: str, lock: int, died: Callable[[str], Awaitable[None]]
    ) -> None:
        super().__init__(provider.launcher, id, lock, died)
        self.name = name
        self.open_files: int | None = None
        self._provider = provider
        self._walls: Walls | None = None
        self._adopted: int | None = None  # by which launcher

    def begun(self, walls: Walls) -> None:
        self._walls = walls
        with contextlib.suppress(OSError):  # it has ended already, or they cannot be seen
            self._watch = Watch(walls.group)

    def lost(self, reason: str) -> None:
        """Its first process has ended, or talks nonsense: what is left of it ends, too."""
        if not self._stopping:
            self._stopping = True
            self._provider.chores.own(self._mourn())

    async def _mourn(self) -> None:
        state = await self._end()
        await self._release()
        starved = " for want of memory" if state.get("OOMKilled") else ""
        await self._died(f"its init was killed{starved}")

    # -- limits --------------------------------------------------------------------------------------------------------

    def measure(self) -> Measure:
        if self._last is not None:
            return self._last
        return Measure() if self._walls is None else Controls(self._walls.group).measure()

    async def limit(self, limits: Limits) -> None:
        used = self.measure().memory or 0
        try:
            if limits.memory is not None and used > limits.memory:
                raise ProviderError("It uses more.")
            await self._provider.engine.update(self.name, resources(limits))
        except ProviderError as error:
            if limits.memory is None or (self.measure().memory or 0) < limits.memory * 0.8:
                raise
            raise too_low(limits) from error

    # -- sleep ---------------------------------------------------------------------------------------------------------

    async def _stand_still(self) -> None:
        for portal in self.portals:
            portal.hold()
        self.clock.stop()
        await self._provider.engine.pause(self.name)

    async def _go_on(self) -> None:
        try:
            await self._provider.engine.unpause(self.name)
        except ProviderError as error:
            if not self._thaw():
                raise
            log.warning("a container goes on without the engine's help", sandbox=self.id, reason=error.message)
        for portal in self.portals:
            portal.release()

    def _thaw(self) -> bool:
        """What the engine would do, if it could be asked."""
        if self._walls is None:
            return False
        try:
            self._walls.group.thaw()
        except OSError:
            return False
        return True

    # -- more ways in --------------------------------------------------------------------------------------------------

    async def _enter(self) -> SocketPortal:
        await self._adopt()
        portal = await self._provider.entrance.enter(self, DockerPortal)
        portal.prepare_as(self.portal)
        return portal

    async def mount(self, path: str, read_only: bool) -> int:
        if not self._provider.capabilities().mounts:
            raise UnsupportedError(
                "File systems of this server cannot be mounted in its containers.",
                hint="That takes a server that is root, and /dev/fuse on its machine.",
            )
        async with self._entering:
            await self._adopt()
        return await super().mount(path, read_only)

    async def _adopt(self) -> None:
        """Show it to the launcher, which did not start it."""
        launcher = await self._provider.launched()
        if self._adopted == launcher.pid or self._walls is None:
            return
        walls = self._walls
        await launcher.adopt(
            self.key,
            walls.pidfd,
            group=walls.groups,
            users=walls.users,
            readable=walls.readable,
            hidden=walls.hidden,
            profile=walls.profile,
            openFiles=self.open_files,
        )
        self._adopted = launcher.pid

    # -- the end -------------------------------------------------------------------------------------------------------

    async def stop(self, grace: float = 0.0) -> None:
        already, self._stopping = self._stopping, True
        try:
            if grace and not already and not self._frozen:
                await self._farewell(grace)
            await self._end()
        finally:
            await self._release()

    async def _end(self) -> dict[str, Any]:
        """Let go of its first process, with which all others end; what the engine says of it then."""
        if self._last is None:
            self._last = replace(self.measure(), met=self.met())
        frozen = self._frozen
        self.warm_up()
        # Those who entered are in no pid namespace that ends with the first. What stands still ends when it goes on.
        leaving = asyncio.gather(*(portal.close() for portal in list(self._entered)), return_exceptions=True)
        if not frozen:
            await leaving
        await self.portal.close()
        state: dict[str, Any] = {}
        try:
            state = await self._ended(frozen)
        except ProviderError as error:
            log.warning("the engine does not say that a container has ended", sandbox=self.id, reason=error.message)
            self._kill()
        await leaving
        if state.get("OOMKilled") and not self._last.met.memory:
            self._last = replace(self._last, met=replace(self._last.met, memory=1))
        return state

    async def _ended(self, frozen: bool) -> dict[str, Any]:
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
        return state

    def _kill(self) -> None:
        """Without the engine, which is asked again at the next start."""
        if self._walls is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(self._walls.pidfd, signal.SIGKILL)
            self._thaw()

    async def _release(self) -> None:
        await self.portal.close()
        self.unwatch()
        if self._walls is not None:
            os.close(self._walls.pidfd)
            self._walls = None
        self.relock(-1)
        adopted, self._adopted = self._adopted, None
        if adopted is not None and self._launcher.alive and adopted == self._launcher.pid:
            await self._launcher.forget(self.key)
