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
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import structlog

from skerry.egress.environment import TRUST
from skerry.errors import (
    HostUnfitError,
    ProviderError,
    SandboxBusyError,
    SandboxExistsError,
    SandboxStartError,
    SkerryError,
    SnapshotError,
)
from skerry.models import ImageInfo, Limits
from skerry.providers.contract import Capabilities, Changes, Machine, Spec, elsewhere
from skerry.providers.docker import containers
from skerry.providers.docker.comparison import Comparison, put_there
from skerry.providers.docker.containers import HOME, SANDBOX, SETTINGS, SNAPSHOT, Mount
from skerry.providers.docker.door import Door, Loopback
from skerry.providers.docker.door import remove as remove_door
from skerry.providers.docker.engine import Engine, Refused, socket_path
from skerry.providers.docker.images import HOST, Images
from skerry.providers.docker.machine import DockerMachine, DockerPortal
from skerry.providers.local import toolbox, trust
from skerry.providers.local.toolbox import SCRATCH, Toolbox
from skerry.providers.toolboxes import PLACE, Toolboxes
from skerry.runtime.environment import WORKSPACE
from skerry.settings import Settings

log = structlog.get_logger(__name__)

START_TIMEOUT = 60.0
UNCOUNTED = "The Docker Engine's disk does not count what each container writes: that takes xfs with project quotas."
_FULL = 8 << 20


class DockerProvider:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._folder = settings.home / "docker"
        self._mark = hashlib.sha256(os.fsencode(settings.home.resolve())).hexdigest()[:10]
        self.engine: Engine
        self._images: Images
        self._toolbox: Toolbox
        self._toolboxes = Toolboxes(settings.cache or settings.home / "cache")
        self._mounts: list[Mount] = []
        self._loopback: Loopback
        self._info: dict[str, Any] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._presence = -1
        self.alone = False
        self._open = False

    def own(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run something that nobody waits for now but that ``close`` will."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def capabilities(self) -> Capabilities:
        return Capabilities(
            name="docker",
            snapshots="copy",
            isolation=False,
            uid_range=True,
            writable_system=True,
            freeze="cgroup",
            mounts=False,
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
    def _sized(self) -> bool:
        return self._info.get("Driver") in ("btrfs", "zfs", "devicemapper")

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
            await asyncio.to_thread(self._prepare)
            await self._images.find(HOST)
            await self._probe()
        except BaseException:
            await self.close()
            raise

    def _prepare(self) -> None:
        self._settings.home.mkdir(parents=True, exist_ok=True)
        self._settings.home.chmod(0o700)
        for directory in (self._folder, self._folder / "doors", self._folder / "locks"):
            directory.mkdir(exist_ok=True)
        self._presence = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._presence, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.alone = True
        except BlockingIOError:
            fcntl.flock(self._presence, fcntl.LOCK_SH)
        self._toolbox = toolbox.build(self._settings.cache or self._settings.home / "cache")
        self._toolboxes.prepare()
        paths = {name: str(path) for name, path in self._toolbox.exposed().items()}
        shown = [*self._toolbox.shown(paths), (str(trust.build(self._settings.home)), TRUST)]
        self._mounts = [Mount(source, target) for source, target in shown]
        self._loopback = Loopback(self._settings.egress_transparent)

    async def _probe(self) -> None:
        """Start a container that is thrown away. Fails closed: without one that works there is no server."""
        spec = Spec(id=f".probe-{secrets.token_hex(4)}", image=HOST, limits=Limits(pids=64))
        try:
            machine = await self.start(spec, _ignore)
            await machine.stop()
        except SandboxStartError as error:
            raise HostUnfitError(
                f"The Docker Engine at {self.engine.socket} cannot run sandboxes. {error.message}",
                hint="`skerry doctor` says more. The engine must be on this machine, and see Skerry's home.",
            ) from error
        finally:
            with contextlib.suppress(ProviderError):
                await self.forget(spec.id)

    async def close(self) -> None:
        if not self._open:
            return
        self._open = False
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
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
            for one in await self.engine.containers(label=[f"{HOME}={self._mark}"]):
                name = one["Names"][0].removeprefix("/")
                id = name.removeprefix(self._name("")) if name.startswith(self._name("")) else None
                if id is None:
                    continue  # the other half of an exchange, which is settled with its sandbox
                await self._settle(id)
                if id not in keep:
                    await self.forget(id)
                    removed.append(f"the container of {id}")
                elif one["State"] in ("running", "paused", "restarting"):
                    await self._end(name)
                    removed.append(f"what ran in the container of {id}")
                doors.discard(id)
            for one in await self.engine.containers(label=[f"{HOME}={self._mark}"], name=[f"^/{self._next('')}"]):
                id = one["Names"][0].removeprefix(f"/{self._next('')}")
                await self._settle(id)
                if id not in keep:
                    await self.forget(id)
            removed += await self._images.sweep(snapshots)
            for id in doors - keep:
                remove_door(self._folder / "doors" / id)
        finally:
            self.alone = False
            fcntl.flock(self._presence, fcntl.LOCK_SH)
        return removed

    # -- machines ------------------------------------------------------------------------------------------------------

    def _name(self, id: str) -> str:
        return f"skerry-{self._mark}-{id}"

    def _next(self, id: str) -> str:
        """Of the container that is to take a sandbox's place."""
        return f"skerry-{self._mark}.next-{id}"

    def _door(self, id: str) -> Path:
        return self._folder / "doors" / id

    async def place(self, id: str, provider: str | None) -> None:
        if provider not in (None, "docker"):
            raise elsewhere(provider, ["docker"])

    async def start(self, spec: Spec, died: Callable[[str], Awaitable[None]]) -> DockerMachine:
        for wanted in spec.toolboxes:
            await self._toolboxes.ensure(wanted)
        machine = DockerMachine(self, spec.id, self._name(spec.id), self._lock(spec.id), died)
        try:
            fresh = await self._made(spec)
            door = Door(self._door(spec.id))
            try:
                await self._begin(machine, door, fresh)
            finally:
                door.close()
        except OSError as error:
            machine.relock(-1)
            raise SandboxStartError(f"The sandbox could not be started: {error.strerror}.") from error
        except BaseException:
            machine.relock(-1)
            raise
        return machine

    async def _begin(self, machine: DockerMachine, door: Door, fresh: bool) -> None:
        name = machine.name
        try:
            await self.engine.start(name)
            connection, pid = await self._answered(name, door)
        except BaseException as error:
            with contextlib.suppress(ProviderError):
                await self._end(name)
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
        )
        try:
            async with asyncio.timeout(START_TIMEOUT):
                await machine.portal.ready()
            machine.begun(pid)
            await machine.portal.prepare()
            if fresh:
                await machine.portal.mkdir(WORKSPACE, 0o755, parents=True)
            machine.portal.reserved, machine.transparent = await self._loopback.reserve(pid)
        except BaseException as error:
            await machine.stop()
            if isinstance(error, (OSError, TimeoutError, SkerryError)):
                raise SandboxStartError(f"The sandbox could not be started: {error}.") from error
            raise

    async def _answered(self, name: str, door: Door) -> tuple[Any, int]:
        """The connection that its first process makes; raises ``SandboxStartError`` if it ends instead."""
        accepting, ending = asyncio.ensure_future(door.accept()), asyncio.ensure_future(self.engine.wait(name))
        try:
            waits: set[asyncio.Future[Any]] = {accepting, ending}
            await asyncio.wait(waits, timeout=START_TIMEOUT, return_when=asyncio.FIRST_COMPLETED)
            if not accepting.done():
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
        return connection, pid

    async def _end(self, name: str) -> None:
        await self.engine.kill(name)
        await self.engine.wait(name)

    # -- containers ----------------------------------------------------------------------------------------------------

    async def _made(self, spec: Spec) -> bool:
        """See to it that there is a container with these settings, over the sandbox's files if it has some.

        Whether it has none but its image's.
        """
        await self._settle(spec.id)
        name = self._name(spec.id)
        found = await self.engine.inspect(name)
        if found is None:
            await self._create(name, spec, await self._images.find(spec.image))
            return True
        fresh: bool = found["State"]["Status"] == "created"
        image: str = found["Image"]
        if found["State"]["Running"]:  # left by a server that was killed, and paused, or about to end
            await self._end(name)
        wanted = self._settings_of(spec, image)
        if found["Config"]["Labels"].get(SETTINGS) == wanted["Labels"][SETTINGS]:
            await self.engine.update(name, containers.resources(spec.limits))
            return fresh
        if not fresh:  # it has files of its own
            moved = await self._images.commit(name, f"kept-{secrets.token_hex(8)}", {})
            await self._images.keep(moved)
            image = moved
        elif await self._images.is_nothing(image):
            image = await self._images.find(spec.image)
        await self._create(self._next(spec.id), spec, image)
        await self._exchange(spec.id)
        return fresh

    def _settings_of(self, spec: Spec, image: str) -> dict[str, Any]:
        shown = [Mount(str(self._toolboxes.hold(name)), f"{PLACE}/{name}") for name in spec.toolboxes]
        return containers.settings(
            spec,
            home=self._mark,
            image=image,
            init=self._toolbox.init,
            mounts=[*self._mounts, *shown],
            door=str(self._door(spec.id)),
            sized=self._sized,
        )

    async def _create(self, name: str, spec: Spec, image: str) -> None:
        self._door(spec.id).mkdir(exist_ok=True)
        try:
            await self.engine.create(name, self._settings_of(spec, image))
        except Refused as refused:
            raise SandboxStartError(f"The Docker Engine could not make a container: {refused}.") from refused

    async def _exchange(self, id: str) -> None:
        """What was prepared takes the place of what was there; a server that is killed between finds both, or one."""
        old = await self.engine.inspect(self._name(id))
        await self.engine.remove(self._name(id))
        await self.engine.rename(self._next(id), self._name(id))
        if old is not None:
            await self._images.let_go(old["Image"])

    async def _settle(self, id: str) -> None:
        """Finish, or take back, an exchange in which a server was killed."""
        if await self.engine.inspect(self._next(id)) is None:
            return
        if await self.engine.inspect(self._name(id)) is None:
            await self.engine.rename(self._next(id), self._name(id))
        else:
            await self._remove(self._next(id))

    async def _remove(self, name: str) -> None:
        found = await self.engine.inspect(name)
        if found is not None:
            await self.engine.remove(name)
            await self._images.let_go(found["Image"])

    async def rename(self, machine: Machine, id: str) -> None:
        assert isinstance(machine, DockerMachine)
        lock = self._lock(id)
        try:
            await self.engine.rename(machine.name, self._name(id))
        except ProviderError as error:
            os.close(lock)
            raise SandboxStartError(f"The sandbox could not be started: {error.message}") from error
        self._lock_file(machine.id).unlink(missing_ok=True)
        machine.relock(lock)
        machine.id, machine.name = id, self._name(id)

    def _lock_file(self, id: str) -> Path:
        return self._folder / "locks" / id

    def _lock(self, id: str) -> int:
        """It is held for as long as the descriptor is open. Raises ``SandboxBusyError``."""
        while True:
            fd = os.open(self._lock_file(id), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                raise SandboxBusyError(
                    f"Sandbox {id!r} is run by another process with the same home.",
                    hint="Use it there, or stop it there.",
                ) from None
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), os.stat(self._lock_file(id))):
                    return fd
            os.close(fd)  # of a file that was deleted between the two

    async def require_idle(self, id: str) -> None:
        os.close(self._lock(id))

    async def exists(self, id: str) -> bool:
        if await self.engine.inspect(self._name(id)) is not None:
            return True
        return await self.engine.inspect(self._next(id)) is not None

    async def forget(self, id: str) -> None:
        for name in (self._next(id), self._name(id)):
            await self._remove(name)
        remove_door(self._door(id))
        self._lock_file(id).unlink(missing_ok=True)

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
            await self._settle(id)
        name, tag = self._name(id), f"snapshot-{snapshot}"
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
            await self._hold(self._name(id), id, image)
        except Refused as refused:
            if refused.status != 409:
                raise SnapshotError(f"Sandbox {id!r} could not be made from a snapshot: {refused}.") from refused
            raise SandboxExistsError(
                f"Sandbox {id!r} already has files.", hint="Destroy it first, or choose another id."
            ) from refused

    async def _hold(self, name: str, id: str, image: str) -> None:
        """A container that is never started: a place for files, until the sandbox is."""
        labels = {HOME: self._mark, SANDBOX: id, SETTINGS: "", SNAPSHOT: ""}
        await self.engine.create(
            name,
            {"Image": image, "Entrypoint": ["/"], "Labels": labels, "HostConfig": {"NetworkMode": "none"}},
        )

    async def restore(self, snapshot: str, id: str, stop: Callable[[], Awaitable[None]]) -> None:
        image = await self._images.snapshot(snapshot)
        await self._remove(self._next(id))
        try:
            await self._hold(self._next(id), id, image)
            await stop()
            lock = self._lock(id)
        except Refused as refused:
            raise SnapshotError(f"Sandbox {id!r} could not be rolled back: {refused}.") from refused
        except BaseException:
            await self._remove(self._next(id))
            raise
        try:
            await self._exchange(id)
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
        found = await self.engine.inspect(self._name(id))
        if found is not None and found["Image"] == before:  # then the engine itself knows
            return sorted(path for path in await self.engine.deleted(self._name(id)) if not put_there(path))
        return await Comparison(self.engine, self._scratch, before, container=self._name(id)).deleted()

    def changes(self, image: str, before: str | None, after: str, *, kin: bool = False) -> Changes:
        reference = f"{self._images.repository}:snapshot-"
        first = None if before is None else f"{reference}{before}"
        return Comparison(
            self.engine, self._scratch, first, f"{reference}{after}", base=lambda: self._images.find(image)
        )

    async def _scratch(self, image: str) -> str:
        """A container to read an image's files through; its name."""
        id = f".read-{secrets.token_hex(6)}"
        await self._hold(self._name(id), id, image)
        return self._name(id)

    # -- images --------------------------------------------------------------------------------------------------------

    async def images(self) -> list[ImageInfo]:
        return await self._images.list_()

    async def require_image(self, name: str) -> None:
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
