"""Sandboxes that are containers of a Docker Engine on this machine.

A container's first process is Skerry's own init, which reaches the server through a socket that is bound in, so that
descriptors cross and everything above the portal is as with sandboxes of this machine. A container has no network but
its loopback, and its files are the container's own layer.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog

from skerry.egress.environment import TRUST
from skerry.errors import (
    HostUnfitError,
    ProviderError,
    SandboxExistsError,
    SandboxStartError,
    SkerryError,
    SnapshotError,
)
from skerry.models import ImageInfo, Limits
from skerry.providers.contract import Capabilities, Changes, Machine, Spec, elsewhere
from skerry.providers.docker import description
from skerry.providers.docker.comparison import Comparison, put_there
from skerry.providers.docker.containers import Containers
from skerry.providers.docker.description import FILTER, SNAPSHOT, Mount
from skerry.providers.docker.door import Door, Loopback
from skerry.providers.docker.door import remove as remove_door
from skerry.providers.docker.engine import Engine, Refused, socket_path
from skerry.providers.docker.images import HOST, Images
from skerry.providers.docker.locks import Locks
from skerry.providers.docker.machine import DockerMachine, DockerPortal, Walls
from skerry.providers.local import probe, toolbox, trust
from skerry.providers.local.entrance import Entrance
from skerry.providers.local.launcher import Launcher
from skerry.providers.local.seccomp import write_filter
from skerry.providers.local.toolbox import SCRATCH, Toolbox
from skerry.providers.machine import Chores
from skerry.providers.toolboxes import PLACE, Toolboxes
from skerry.runtime.environment import WORKSPACE
from skerry.settings import Settings

log = structlog.get_logger(__name__)

START_TIMEOUT = 60.0
UNCOUNTED = "The Docker Engine's disk does not count what each container writes: that takes xfs with project quotas."
SIZED = ("overlay2", "btrfs", "zfs", "devicemapper")
"""Drivers of the engine's disk that may count; overlay2 does on xfs with project quotas only."""
_FULL = 8 << 20
_METADATA = 16 << 20


class DockerProvider:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._folder = settings.home / "docker"
        self._mark = hashlib.sha256(os.fsencode(settings.home.resolve())).hexdigest()[:10]
        self.engine: Engine
        self.launcher = Launcher()
        self._launching = asyncio.Lock()
        self._images: Images
        self._containers: Containers
        self._locks = Locks(self._folder / "locks")
        self._toolbox: Toolbox
        self._toolboxes = Toolboxes(settings.cache or settings.home / "cache")
        self._mounts: list[Mount] = []
        self._loopback: Loopback
        self._filter = b""
        self._info: dict[str, Any] = {}
        self._sized = False
        self._enterable = False
        self._fuse = False
        self.chores = Chores()
        self._presence = -1
        self.alone = False
        self._open = False

    def capabilities(self) -> Capabilities:
        return Capabilities(
            name="docker",
            snapshots="copy",
            isolation=self._enterable,
            uid_range=True,
            writable_system=True,
            freeze="cgroup",
            mounts=self._enterable and self._fuse,
            toolboxes=True,
            unheld=self._unheld(),
            details={
                "engine": self._info.get("ServerVersion", ""),
                "storage": self._info.get("Driver", ""),
                "users": "remapped" if _has(self._info, "userns") else "root inside is root outside, without powers",
                "snapshots": "A snapshot is a commit, and takes as long as it takes to copy what was changed.",
            },
        )

    def _unheld(self) -> dict[str, str]:
        names = {"memory": "MemoryLimit", "cpu": "CpuCfsQuota", "pids": "PidsLimit"}
        found = {
            kind: "The Docker Engine of this machine cannot hold containers to it."
            for kind, name in names.items()
            if self._info.get(name) is False
        }
        return found if self._sized else {**found, "disk": UNCOUNTED}

    @property
    def entrance(self) -> Entrance:
        return Entrance(self.launcher, self._toolbox, self._filter)

    async def launched(self) -> Launcher:
        """What enters containers and mounts in them; anew, should it ever have ended."""
        async with self._launching:
            if not self.launcher.alive:
                self.launcher.open()
        return self.launcher

    # -- opening and closing -------------------------------------------------------------------------------------------

    async def open(self) -> None:
        if self._open:
            return
        self._open = True
        self.engine = Engine(socket_path(self._settings.docker_socket), self._settings.docker_timeout)
        try:
            await self.engine.version()
            self._info = await self.engine.info()
            self._images = Images(self.engine, self._mark, self._settings.docker_image)
            self._containers = Containers(self.engine, self._images, self._mark)
            await asyncio.to_thread(self._prepare)
            await self._images.find(HOST)
            await self._probe()
        except BaseException:
            await self.close()
            raise

    def _prepare(self) -> None:
        self._settings.home.mkdir(parents=True, exist_ok=True)
        self._settings.home.chmod(0o700)
        for directory in (self._folder, self._folder / "doors"):
            directory.mkdir(exist_ok=True)
        self._locks.prepare()
        self._presence = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._presence, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.alone = True
        except BlockingIOError:
            fcntl.flock(self._presence, fcntl.LOCK_SH)
        self._toolbox = toolbox.build(self._settings.cache or self._settings.home / "cache")
        self._toolboxes.prepare()
        self._filter = write_filter(self._folder / "filter")  # which init puts on besides the engine's own
        paths = {name: str(path) for name, path in self._toolbox.exposed().items()}
        shown = [
            *self._toolbox.shown(paths),
            (str(trust.build(self._settings.home)), TRUST),
            (str(self._folder / "filter"), FILTER),
        ]
        self._mounts = [Mount(source, target) for source, target in shown]
        self._loopback = Loopback(self._settings.egress_transparent)

    async def _probe(self) -> None:
        """Start a container that is thrown away. Fails closed: without one that works there is no server."""
        spec = Spec(id=f".probe-{secrets.token_hex(4)}", image=HOST, limits=Limits(pids=64))
        self._sized = self._info.get("Driver") in SIZED
        try:
            try:
                machine = await self.start(replace(spec, limits=Limits(pids=64, disk=1 << 30)), _ignore)
            except (SandboxStartError, ProviderError):
                if not self._sized:
                    raise
                self._sized = False  # it takes options for the disk that are not set here
                machine = await self.start(spec, _ignore)
            self._fuse = probe.fuse().ok
            await self._try_entering(machine)
            await machine.stop()
        except SandboxStartError as error:
            raise HostUnfitError(
                f"The Docker Engine at {self.engine.socket} cannot run sandboxes. {error.message}",
                hint="`skerry doctor` says more. The engine must be on this machine, and see Skerry's home.",
            ) from error
        finally:
            with contextlib.suppress(ProviderError):
                await self.forget(spec.id)

    async def _try_entering(self, machine: DockerMachine) -> None:
        # What SELinux calls a container could not be given to those who enter.
        if os.geteuid() != 0 or _has(self._info, "selinux"):
            return
        try:
            portal = await machine.isolate()
            await portal.close()
            self._enterable = True
        except (SkerryError, OSError, TimeoutError) as error:
            log.warning("containers cannot be entered here, so sessions are not isolated", reason=str(error))

    async def close(self) -> None:
        if not self._open:
            return
        self._open = False
        await self.chores.finish()
        await self.launcher.close()
        await self.engine.close()
        if hasattr(self, "_toolbox"):
            self._toolbox.close()
        self._toolboxes.close()
        if self._presence >= 0:
            os.close(self._presence)
            self._presence = -1

    async def sweep(self, keep: set[str], snapshots: set[str]) -> list[str]:
        if not self.alone:
            return []
        removed = []
        try:
            doors = {door.name for door in (self._folder / "doors").iterdir()}
            async for id, state in self._containers.all():
                if id not in keep:
                    await self.forget(id)
                    removed.append(f"the container of {id}")
                elif state in ("running", "paused", "restarting"):
                    await self._containers.end(self._containers.name(id))
                    removed.append(f"what ran in the container of {id}")
                doors.discard(id)
            removed += await self._images.sweep(snapshots)
            for id in doors - keep:
                remove_door(self._door(id))
        finally:
            self.alone = False
            fcntl.flock(self._presence, fcntl.LOCK_SH)
        return removed

    # -- machines ------------------------------------------------------------------------------------------------------

    def _door(self, id: str) -> Path:
        return self._folder / "doors" / id

    async def place(self, id: str, provider: str | None) -> None:
        if provider not in (None, "docker"):
            raise elsewhere(provider, ["docker"])

    def place_of(self, id: str) -> str:
        return "docker"

    def place_of_snapshot(self, snapshot: str) -> str:
        return "docker"

    async def start(self, spec: Spec, died: Callable[[str], Awaitable[None]]) -> DockerMachine:
        for wanted in spec.toolboxes:
            await self._toolboxes.ensure(wanted)
        machine = DockerMachine(self, spec.id, self._containers.name(spec.id), self._locks.acquire(spec.id), died)
        machine.open_files = spec.limits.open_files
        try:
            self._door(spec.id).mkdir(exist_ok=True)
            if await self._containers.prepare(spec, self._describe):
                self._locks.set_prepared(machine.lock, False)  # of one that somebody removed behind our back
            door = Door(self._door(spec.id))
            try:
                await self._begin(machine, door)
            finally:
                door.close()
        except OSError as error:
            machine.relock(-1)
            raise SandboxStartError(f"The sandbox could not be started: {error.strerror}.") from error
        except BaseException:
            machine.relock(-1)
            raise
        return machine

    async def _begin(self, machine: DockerMachine, door: Door) -> None:
        name = machine.name
        try:
            await self.engine.start(name)
            connection, walls, pid = await self._answered(name, door)
        except BaseException as error:
            with contextlib.suppress(ProviderError):
                await self._containers.end(name)
            if isinstance(error, ProviderError) and error.code == "provider_failed":
                raise SandboxStartError(
                    f"The sandbox could not be started: {error.message}", hint="`skerry doctor` looks at the engine."
                ) from error
            raise
        machine.portal = DockerPortal(
            connection,
            python=self._toolbox.python,
            tools=self._toolbox.tools,
            code=self._toolbox.code_of_image,
            scratch=SCRATCH,
            clock=machine.clock,
            on_lost=machine.lost,
            isolate=machine.isolate if self._enterable else None,
        )
        machine.begun(walls)
        try:
            async with asyncio.timeout(START_TIMEOUT):
                await machine.portal.ready()
                await machine.portal.prepare()  # which also shows that the walls are those of who answers
            if not self._locks.prepared(machine.lock):
                await machine.portal.mkdir(WORKSPACE, 0o755, parents=True)
                self._locks.set_prepared(machine.lock, True)
            machine.portal.reserved, machine.transparent = await self._loopback.reserve(pid)
        except BaseException as error:
            await machine.stop()
            if isinstance(error, (OSError, TimeoutError, SkerryError)):
                raise SandboxStartError(f"The sandbox could not be started: {error}.") from error
            raise

    async def _answered(self, name: str, door: Door) -> tuple[Any, Walls, int]:
        """The connection that its first process makes; raises ``SandboxStartError`` if it ends instead."""
        accepting, ending = asyncio.ensure_future(door.accept()), asyncio.ensure_future(self.engine.wait(name))
        try:
            waits: set[asyncio.Future[Any]] = {accepting, ending}
            await asyncio.wait(waits, timeout=START_TIMEOUT, return_when=asyncio.FIRST_COMPLETED)
            if not accepting.done():
                if ending.done():
                    ending.result()  # an engine that could not be asked knows nothing of its end
                said = await self.engine.last_words(name)
                reason = said or ("it ended at once" if ending.done() else "it did not answer in time")
                raise SandboxStartError(f"The sandbox could not be started: {reason}.")
            connection, pid = accepting.result()
        finally:
            accepting.cancel()
            ending.cancel()
            await asyncio.gather(accepting, ending, return_exceptions=True)
        found = await self.engine.inspect(name)
        if found is None or found["State"]["Pid"] != pid:
            connection.close()
            raise SandboxStartError(
                "The sandbox could not be started: what answers is not the first process of its container.",
                hint="The engine must be on this machine, and Skerry not in a container.",
            )
        try:
            return connection, Walls.around(pid, found["HostConfig"]), pid
        except OSError:
            connection.close()
            raise

    async def _describe(self, spec: Spec, image: str) -> dict[str, Any]:
        shown = [Mount(str(self._toolboxes.hold(name)), f"{PLACE}/{name}") for name in spec.toolboxes]
        return description.settings(
            spec,
            home=self._mark,
            image=image,
            init=self._toolbox.init,
            mounts=[*self._mounts, *shown],
            door=str(self._door(spec.id)),
            disk=await self._disk_of(spec.limits.disk, image),
        )

    async def _disk_of(self, limit: int | None, image: str) -> int | None:
        if limit is None or not self._sized:
            return None
        if self._info.get("Driver") != "btrfs":
            return limit
        # There the image counts as well; in blocks, which is a little more than the engine says.
        below = await self.engine.image(image)
        return limit + (0 if below is None else below["Size"] + below["Size"] // 10) + _METADATA

    async def rename(self, machine: Machine, id: str) -> None:
        assert isinstance(machine, DockerMachine)
        lock, name = self._locks.acquire(id), self._containers.name(id)
        try:
            await self.engine.rename(machine.name, name)
        except ProviderError as error:
            os.close(lock)
            raise SandboxStartError(f"The sandbox could not be started: {error.message}") from error
        self._locks.set_prepared(lock, True)
        self._locks.forget(machine.id)
        machine.relock(lock)
        machine.id, machine.name = id, name

    async def require_idle(self, id: str) -> None:
        os.close(self._locks.acquire(id))

    async def exists(self, id: str) -> bool:
        return await self._containers.exists(id)

    async def forget(self, id: str) -> None:
        await self._containers.forget(id)
        remove_door(self._door(id))
        self._locks.forget(id)

    def full(self) -> bool:
        try:
            found = os.statvfs(self._info["DockerRootDir"])
        except (OSError, KeyError):
            return False
        return found.f_bavail * found.f_frsize < _FULL

    async def make_room(self, size: int) -> None:
        return None

    # -- snapshots -----------------------------------------------------------------------------------------------------

    async def snapshot(
        self, id: str, snapshot: str, machine: Machine | None = None, previous: str | None = None
    ) -> None:
        if machine is None:
            await self._containers.settle(id)
        name, tag = self._containers.name(id), f"snapshot-{snapshot}"
        found = await self.engine.inspect(name)
        try:
            if found is None:  # it was never started
                await self._images.seal_nothing(snapshot)
            elif found["State"]["Status"] == "created":  # nor was this, since it was made
                await self.engine.tag(found["Image"], self._images.repository, tag)
            else:
                await self._images.commit(name, tag, {SNAPSHOT: snapshot})
        except ProviderError as error:
            if error.code != "provider_failed":
                raise
            raise SnapshotError(f"Sandbox {id!r} could not be snapshotted: {error.message}") from error

    async def clone(self, snapshot: str, id: str) -> None:
        image = await self._images.snapshot(snapshot)
        try:
            await self._containers.hold(self._containers.name(id), id, image)
        except Refused as refused:
            if refused.status != 409:
                raise SnapshotError(f"Sandbox {id!r} could not be made from a snapshot: {refused}.") from refused
            raise SandboxExistsError(
                f"Sandbox {id!r} already has files.", hint="Destroy it first, or choose another id."
            ) from refused

    async def restore(self, snapshot: str, id: str, stop: Callable[[], Awaitable[None]]) -> None:
        image, following = await self._images.snapshot(snapshot), self._containers.next(id)
        await self._containers.remove(following)
        try:
            await self._containers.hold(following, id, image)
            await stop()
            lock = self._locks.acquire(id)
        except Refused as refused:
            raise SnapshotError(f"Sandbox {id!r} could not be rolled back: {refused}.") from refused
        except BaseException:
            await self._containers.remove(following)
            raise
        try:
            await self._containers.exchange(id)
        finally:
            os.close(lock)

    async def remove_snapshot(self, snapshot: str) -> None:
        reference = f"{self._images.repository}:snapshot-{snapshot}"
        found = await self.engine.image(reference)
        if found is not None:
            await self._images.drop(found["Id"], reference)

    async def snapshots(self) -> set[str]:
        return await self._images.snapshots()

    async def deleted(self, id: str, image: str) -> list[str]:
        before = await self._images.find(image)
        name = self._containers.name(id)
        found = await self.engine.inspect(name)
        if found is not None and found["Image"] == before:  # then the engine itself knows
            return sorted(path for path in await self.engine.deleted(name) if not put_there(path))
        return await Comparison(self.engine, self._scratch, before, container=name).deleted()

    def changes(self, image: str, before: str | None, after: str, *, kin: bool = False) -> Changes:
        reference = f"{self._images.repository}:snapshot-"
        first = None if before is None else f"{reference}{before}"
        return Comparison(
            self.engine, self._scratch, first, f"{reference}{after}", base=lambda: self._images.find(image)
        )

    async def _scratch(self, image: str) -> str:
        """A container to read an image's files through; its name."""
        id = f".read-{secrets.token_hex(6)}"
        await self._containers.hold(self._containers.name(id), id, image)
        return self._containers.name(id)

    # -- images --------------------------------------------------------------------------------------------------------

    async def images(self) -> list[ImageInfo]:
        return await self._images.list_()

    async def require_image(self, name: str, provider: str | None = None) -> None:
        await self._images.find(name)

    async def require_toolbox(self, name: str) -> None:
        await self._toolboxes.ensure(name)

    async def import_image(
        self, name: str, source: str, progress: Callable[[int], None] | None = None, label: str | None = None
    ) -> ImageInfo:
        return await self._images.import_(name, Path(source), progress, label)

    async def remove_image(self, name: str) -> None:
        await self._images.remove(name)


def _has(info: dict[str, Any], option: str) -> bool:
    return any(f"name={option}" in str(one) for one in info.get("SecurityOptions") or ())


async def _ignore(reason: str) -> None:
    return None
