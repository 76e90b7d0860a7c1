"""Where sandboxes live. A provider makes machines and hands out portals into them; it knows nothing else."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from skerry.errors import ProviderAbsentError
from skerry.models import ImageInfo, LayerChange, Limits
from skerry.portal.contract import Portal
from skerry.runtime.faults import NOTHING, Met
from skerry.runtime.runtime import Runtime


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What this provider can do on this host; the API repeats it, so that nothing is promised that does not hold."""

    name: str
    snapshots: str = "none"
    """``instant``: milliseconds whatever the size; ``copy``: as long as a copy takes; ``none``: there are none."""
    isolation: bool = False
    uid_range: bool = False
    writable_system: bool = False
    freeze: Literal["cgroup", "signals", "none"] = "signals"
    """How a machine is frozen. By signals, programs inside can tell, and one that is hostile can go on."""
    mounts: bool = False
    """Whether file systems of ours can be mounted in a machine that runs."""
    egress: bool = True
    """Whether what leaves a machine goes through a door of ours, so that a policy can be held and secrets be added."""
    toolboxes: bool = False
    """Whether programs of the host can be shown inside."""
    unheld: Mapping[str, str] = field(default_factory=dict)
    """The limits that machines cannot be held to here, and why, in a sentence."""
    full: Literal["ENOSPC", "EDQUOT"] | None = None
    """What a program is told that writes past the disk limit; None where none can be held."""
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Spec:
    """All a provider needs to know to start a machine."""

    id: str
    image: str
    limits: Limits = field(default_factory=Limits)
    toolboxes: tuple[str, ...] = ()
    """Programs of the host that are shown inside."""
    owner: str | None = None
    """Whose it is, for providers whose other users see it."""


@dataclass(frozen=True, slots=True)
class Measure:
    """What a machine uses now, and has used since it was started; None where the host does not tell."""

    cpu_seconds: float | None = None
    memory: int | None = None
    memory_peak: int | None = None
    disk: int | None = None
    processes: int | None = None
    met: Met = NOTHING


class Machine(Protocol):
    """A started sandbox."""

    @property
    def portal(self) -> Portal: ...

    def met(self) -> Met:
        """How often it ran into limits. Costs microseconds, and works once more after it has ended."""
        ...

    def measure(self) -> Measure:
        """What it uses. After it has ended: what it had used at the end."""
        ...

    async def limit(self, limits: Limits) -> None:
        """Hold it to other limits from now on. Raises ``LimitTooLowError`` if it uses more already."""
        ...

    @property
    def transparent(self) -> bool:
        """Whether connections to outside that know no proxy arrive at the door's port for them."""
        ...

    @property
    def runtime(self) -> type[Runtime]:
        """What works in it, over its portal."""
        ...

    async def freeze(self) -> None:
        """Stop every process where it is, and the machine's clock. Raises ``FreezeFailedError``, then all go on.

        Nothing may be asked of the portal meanwhile but what can wait for ``thaw``.
        """
        ...

    async def thaw(self) -> None:
        """Let them go on as if nothing had been. One that is not frozen stays as it is."""
        ...

    async def mount(self, path: str, read_only: bool) -> int:
        """Attach a FUSE file system to a directory inside, which is made where it is missing and must be empty.

        Returns the descriptor through which its server speaks to the kernel, for the caller to close. The path is
        looked up inside, through no link. Raises ``OSError``; then nothing has changed.
        """
        ...

    async def unmount(self, path: str) -> None:
        """Detach what ``mount`` attached there, whoever still uses it."""
        ...

    async def stop(self, grace: float = 0.0) -> None:
        """End every process; the files stay. Returns when nothing of it runs any more.

        With ``grace``, every process gets a SIGTERM first and so many seconds to end by itself.
        """
        ...


class Changes(Protocol):
    """What differs between two states of a machine's files."""

    async def list_(self, limit: int) -> tuple[list[LayerChange], bool]:
        """The first so many, and whether there are more."""
        ...

    def tar(self) -> AsyncGenerator[bytes, None]:
        """All of them, as a layer that container tools read."""
        ...


class Provider(Protocol):
    @property
    def alone(self) -> bool:
        """No other process uses these machines, so what is unfinished was left by one that was killed."""
        ...

    def capabilities(self) -> Capabilities: ...

    async def open(self) -> None:
        """Probe the host and prepare; raises ``HostUnfitError`` rather than run anything unsandboxed."""
        ...

    async def close(self) -> None: ...

    async def place(self, id: str, provider: str | None) -> None:
        """Where a machine that has no files yet is to be: on the provider of that name, or where they usually are.

        Raises ``ProviderNotConfiguredError``; what was placed is forgotten by ``forget``.
        """
        ...

    def place_of(self, id: str) -> str:
        """The name of the provider that a machine is on."""
        ...

    def place_of_snapshot(self, snapshot: str) -> str:
        """The same of a snapshot, and so of all that is made from it."""
        ...

    async def start(self, spec: Spec, died: Callable[[str], Awaitable[None]]) -> Machine:
        """Start a machine over its own files, making them on first use. ``died(reason)`` is called once if it ends
        without having been stopped."""
        ...

    async def rename(self, machine: Machine, id: str) -> None:
        """Give a machine that was started in advance, and has no past, the id it turned out to have."""
        ...

    async def require_idle(self, id: str) -> None:
        """Raises ``SandboxBusyError`` while some process, this one or another, runs the machine."""
        ...

    async def forget(self, id: str) -> None:
        """Delete the files of a machine that is not running."""
        ...

    async def exists(self, id: str) -> bool: ...

    def full(self) -> bool:
        """Whether the disk that all machines share has no room left."""
        ...

    async def sweep(self, keep: set[str], snapshots: set[str]) -> list[str]:
        """Remove what earlier servers left behind and no one owns: returns what was removed, in words.

        Does nothing unless ``alone``, and afterwards others may come.
        """
        ...

    async def snapshot(
        self, id: str, snapshot: str, machine: Machine | None = None, previous: str | None = None
    ) -> None:
        """Keep the files of a machine as they are now; one that runs (``machine``) goes on. All or nothing.

        ``previous`` is an older snapshot of the same machine, with which unchanged files may be shared.
        """
        ...

    async def clone(self, snapshot: str, id: str) -> None:
        """The files of a new machine, from a snapshot; ``SandboxExistsError`` if it has some already."""
        ...

    async def restore(self, snapshot: str, id: str, stop: Callable[[], Awaitable[None]]) -> None:
        """Make the files of a machine those of a snapshot, all or nothing.

        ``stop`` is called to end the machine when all that may fail has been done.
        """
        ...

    async def remove_snapshot(self, snapshot: str) -> None:
        """One that does not exist is already removed."""
        ...

    async def snapshots(self) -> set[str]: ...

    async def make_room(self, size: int) -> None:
        """So many bytes are about to be written: see to it, if that can be, that they fit."""
        ...

    async def deleted(self, id: str, image: str) -> list[str]:
        """What a machine, running or not, has deleted of its image, as paths without a leading slash."""
        ...

    def changes(self, image: str, before: str | None, after: str, *, kin: bool = False) -> Changes:
        """From a snapshot, or from the image itself, to a snapshot over the same image; ``kin`` says that both are of
        one machine."""
        ...

    async def images(self) -> list[ImageInfo]: ...

    async def require_image(self, name: str, provider: str | None = None) -> None:
        """On the provider of that name, or on any. Raises ``ImageNotFoundError``, naming those there are."""
        ...

    async def require_toolbox(self, name: str) -> None:
        """Installs it if it is missing. Raises ``InvalidRequestError`` for one that there is not, ``ToolboxError``."""
        ...

    async def import_image(
        self, name: str, source: str, progress: Callable[[int], None] | None = None, label: str | None = None
    ) -> ImageInfo:
        """Unpack a root file system from a tarball or directory of the host as an image; ``label`` says where it came
        from, if ``source`` does not."""
        ...

    async def remove_image(self, name: str) -> None: ...


def elsewhere(asked: str, there: Iterable[str]) -> ProviderAbsentError:
    return ProviderAbsentError(
        f"This server has no provider {asked[:40]!r}.",
        hint=f"It has {', '.join(there)}. SKERRY_PROVIDERS names those it has besides its own.",
    )
