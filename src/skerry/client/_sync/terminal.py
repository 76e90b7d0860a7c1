# Generated from src/skerry/client/_async/terminal.py by scripts/generate_sync.py; change that file and run it again.
"""Terminals inside the sandbox."""

from __future__ import annotations

import contextlib
import json
from typing import Any
from urllib.parse import quote

from skerry.client._sync.connection import Link
from skerry.client.frames import Frames
from skerry.client.values import given
from skerry.errors import ServerUnreachableError, SkerryError, error_from_wire
from skerry.models import TerminalInfo, TerminalList, TerminalTicket

# For a reader who fell behind: what follows is shown on an empty screen.
_ANEW = b"\x1b[!p\x1b[H\x1b[2J"


class Terminal:
    """A shell on a terminal. Leaving the ``with`` ends the shell if it was opened for us, else only our view.

    ``id`` names it for those who want to look at it too, or come back to it. ``cols`` and ``rows`` are its size, which
    others may change. ``exit_code`` is set when the shell has ended.
    """

    def __init__(self, frames: Frames, ours: bool = False) -> None:
        self._frames = frames
        self._ours = ours
        self._ended = False
        self.id = ""
        self.session = ""
        self.cols = 0
        self.rows = 0
        self.exit_code: int | None = None

    def ready(self) -> Terminal:
        """Wait until the server has opened it."""
        while not self.id and (frame := self._frames.recv()) is not None:
            if isinstance(frame, str):
                self._hear(json.loads(frame))
        if not self.id:
            self._check()
        return self

    def _check(self) -> None:
        if not self._ended and self._frames.lost:
            raise ServerUnreachableError(
                "The connection to the terminal was lost.", hint="If the server lives, so does the terminal."
            )
        self._ended = True

    def send(self, data: bytes | str) -> None:
        """Type something."""
        self._frames.send(data.encode() if isinstance(data, str) else data)

    def recv(self) -> bytes:
        """What the terminal shows next, first of all what it showed before; ``b""`` when it has ended.

        Raises ``ServerUnreachableError`` when the connection was lost. The terminal lives on: open it again by its id.
        """
        while not self._ended and (frame := self._frames.recv()) is not None:
            shown = frame if isinstance(frame, bytes) else self._hear(json.loads(frame))
            if shown:
                return shown
        self._check()
        return b""

    def _hear(self, message: dict[str, Any]) -> bytes:
        kind = message.get("type")
        if kind == "ready":
            self.id, self.session = str(message["terminal"]), str(message["session"])
        if kind in ("ready", "resize"):
            self.cols, self.rows = int(message["cols"]), int(message["rows"])
        elif kind == "exit":
            self.exit_code, self._ended = message.get("code"), True
        elif kind == "error":
            self._ended = True
            raise error_from_wire(500, {"error": message})
        return _ANEW if kind == "scrollback" else b""

    def resize(self, cols: int, rows: int) -> None:
        """Change its size, for everyone who looks at it."""
        self._frames.send(json.dumps({"type": "resize", "cols": cols, "rows": rows}))

    def close(self) -> None:
        """Look away. The shell and what runs on the terminal live on."""
        self._frames.close()

    def hang_up(self) -> None:
        """End the shell and everything that runs on the terminal."""
        self._frames.send(json.dumps({"type": "close"}))
        with contextlib.suppress(SkerryError):
            while self.recv():
                pass
        self._frames.close()

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: Any) -> None:
        if self._ours and not self._ended:
            self.hang_up()
        else:
            self.close()


class Terminals:
    _link: Link
    _bound: str | None = None

    def terminal(
        self,
        id: str | None = None,
        *,
        cols: int | None = None,
        rows: int | None = None,
        shell: str | None = None,
        cwd: str | None = None,
        session: str | None = None,
        shared: bool = False,
    ) -> Terminal:
        """Open a shell on a terminal of its own, or with ``id`` look at one that is open.

        It begins with the directory and the variables that the session has now. ``shared`` means the one terminal of
        the session that all who ask for it share, and that nobody's leaving ends. Without ``cols`` and ``rows`` a
        terminal that is open keeps its size, and a new one has 80 by 24.
        """
        ours = id is None and not shared
        params = given(
            terminal="new" if ours else id,
            session=session or self._bound,
            cols=cols,
            rows=rows,
            shell=shell,
            cwd=cwd,
        )
        terminal = Terminal(self._link.frames("/terminal", params), ours)
        try:
            return terminal.ready()
        except BaseException:
            terminal.close()
            raise

    def terminals(self) -> list[TerminalInfo]:
        """The terminals that are open. Asking does not wake the sandbox."""
        return (self._link.get(TerminalList, "/terminals", prepare=False)).terminals

    def close_terminal(self, id: str) -> None:
        """End a terminal's shell and everything that runs on it."""
        self._link.request("DELETE", f"/terminals/{quote(id, safe='')}", prepare=False)

    def terminal_ticket(self) -> TerminalTicket:
        """What lets a browser open the terminal page, or connect, once and soon: ``…/terminal?ticket=…``."""
        return self._link.post(TerminalTicket, "/terminal/ticket")
