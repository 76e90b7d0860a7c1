"""What a portal without descriptors needs of whoever runs the sandboxes: a bridge, or another cloud."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Protocol

from skerry.providers.cloudflare.bridge import Said


class Line(Protocol):
    """A terminal: bytes both ways, and text in JSON for sizes there and for its end here."""

    def __aiter__(self) -> AsyncIterator[str | bytes]: ...

    async def send(self, message: str | bytes) -> None: ...

    async def close(self) -> None: ...


class Reach(Protocol):
    def execute(self, id: str, argv: Sequence[str]) -> AsyncGenerator[Said, None]:
        """Run a program to its end; what it writes, as it writes it, and last its exit code."""
        ...

    async def write(self, id: str, path: str, content: bytes) -> None:
        """A file below ``/workspace``, whole."""
        ...

    async def tunnel(self, id: str, port: int) -> str:
        """The address under which a port is reached from outside."""
        ...

    async def create_session(self, id: str, session: str, *, cwd: str, env: Mapping[str, str]) -> None: ...

    async def delete_session(self, id: str, session: str) -> None: ...

    async def open_terminal(self, id: str, *, cols: int, rows: int, session: str, shell: str) -> Line: ...
