# Generated from src/skerry/client/_async/terminal.py by scripts/generate_sync.py; change that file and run it again.
"""A terminal inside the sandbox."""

from __future__ import annotations

import json
from typing import Any

from skerry.client.frames import Frames
from skerry.errors import SandboxLostError


class Terminal:
    """A shell on a terminal of its own. ``exit_code`` is set when it has ended."""

    def __init__(self, frames: Frames) -> None:
        self._frames = frames
        self.exit_code: int | None = None

    def send(self, data: bytes | str) -> None:
        """Type something."""
        self._frames.send(data.encode() if isinstance(data, str) else data)

    def recv(self) -> bytes:
        """What the terminal shows next; ``b""`` when it has ended."""
        while (frame := self._frames.recv()) is not None:
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

    def resize(self, cols: int, rows: int) -> None:
        self._frames.send(json.dumps({"type": "resize", "cols": cols, "rows": rows}))

    def close(self) -> None:
        """Hang up; the shell ends."""
        self._frames.close()

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
