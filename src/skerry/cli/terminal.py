"""The local side of `skerry shell`: our terminal in raw mode, and back to what it was, however it ends."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import termios
import threading
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skerry import AsyncSandbox, AsyncTerminal

END_OF_INPUT = b"\x04"


async def interact(sandbox: AsyncSandbox, shell: str | None, cwd: str | None) -> int:
    """Connect this terminal with a shell in the sandbox; the shell's exit code."""
    size = shutil.get_terminal_size()
    async with (
        sandbox,
        await sandbox.terminal(cols=size.columns, rows=size.lines, shell=shell, cwd=cwd) as terminal,
    ):
        with raw_mode():
            typing = asyncio.create_task(_type(terminal))
            try:
                while data := await terminal.recv():
                    _write(data)
            finally:
                typing.cancel()
                await asyncio.gather(typing, return_exceptions=True)
    return terminal.exit_code if terminal.exit_code is not None else 1


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


async def _type(terminal: AsyncTerminal) -> None:
    """Send what is typed, and the window's size when it changes."""
    loop = asyncio.get_running_loop()
    typed: asyncio.Queue[bytes | None] = asyncio.Queue()

    def read() -> None:
        # A thread, because a file or a terminal shared with others cannot be watched without changing its flags.
        while True:
            try:
                data = os.read(0, 65536)
            except OSError:
                data = b""
            try:
                loop.call_soon_threadsafe(typed.put_nowait, data or END_OF_INPUT)
            except RuntimeError:
                return  # the loop has ended
            if not data:
                return

    threading.Thread(target=read, name="skerry-keyboard", daemon=True).start()
    loop.add_signal_handler(signal.SIGWINCH, typed.put_nowait, None)
    try:
        while True:
            data = await typed.get()
            if data is None:
                size = shutil.get_terminal_size()
                await terminal.resize(size.columns, size.lines)
            else:
                await terminal.send(data)
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)


def _write(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
