"""A terminal inside the sandbox."""

from __future__ import annotations

import json
from typing import Any

from skerry.client.frames import AsyncFrames
from skerry.errors import SandboxLostError


class AsyncTerminal:
    """A shell on a terminal of its own. ``exit_code`` is set when it has ended."""

    def __init__(self, frames: AsyncFrames) -> None:
        self._frames = frames
        self.exit_code: int | None = None

    async def send(self, data: bytes | str) -> None:
        """Type something."""
        await self._frames.send(data.encode() if isinstance(data, str) else data)

    async def recv(self) -> bytes:
        """What the terminal shows next; ``b""`` when it has ended."""
        while (frame := await self._frames.recv()) is not None:
            if isinstance(frame, bytes):
                if frame:
                    return frame
                continue
            message = json.loads(frame)
            if message.get("type") == "exit":
                self.exit_code = message.get("code")
                return b""
            if message.get("type") == "error":
                raise SandboxLostError(str(message.get("message")))
        return b""

    async def resize(self, cols: int, rows: int) -> None:
        await self._frames.send(json.dumps({"type": "resize", "cols": cols, "rows": rows}))

    async def close(self) -> None:
        """Hang up; the shell ends."""
        await self._frames.close()

    async def __aenter__(self) -> AsyncTerminal:
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.close()
