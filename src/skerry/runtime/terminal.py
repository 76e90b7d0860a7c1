"""A shell on a terminal of the sandbox's own."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import struct
import termios
from collections.abc import Mapping

from skerry.errors import FileNotFoundInSandboxError, InvalidRequestError, SandboxLostError
from skerry.portal.contract import Child, Portal
from skerry.runtime.environment import check_cwd, check_text
from skerry.runtime.output import read_some, write_all

SHELLS = ("bash", "sh")


class Terminal:
    def __init__(self, child: Child, master: int) -> None:
        self._child = child
        self._master = master
        self._reading = asyncio.Lock()
        self._writing = asyncio.Lock()

    async def read(self) -> bytes:
        """What the terminal shows next; ``b""`` when its shell has ended."""
        async with self._reading:
            return await read_some(self._master) if self._master >= 0 else b""

    async def write(self, data: bytes) -> None:
        async with self._writing:
            if self._master >= 0:
                with contextlib.suppress(OSError):
                    await write_all(self._master, data)

    def resize(self, cols: int, rows: int) -> None:
        if self._master >= 0:
            fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", *_size(cols, rows)[::-1], 0, 0))

    async def wait(self) -> int:
        code = await self._child.wait()
        return code if code >= 0 else 128 - code

    async def close(self) -> None:
        """Hang up: everything that ran on this terminal ends."""
        with contextlib.suppress(SandboxLostError):
            await self._child.kill(signal.SIGHUP)
            await self._child.kill(signal.SIGKILL)
        if self._master >= 0:
            master, self._master = self._master, -1
            os.close(master)


async def open_terminal(
    portal: Portal, *, env: Mapping[str, str], cols: int, rows: int, shell: str | None, cwd: str
) -> Terminal:
    check_cwd(cwd)
    check_text(shell or "", "The shell")
    size = _size(cols, rows)
    for program in [shell] if shell else SHELLS:
        try:
            child = await portal.spawn(
                [program], env={**env, "TERM": "xterm-256color", "COLORTERM": "truecolor"}, cwd=cwd, stdio=[], pty=size
            )
        except OSError as error:
            if "cwd" in str(error):
                raise FileNotFoundInSandboxError(f"The directory {cwd!r} does not exist.") from error
            continue
        assert child.master is not None
        return Terminal(child, child.master)
    raise FileNotFoundInSandboxError(
        f"There is no shell {shell or ' or '.join(SHELLS)!r} in the sandbox.", hint="Name one that its image has."
    )


def _size(cols: int, rows: int) -> tuple[int, int]:
    if not (1 <= cols <= 1000 and 1 <= rows <= 1000):
        raise InvalidRequestError("A terminal has between 1 and 1000 columns and rows.")
    return cols, rows
