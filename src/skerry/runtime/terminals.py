"""The terminals of a sandbox: one for each session that is asked for by name, and any number beside."""

from __future__ import annotations

import asyncio
import math
import secrets
import time

from skerry.errors import ConflictError, FileNotFoundInSandboxError, TerminalNotFoundError
from skerry.models import TerminalInfo
from skerry.runtime.sessions import DEFAULT, Sessions
from skerry.runtime.terminal import Terminal, check_size, start_shell

LIMIT = 64
# A terminal on which nothing has moved for so long no longer counts as use of the sandbox.
QUIET = 60.0
AGAIN = 0.5


class Terminals:
    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._terminals: dict[str, Terminal] = {}
        self._of_session: dict[str, Terminal] = {}
        self._opening = asyncio.Lock()
        self._again: asyncio.Task[None] | None = None

    async def of_session(
        self,
        session: str = DEFAULT,
        *,
        cols: int = 80,
        rows: int = 24,
        shell: str | None = None,
        cwd: str | None = None,
    ) -> Terminal:
        """The terminal of a session, opened now if it has none; then the other arguments say how."""
        async with self._opening:
            terminal = self._of_session.get(session)
            if terminal is None:
                terminal = await self._open(session, (cols, rows), shell, cwd)
                self._of_session[session] = terminal
            return terminal

    async def open(
        self,
        session: str = DEFAULT,
        *,
        cols: int = 80,
        rows: int = 24,
        shell: str | None = None,
        cwd: str | None = None,
    ) -> Terminal:
        """Another terminal, with the directory and variables that the session has now."""
        async with self._opening:
            return await self._open(session, (cols, rows), shell, cwd)

    async def _open(self, name: str, size: tuple[int, int], shell: str | None, cwd: str | None) -> Terminal:
        check_size(*size)
        if len(self._terminals) >= LIMIT:
            raise ConflictError(
                f"The sandbox has {LIMIT} terminals already, which is as many as there may be.",
                hint="Close some: DELETE …/terminals/{tid}, or `exit` in them.",
            )
        session = self._sessions.find(name)
        there, env = await session.state()
        try:
            started = await start_shell(session.portal, env=env, size=size, shell=shell, cwd=cwd or there)
        except FileNotFoundInSandboxError:
            if cwd is not None:
                raise
            # The session may stand in a directory that has been removed.
            started = await start_shell(session.portal, env=env, size=size, shell=shell, cwd="/")
        id = f"t-{secrets.token_hex(4)}"
        program, child, master = started
        terminal = Terminal(id, name, program, child, master, size, lambda: self._forget(id))
        self._terminals[id] = terminal
        return terminal

    def _forget(self, id: str) -> None:
        terminal = self._terminals.pop(id, None)
        if terminal is not None and self._of_session.get(terminal.session) is terminal:
            del self._of_session[terminal.session]

    def find(self, id: str) -> Terminal:
        terminal = self._terminals.get(id)
        if terminal is None:
            raise TerminalNotFoundError(
                f"There is no terminal {id!r}; its shell may have ended.",
                hint="Open one without naming a terminal.",
                details={"availableTerminals": sorted(self._terminals)},
            )
        return terminal

    def list(self) -> list[TerminalInfo]:
        return [terminal.info() for terminal in self._terminals.values()]

    def silent_for(self) -> float:
        """Seconds since a terminal last counted as use: none while bytes flow, infinitely many without terminals."""
        last = max((terminal.stirred for terminal in self._terminals.values()), default=-math.inf)
        return max(0.0, time.monotonic() - last - QUIET)

    def active(self) -> int:
        """How many count as use of the sandbox now."""
        since = time.monotonic() - QUIET
        return sum(terminal.stirred > since for terminal in self._terminals.values())

    async def hang_up(self) -> None:
        """Tell everything on every terminal that nobody is there any more; shells end by that, unlike by SIGTERM."""
        await self._hang_up()
        self._again = asyncio.create_task(self._hang_up_again())

    async def _hang_up(self) -> None:
        await asyncio.gather(*(terminal.hang_up(leaving=True) for terminal in list(self._terminals.values())))

    async def _hang_up_again(self) -> None:
        """A shell that is just starting may miss it."""
        while self._terminals:
            await asyncio.sleep(AGAIN)
            await self._hang_up()

    async def close(self) -> None:
        if self._again is not None:
            self._again.cancel()
            await asyncio.gather(self._again, return_exceptions=True)
        await asyncio.gather(*(terminal.close(at_once=True) for terminal in list(self._terminals.values())))
