"""A shell on a terminal of the sandbox's own, shown to any number of viewers, and living on without them."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import struct
import termios
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from skerry.errors import FileNotFoundInSandboxError, InvalidRequestError, SandboxLostError
from skerry.models import TerminalInfo, now
from skerry.portal.contract import Child, Portal
from skerry.runtime.environment import check_cwd, check_text
from skerry.runtime.output import read_some, write_all
from skerry.runtime.scrollback import Scrollback, without_questions
from skerry.runtime.viewer import End, Size, Viewer

SHELLS = ("bash", "sh")
# How long the program waits for viewers that all stopped reading, before it runs on without them.
PATIENCE = 5.0
# How long a program may take to save its work when the terminal hangs up.
GRACE = 1.0


@runtime_checkable
class Resizable(Protocol):
    """A shell whose terminal is far away, so that its master side here cannot be told the size."""

    def resize(self, cols: int, rows: int) -> None: ...


class Terminal:
    def __init__(
        self,
        id: str,
        session: str,
        shell: str,
        child: Child,
        master: int,
        size: tuple[int, int],
        ended: Callable[[], None],
    ) -> None:
        self.id = id
        self.session = session
        self.shell = shell
        self._leaving = False
        self.stirred = time.monotonic()
        """When bytes last flowed, in either direction."""
        self._child = child
        self._master = master
        self._size = size
        self._created = now()
        self._viewers: list[Viewer] = []
        self._scrollback = Scrollback()
        self._room = asyncio.Event()
        self._writing = asyncio.Lock()
        self._writer: asyncio.Future[None] | None = None
        self._end: End | None = None
        self._on_end = ended
        self._task = asyncio.get_running_loop().create_task(self._run())

    @property
    def ended(self) -> bool:
        return self._end is not None

    def info(self) -> TerminalInfo:
        return TerminalInfo(
            id=self.id,
            session=self.session,
            shell=self.shell,
            cols=self._size[0],
            rows=self._size[1],
            viewers=len(self._viewers),
            created_at=self._created,
            silent_for=round(time.monotonic() - self.stirred, 3),
        )

    # -- viewers -------------------------------------------------------------------------------------------------------

    def attach(self) -> Viewer:
        """A new viewer, who is shown the scrollback first. It stays until ``detach``."""
        viewer = Viewer(self._scrollback.show, self._room.set)
        if self._end is not None:
            viewer.offer(self._end)
        self._viewers.append(viewer)
        if self._scrollback.cut and self._scrollback.alternate:
            self._repaint()
        return viewer

    def detach(self, viewer: Viewer) -> None:
        with contextlib.suppress(ValueError):
            self._viewers.remove(viewer)
        self._room.set()

    async def write(self, data: bytes, viewer: Viewer | None = None) -> None:
        """Type something. The viewer who typed last is the one whose terminal answers a program's questions."""
        if viewer is not None and self._viewers and self._viewers[0] is not viewer and viewer in self._viewers:
            self._viewers.remove(viewer)
            self._viewers.insert(0, viewer)
        self.stirred = time.monotonic()
        async with self._writing:
            if self._master < 0:
                return
            # A task of its own, which the end of the shell cancels: nothing may wait for a descriptor that is closed.
            self._writer = writer = asyncio.ensure_future(write_all(self._master, data))
            try:
                await asyncio.wait([writer])
            finally:
                writer.cancel()  # who typed it may be gone
                await asyncio.gather(writer, return_exceptions=True)
            if not writer.cancelled() and not isinstance(error := writer.exception(), OSError | None):
                raise error

    def resize(self, cols: int, rows: int) -> None:
        """The last one wins; every viewer is told."""
        size = check_size(cols, rows)
        if size == self._size or self._master < 0:
            return
        self._size = size
        self._set_size(*size)
        for viewer in self._viewers:
            viewer.offer(Size(*size))

    def _set_size(self, cols: int, rows: int) -> None:
        if isinstance(self._child, Resizable):
            return self._child.resize(cols, rows)
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))

    def _repaint(self) -> None:
        """A full-screen program draws its screen anew when the size changes; the kernel says nothing if it did not."""
        if self._master >= 0:
            cols, rows = self._size
            self._set_size(cols, rows + 1)
            self._set_size(cols, rows)

    # -- the shell -----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        reading = asyncio.ensure_future(self._show())
        waiting = asyncio.ensure_future(self._child.wait())
        end = End(None, SandboxLostError("The sandbox is no longer running, and its terminals ended with it."))
        try:
            await asyncio.wait([reading, waiting], return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                # Nothing is on the terminal any more; a shell that closed it but runs on is of no use to anyone.
                await asyncio.wait([waiting], timeout=GRACE)
                if not waiting.done():
                    await self._child.kill(signal.SIGKILL)
            code = await waiting
            await asyncio.wait([reading], timeout=PATIENCE + GRACE)  # what was written before the end is still shown
            if not self._leaving:
                end = End(code if code >= 0 else 128 - code)
        except SandboxLostError:
            pass
        finally:
            # Nobody takes it up from here on: its number may soon be that of another connection.
            master, self._master = self._master, -1
            tasks: list[asyncio.Future[Any]] = [reading, waiting, *([self._writer] if self._writer else [])]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            os.close(master)
            self._finish(end)

    async def _show(self) -> None:
        while data := await read_some(self._master):
            self.stirred = time.monotonic()
            self._scrollback.add(data)
            for place, viewer in enumerate(self._viewers):
                viewer.offer(data if place == 0 else without_questions(data))
            if self._viewers and all(viewer.full for viewer in self._viewers):
                await self._wait_for_room()

    async def _wait_for_room(self) -> None:
        """One viewer who keeps up is enough to go on: the others fall behind."""
        try:
            async with asyncio.timeout(PATIENCE):
                while self._viewers and all(viewer.full for viewer in self._viewers):
                    self._room.clear()
                    await self._room.wait()
        except TimeoutError:
            for viewer in self._viewers:
                viewer.fall_behind()

    def _finish(self, end: End) -> None:
        self._end = end
        for viewer in self._viewers:
            viewer.offer(end)
        self._on_end()

    async def hang_up(self, *, leaving: bool = False) -> None:
        """``leaving``: because the sandbox goes to sleep, which is what viewers are told then."""
        self._leaving = leaving
        with contextlib.suppress(SandboxLostError):
            await self._child.kill(signal.SIGHUP)
            await self._child.kill(signal.SIGCONT)  # a stopped job hears nothing

    async def close(self, *, at_once: bool = False) -> None:
        """Hang up: everything that ran on this terminal ends, after a short time to save its work or at once."""
        with contextlib.suppress(SandboxLostError):
            if not at_once:
                await self.hang_up()
                await asyncio.wait([self._task], timeout=GRACE)
            else:
                await asyncio.sleep(0)  # one that is cancelled before its first step would clean up nothing
                if self._master >= 0:  # nor one that is cancelled while it does
                    self._task.cancel()
                await asyncio.gather(self._task, return_exceptions=True)
            await self._child.kill(signal.SIGKILL)
        await asyncio.gather(self._task, return_exceptions=True)


async def start_shell(
    portal: Portal, *, env: Mapping[str, str], size: tuple[int, int], shell: str | None, cwd: str
) -> tuple[str, Child, int]:
    """Start a shell on a new terminal: its name, the process and the terminal's master side."""
    check_cwd(cwd)
    check_text(shell or "", "The shell")
    environment = {**env, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    for program in [shell] if shell else SHELLS:
        try:
            child = await portal.spawn([program], env=environment, cwd=cwd, stdio=[], pty=size)
        except OSError as error:
            if "cwd" in str(error):
                raise FileNotFoundInSandboxError(f"The directory {cwd!r} does not exist.") from error
            continue
        assert child.master is not None
        return program, child, child.master
    raise FileNotFoundInSandboxError(
        f"There is no shell {shell or ' or '.join(SHELLS)!r} in the sandbox.", hint="Name one that its image has."
    )


def check_size(cols: int, rows: int) -> tuple[int, int]:
    if not (1 <= cols <= 1000 and 1 <= rows <= 1000):
        raise InvalidRequestError("A terminal has between 1 and 1000 columns and rows.")
    return cols, rows
