"""A terminal of a bridge: a WebSocket there, a socket here that stands for the terminal's other side."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal as signals
import socket
from collections.abc import Callable, Collection, Mapping, Sequence

from websockets.exceptions import ConnectionClosed

from skerry.errors import ProviderError, SandboxLostError, SkerryError
from skerry.providers.cloudflare.reach import Line, Reach
from skerry.runtime.output import read_some, write_all

ROOT = "/workspace"


class BridgeTerminal:
    """The shell on it. It has no pid that a bridge would tell: it is ended by ending its session."""

    pid = 0

    @classmethod
    async def open(
        cls, bridge: Reach, id: str, shell: str, env: Mapping[str, str], cwd: str, size: tuple[int, int]
    ) -> BridgeTerminal:
        session = f"skerry-{secrets.token_hex(6)}"
        inside = cwd == ROOT or cwd.startswith(ROOT + "/")  # a bridge knows no other place to begin in
        await bridge.create_session(id, session, cwd=cwd if inside else ROOT, env=env)
        try:
            connection = await bridge.open_terminal(id, cols=size[0], rows=size[1], session=session, shell=shell)
            return cls(bridge, id, session, connection)
        except BaseException:
            with contextlib.suppress(SkerryError):
                await bridge.delete_session(id, session)
            raise

    def __init__(self, bridge: Reach, id: str, session: str, connection: Line) -> None:
        self.on_end: Callable[[], None] = lambda: None
        self._bridge, self._id, self._session, self._connection = bridge, id, session, connection
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        self.master: int | None = theirs.detach()
        self._ours = ours.detach()
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._sizes: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
        self.task = asyncio.get_running_loop().create_task(self._run())

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    async def children(self) -> Sequence[int]:
        return []

    def resize(self, cols: int, rows: int) -> None:
        self._sizes.put_nowait((cols, rows))

    async def kill(
        self, signal: int, *, tree: bool = True, spare: Collection[int] = (), spare_root: bool = False
    ) -> int:
        if signal not in (signals.SIGHUP, signals.SIGTERM, signals.SIGKILL) or self._ended.done():
            return 0
        await self.end()
        return 1

    async def end(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    abandon = end

    async def _run(self) -> None:
        code = -int(signals.SIGHUP)
        tasks = [asyncio.ensure_future(work) for work in (self._type(), self._tell_sizes())]
        try:
            code = await self._show()
            self._ended.set_result(code)
        except (ConnectionClosed, ProviderError, OSError) as error:
            reason = error.message if isinstance(error, ProviderError) else "the bridge closed its connection"
            self._ended.set_exception(SandboxLostError(f"The terminal is gone: {reason}."))
            self._ended.exception()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if not self._ended.done():
                self._ended.set_result(code)
            os.close(self._ours)
            await self._connection.close()
            with contextlib.suppress(SkerryError):
                await self._bridge.delete_session(self._id, self._session)
            self.on_end()

    async def _show(self) -> int:
        async for message in self._connection:
            if isinstance(message, bytes):
                await write_all(self._ours, message)
                continue
            try:
                facts = json.loads(message)
                kind, code = facts.get("type"), facts.get("code")
            except (ValueError, AttributeError, RecursionError):
                raise ProviderError("The bridge sent a terminal something that is no message") from None
            if kind == "exit":
                return code if type(code) is int else 0
            if kind == "error":
                raise ProviderError(f"The bridge ended the terminal: {str(facts.get('message'))[:200]}")
        return -int(signals.SIGHUP)

    async def _type(self) -> None:
        while data := await read_some(self._ours):
            await self._connection.send(data)
        await self._connection.close()

    async def _tell_sizes(self) -> None:
        while True:
            cols, rows = await self._sizes.get()
            await self._connection.send(json.dumps({"type": "resize", "cols": cols, "rows": rows}))
