"""The local side of a terminal: our own in raw mode, and back to what it was, however it ends."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import termios
import threading
import time
import tty
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from skerry.errors import ServerUnreachableError
from skerry.runtime.scrollback import Modes

if TYPE_CHECKING:
    from skerry import AsyncSandbox, AsyncTerminal

END_OF_INPUT = b"\x04"
INTERRUPT = b"\x03"
DETACH = b"\x1d"  # Ctrl-]
RECONNECT_FOR = 60.0
LONGEST_PAUSE = 5.0
_EMPTY_SCREEN = b"\x1b[0m\x1b[H\x1b[2J"


class Detached(Exception):
    """The user has left, and wants the terminal to live on."""


async def interact(sandbox: AsyncSandbox, id: str | None = None, **how: Any) -> int:
    """Connect this terminal with one in the sandbox, and again when the connection is lost; the shell's exit code."""
    async with sandbox:
        terminal = await sandbox.terminal(id, **_size(), **how)
        modes = Modes()
        left = False
        try:
            with raw_mode(), Keyboard() as keyboard:
                while True:
                    try:
                        await _converse(terminal, keyboard, modes)
                        break
                    except ServerUnreachableError:
                        await terminal.close()
                        _say("The connection was lost; trying to reconnect. Ctrl-C gives up.", modes)
                        terminal = await _again(sandbox, terminal.id, keyboard)
                        _write(_EMPTY_SCREEN)
        except Detached:
            left = True
        finally:
            _write(modes.undo())
            await terminal.close()
    if left:
        print(f"\nDetached. {await _way_back(sandbox, terminal.id)}", file=sys.stderr)
        return 0
    return terminal.exit_code if terminal.exit_code is not None else 1


async def _way_back(sandbox: AsyncSandbox, id: str) -> str:
    if (await sandbox._link.connection.endpoint()).host is not None:
        return "The terminal ended, because no server keeps it; `skerry serve` starts one."
    return f"`skerry attach {sandbox.id} {id}` comes back."


async def _converse(terminal: AsyncTerminal, keyboard: Keyboard, modes: Modes) -> None:
    typing = asyncio.create_task(_type(terminal, keyboard))
    showing = asyncio.create_task(_show(terminal, modes))
    try:
        done, _ = await asyncio.wait([typing, showing], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in (typing, showing):
            task.cancel()
        await asyncio.gather(typing, showing, return_exceptions=True)


async def _show(terminal: AsyncTerminal, modes: Modes) -> None:
    while data := await terminal.recv():
        modes.follow(data)
        _write(data)


async def _type(terminal: AsyncTerminal, keyboard: Keyboard) -> None:
    """Send what is typed, and the window's size when it changes."""
    while True:
        data = await keyboard.typed.get()
        if data is None:
            await terminal.resize(**_size())
        elif keyboard.detaches(data):
            raise Detached
        else:
            await terminal.send(data)


async def _again(sandbox: AsyncSandbox, id: str, keyboard: Keyboard) -> AsyncTerminal:
    """The same terminal over a new connection; raises what the last attempt said when there was none for a minute."""
    until = time.monotonic() + RECONNECT_FOR
    pause = 0.2
    while True:
        try:
            return await sandbox.terminal(id, **_size())
        except ServerUnreachableError:
            if time.monotonic() > until:
                raise
        await _rest(pause, keyboard)
        pause = min(2 * pause, LONGEST_PAUSE)


async def _rest(seconds: float, keyboard: Keyboard) -> None:
    """Wait, unless the user gives up."""
    try:
        async with asyncio.timeout(seconds):
            while True:
                data = await keyboard.typed.get()
                if data is not None and (INTERRUPT in data or DETACH in data):
                    raise ServerUnreachableError("The connection to the terminal was lost.")
    except TimeoutError:
        return


class Keyboard:
    """What is typed, and None whenever the window's size changes."""

    def __init__(self) -> None:
        self.typed: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._terminal = os.isatty(0)
        self._presses: deque[float] = deque(maxlen=3)

    def __enter__(self) -> Keyboard:
        threading.Thread(target=self._read, name="skerry-keyboard", daemon=True).start()
        self._loop.add_signal_handler(signal.SIGWINCH, self.typed.put_nowait, None)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.remove_signal_handler(signal.SIGWINCH)

    def _read(self) -> None:
        # A thread, because a file or a terminal shared with others cannot be watched without changing its flags.
        while True:
            try:
                data = os.read(0, 65536)
            except OSError:
                data = b""
            try:
                self._loop.call_soon_threadsafe(self.typed.put_nowait, data or END_OF_INPUT)
            except RuntimeError:
                return  # the loop has ended
            if not data:
                return

    def detaches(self, data: bytes) -> bool:
        """Whether this is the third Ctrl-] within a second. One or two are sent inside, where editors use them."""
        if not self._terminal:
            return False
        if data.strip(DETACH):
            self._presses.clear()
            return False
        self._presses.extend([time.monotonic()] * len(data))
        return len(self._presses) == 3 and self._presses[-1] - self._presses[0] < 1


@contextmanager
def raw_mode() -> Iterator[None]:
    if not os.isatty(0):
        yield
        return
    before = termios.tcgetattr(0)
    try:
        tty.setraw(0, termios.TCSADRAIN)  # what was typed before is not thrown away
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)


def _size() -> dict[str, Any]:
    size = shutil.get_terminal_size()
    return {"cols": min(max(size.columns, 1), 1000), "rows": min(max(size.lines, 1), 1000)}


def _say(sentence: str, modes: Modes) -> None:
    _write(modes.undo() + f"\r\n{sentence}\r\n".encode())


def _write(data: bytes) -> None:
    if data:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
