"""Ports of this machine and of a sandbox, joined: `skerry forward`."""

from __future__ import annotations

import asyncio
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable
from typing import Any

from skerry.client._async.connection import AsyncLink
from skerry.client.frames import AsyncFrames
from skerry.errors import PortInUseError, ServerUnreachableError, SkerryError
from skerry.relay import CHANNELS, PIECE, Channels, close, ready

Say = Callable[[str], None]


class Forward:
    """A port of this machine that leads into the sandbox.

    Its connections share one WebSocket, which is opened by the first of them, and anew when it was lost.
    """

    def __init__(self, link: AsyncLink, inside: int, say: Say) -> None:
        self._link = link
        self._inside = inside
        self._say = say
        self._lock = asyncio.Lock()
        self._server: asyncio.Server | None = None
        self._frames: AsyncFrames | None = None
        self._channels: Channels | None = None
        self._running: asyncio.Task[None] | None = None
        self._carrying: set[asyncio.Task[Any]] = set()

    async def open(self, address: str, port: int) -> int:
        """Listen; the port, which was chosen by the system if 0 was asked for."""
        try:
            self._server = await asyncio.start_server(self._accept, address, port, limit=PIECE, backlog=CHANNELS)
        except OSError as error:
            raise PortInUseError(
                f"Cannot listen on {address}:{port}: {error.strerror or error}.", hint="Choose another local port."
            ) from error
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        await self._hang_up()
        for task in self._carrying:
            task.cancel()
        await asyncio.gather(*self._carrying, return_exceptions=True)

    async def _accept(self, reader: StreamReader, writer: StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._carrying.add(task)
        try:
            channels = await self._reach()
        except SkerryError as error:
            self._say(str(error))
            await close(writer, reset=True)
        else:
            await channels.carry(reader, writer)
        finally:
            self._carrying.discard(task)

    async def _reach(self) -> Channels:
        async with self._lock:
            if self._channels is None or self._running is None or self._running.done():
                await self._hang_up()
                self._frames = await self._link.frames(f"/ports/{self._inside}/tcp", {"channels": "true"})
                await ready(self._frames)
                self._channels = Channels(self._frames, told=self._say)
                self._running = asyncio.create_task(self._run(self._channels))
            return self._channels

    async def _run(self, channels: Channels) -> None:
        try:
            await channels.run()
        except SkerryError as error:
            self._say(str(error))
        finally:
            await channels.close()

    async def _hang_up(self) -> None:
        running, self._running = self._running, None
        frames, self._frames = self._frames, None
        if running is not None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        if frames is not None:
            await frames.close()


async def reverse(
    link: AsyncLink, inside: int, address: str, port: int, say: Say, opened: Callable[[], None] | None = None
) -> None:
    """Let a port of this machine appear inside, on loopback, until cancelled. Raises when it cannot go on."""

    async def connect() -> tuple[StreamReader, StreamWriter]:
        try:
            return await asyncio.open_connection(address, port, limit=PIECE)
        except OSError as error:
            say(f"Nothing listens on {address}:{port} here: {error.strerror or error}.")
            raise

    frames = await link.frames(f"/ports/{inside}/listen", {})
    try:
        await ready(frames)
        if opened is not None:
            opened()
        channels = Channels(frames, connect)
        try:
            await channels.run()
        finally:
            await channels.close()
    finally:
        await frames.close()
    raise ServerUnreachableError(f"The server closed the connection; port {inside} inside is gone.")
