"""Where sandboxes live. A provider makes machines and hands out portals into them; it knows nothing else."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from skerry.models import ImageInfo
from skerry.portal.contract import Portal


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What this provider can do on this host; the API repeats it, so that nothing is promised that does not hold."""

    name: str
    snapshots: bool = False
    isolation: bool = False
    uid_range: bool = False
    writable_system: bool = False
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Spec:
    """All a provider needs to know to start a machine."""

    id: str
    image: str
    limits: Mapping[str, Any] = field(default_factory=dict)


class Machine(Protocol):
    """A started sandbox."""

    @property
    def portal(self) -> Portal: ...

    async def stop(self) -> None:
        """End every process; the files stay. Returns when nothing of it runs any more."""
        ...


class Provider(Protocol):
    def capabilities(self) -> Capabilities: ...

    async def open(self) -> None:
        """Probe the host and prepare; raises ``HostUnfitError`` rather than run anything unsandboxed."""
        ...

    async def close(self) -> None: ...

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

    async def sweep(self, keep: set[str]) -> list[str]:
        """Remove what earlier servers left behind and no one owns: returns what was removed, in words."""
        ...

    async def images(self) -> list[ImageInfo]: ...

    async def require_image(self, name: str) -> None:
        """Raises ``ImageNotFoundError``, naming those there are."""
        ...

    async def import_image(
        self, name: str, source: str, progress: Callable[[int], None] | None = None, label: str | None = None
    ) -> ImageInfo:
        """Unpack a root file system from a tarball or directory of the host as an image; ``label`` says where it came
        from, if ``source`` does not."""
        ...

    async def remove_image(self, name: str) -> None: ...
