"""Sandboxes that a deployed Cloudflare bridge runs: this server keeps names and history, the cloud does the rest."""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
from collections.abc import Awaitable, Callable, Coroutine
from typing import Protocol

import structlog

from skerry.errors import (
    FreezeFailedError,
    ImageNotFoundError,
    SkerryError,
    UnsupportedError,
)
from skerry.models import ImageInfo, Limits
from skerry.providers.cloudflare.bridge import Bridge
from skerry.providers.cloudflare.configured import configured
from skerry.providers.cloudflare.ids import Ids, Remote
from skerry.providers.cloudflare.portal import BridgePortal
from skerry.providers.cloudflare.reach import Reach
from skerry.providers.cloudflare.runtime import BridgeRuntime
from skerry.providers.contract import Capabilities, Changes, Machine, Measure, Spec, elsewhere
from skerry.runtime.faults import NOTHING, Met
from skerry.settings import Settings

log = structlog.get_logger(__name__)

PATIENCE = 10.0
"""Seconds that a bridge has at most to end what ran in a sandbox."""
LIMITS = ("memory", "cpu", "pids", "open_files", "disk", "tmpfs")
UNHELD = "A bridge's containers have the size that they were deployed with."
IMAGE = "host"
"""The name of the only image there is: the one that the bridge was deployed with."""


class Cloud(Reach, Protocol):
    """Who runs the sandboxes."""

    url: str

    async def create(self, spec: Spec | None = None) -> str: ...

    async def delete(self, id: str) -> None: ...

    async def close(self) -> None: ...


class BridgeMachine:
    runtime = BridgeRuntime

    portal: BridgePortal

    def __init__(self, provider: BridgeProvider, lock: int, died: Callable[[str], Awaitable[None]]) -> None:
        self._provider = provider
        self._lock = lock
        self._died = died
        self._over = False

    transparent = False

    def met(self) -> Met:
        return NOTHING

    def measure(self) -> Measure:
        return Measure()

    async def limit(self, limits: Limits) -> None:
        """Nobody holds it to them, and the API says so."""

    def lost(self, reason: str) -> None:
        """The cloud has ended it."""
        if not self._over:
            self._over = True
            self._provider.own(self._mourn(reason))

    async def _mourn(self, reason: str) -> None:
        await self.portal.let_go()
        self.release()
        await self._died(reason)

    async def freeze(self) -> None:
        raise FreezeFailedError("The processes of a bridge's sandbox cannot be frozen.", hint="Let it hibernate.")

    async def thaw(self) -> None:
        return None

    async def mount(self, path: str, read_only: bool) -> int:
        raise UnsupportedError("File systems of this server cannot be mounted in a bridge's sandbox.")

    async def unmount(self, path: str) -> None:
        raise UnsupportedError("File systems of this server cannot be mounted in a bridge's sandbox.")

    async def stop(self, grace: float = 0.0) -> None:
        self._over = True
        try:
            async with asyncio.timeout(grace + PATIENCE):
                if grace:
                    await self.portal.end(grace)
                await self.portal.close()
        except TimeoutError:
            log.warning("the bridge does not answer, so what ran in a sandbox may run on", sandbox=self.portal.id)
            await self.portal.let_go()
        finally:
            self.release()

    def release(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def relock(self, lock: int) -> None:
        self.release()
        self._lock = lock


class BridgeProvider:
    """Whatever a sandbox of somebody else's is made and reached with (``Cloud``), names and locks are kept here."""

    name: str
    what: str
    """As it is called in a sentence."""
    alone = False
    machine: type[BridgeMachine] = BridgeMachine

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._ids = Ids(settings.home / self.name)
        self._bridge: Cloud
        self._home = -1
        self._tasks: set[asyncio.Task[None]] = set()

    def capabilities(self) -> Capabilities:
        raise NotImplementedError

    def _connect(self) -> Cloud:
        raise NotImplementedError

    # -- opening and closing -------------------------------------------------------------------------------------------

    async def open(self) -> None:
        self._bridge = self._connect()
        self._ids.open()
        self._home = os.open(self._settings.home / self.name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._home, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.alone = True
        except BlockingIOError:
            await asyncio.to_thread(fcntl.flock, self._home, fcntl.LOCK_SH)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._bridge.close()
        if self._home >= 0:
            os.close(self._home)
            self._home = -1

    async def sweep(self, keep: set[str], snapshots: set[str]) -> list[str]:
        removed = []
        if self.alone:
            for id in set(self._ids.all()) - keep:
                self._ids.forget(id)
                removed.append(f"sandbox {id} of {self.what}")
            self.own(self._clear())  # nobody has to wait for a bridge that is slow, or away
            fcntl.flock(self._home, fcntl.LOCK_SH)
            self.alone = False
        return removed

    async def _clear(self) -> None:
        """Delete what is to be deleted. What the bridge cannot be told now is told when it next deletes something."""
        for remote in self._ids.discarded():
            try:
                if remote.url == self._bridge.url:
                    await self._bridge.delete(remote.id)
                self._ids.cleared(remote)
            except SkerryError as error:
                log.warning("the bridge did not delete a sandbox; it is asked again later", reason=error.message)
                return

    # -- machines ------------------------------------------------------------------------------------------------------

    async def place(self, id: str, provider: str | None) -> None:
        if provider not in (None, self.name):
            raise elsewhere(provider, [self.name])

    def place_of(self, id: str) -> str:
        return self.name

    def place_of_snapshot(self, snapshot: str) -> str:
        return self.name

    async def start(self, spec: Spec, died: Callable[[str], Awaitable[None]]) -> Machine:
        lock = self._ids.lock(spec.id)
        try:
            remote = self._ids.find(spec.id)
            fresh = remote is None or not await self.exists(spec.id)
            if remote is None or fresh:
                self._ids.discard(spec.id)  # what the cloud has ended, but may still have by name
                remote = Remote(await self._bridge.create(spec), self._bridge.url, secrets.token_hex(8))
                self._ids.keep(spec.id, remote)
            machine = self.machine(self, lock, died)
            machine.portal = self._portal(remote, machine.lost)
            if fresh:
                await machine.portal.prepare(remote.machine)
            else:
                await machine.portal.tidy()
        except BaseException:
            os.close(lock)
            raise
        return machine

    def _portal(self, remote: Remote, lost: Callable[[str], None]) -> BridgePortal:
        return BridgePortal(self._bridge, remote.id, remote.machine, lost)

    def own(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def rename(self, machine: Machine, id: str) -> None:
        assert isinstance(machine, BridgeMachine)
        lock = self._ids.lock(id)
        for old in self._ids.all():
            remote = self._ids.find(old)
            if remote is not None and remote.id == machine.portal.id:
                self._ids.rename(old, id)
        machine.relock(lock)

    async def require_idle(self, id: str) -> None:
        os.close(self._ids.lock(id))

    async def forget(self, id: str) -> None:
        self._ids.forget(id)
        await self._clear()

    def full(self) -> bool:
        return False

    async def exists(self, id: str) -> bool:
        """Whether the bridge still has the machine that was started, and not an empty one in its place."""
        remote = self._ids.find(id)
        if remote is None or remote.url != self._bridge.url:
            return False
        return await self._portal(remote, lambda _: None).known()

    # -- what a bridge has not -----------------------------------------------------------------------------------------

    async def snapshot(
        self, id: str, snapshot: str, machine: Machine | None = None, previous: str | None = None
    ) -> None:
        raise self._unsupported("snapshots")

    async def clone(self, snapshot: str, id: str) -> None:
        raise self._unsupported("snapshots")

    async def restore(self, snapshot: str, id: str, stop: Callable[[], Awaitable[None]]) -> None:
        raise self._unsupported("snapshots")

    async def remove_snapshot(self, snapshot: str) -> None:
        return None

    async def snapshots(self) -> set[str]:
        return set()

    async def make_room(self, size: int) -> None:
        return None

    async def deleted(self, id: str, image: str) -> list[str]:
        raise self._unsupported("backups of whole machines")

    def changes(self, image: str, before: str | None, after: str, *, kin: bool = False) -> Changes:
        raise self._unsupported("snapshots")

    async def images(self) -> list[ImageInfo]:
        return [ImageInfo(name=IMAGE, size=0, source="the image that the bridge was deployed with")]

    async def require_toolbox(self, name: str) -> None:
        raise self._unsupported("programs of the host")

    async def require_image(self, name: str, provider: str | None = None) -> None:
        if name != IMAGE:
            raise ImageNotFoundError(
                f"There is no image {name!r}: a bridge has one, which it was deployed with.",
                hint=f"It is called {IMAGE!r}.",
            )

    async def import_image(
        self, name: str, source: str, progress: Callable[[int], None] | None = None, label: str | None = None
    ) -> ImageInfo:
        raise self._unsupported("images of one's own")

    async def remove_image(self, name: str) -> None:
        await self.require_image(name)
        raise self._unsupported("removing its image")

    def _unsupported(self, what: str) -> UnsupportedError:
        return UnsupportedError(f"The provider of this server is {self.what}, which has no {what}.")


class CloudflareProvider(BridgeProvider):
    name = "cloudflare"
    what = "a Cloudflare bridge"

    def capabilities(self) -> Capabilities:
        return Capabilities(
            name="cloudflare",
            snapshots="none",
            freeze="none",
            mounts=False,
            egress=False,
            unheld=dict.fromkeys(LIMITS, UNHELD),
            details={"url": self._settings.cloudflare_url},
        )

    def _connect(self) -> Cloud:
        return Bridge(*configured(self._settings), timeout=self._settings.cloudflare_timeout)
