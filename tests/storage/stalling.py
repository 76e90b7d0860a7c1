"""A way to a server that can be made to go dead: connections stay open, and nothing moves on them any more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit


class Stalling:
    def __init__(self, endpoint: str) -> None:
        parts = urlsplit(endpoint)
        self._host, self._port = parts.hostname, parts.port
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server
        self.endpoint = ""

    def stall(self) -> None:
        self._flowing.clear()

    def flow(self) -> None:
        self._flowing.set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.endpoint = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        for source, target in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(self._carry(source, target))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _carry(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(1 << 16):
                await self._flowing.wait()
                target.write(data)
                await target.drain()
        except OSError:
            pass
        finally:
            target.close()


@asynccontextmanager
async def stalling(endpoint: str) -> AsyncIterator[Stalling]:
    way = Stalling(endpoint)
    await way.start()
    try:
        yield way
    finally:
        await way.stop()
