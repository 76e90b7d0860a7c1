"""Bytes to and from one side of a connection: in the clear, or under TLS."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from typing import Protocol

from skerry.egress.turns import LARGE, Turn, at_once

CHUNK = LARGE


class Stream(Protocol):
    async def recv(self) -> bytes:
        """What has come, as much as there is; nothing at the end."""
        ...

    async def send(self, data: bytes) -> None: ...

    async def finish(self) -> None:
        """Say that nothing more will be sent."""
        ...


class PlainStream:
    """A non-blocking socket. What was read from it already comes first."""

    def __init__(
        self,
        sock: socket.socket,
        first: bytes = b"",
        count: Callable[[int, int], None] | None = None,
        turn: Turn = at_once,
    ) -> None:
        self.sock = sock
        self._first = first
        self._count = count
        self._turn = turn
        self._since = 0
        self._loop = asyncio.get_running_loop()

    async def recv(self) -> bytes:
        if self._first:
            first, self._first = self._first, b""
            return first
        if self._since >= LARGE:
            self._since = 0
            await self._turn()
        data = await self._loop.sock_recv(self.sock, CHUNK)
        self._since += len(data)
        if self._count is not None:
            self._count(len(data), 0)
        return data

    async def send(self, data: bytes) -> None:
        if data:
            await self._loop.sock_sendall(self.sock, data)
            if self._count is not None:
                self._count(0, len(data))

    async def finish(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)

    def put_back(self, data: bytes) -> None:
        self._first = data + self._first

    def take(self) -> bytes:
        """What was read already and not yet handed out; the socket has the rest."""
        first, self._first = self._first, b""
        return first


class SecureStream:
    """TLS over another stream, as a client or as a server."""

    def __init__(self, inner: Stream, context: ssl.SSLContext, *, server_side: bool, name: str | None = None) -> None:
        self._inner = inner
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side, server_hostname=name)
        self._sending = asyncio.Lock()

    async def shake_hands(self) -> None:
        while True:
            try:
                self._tls.do_handshake()
                await self._flush()
                return
            except ssl.SSLWantReadError:
                await self._flush()
                if not await self._feed():
                    raise ConnectionResetError("it closed before TLS was agreed on") from None
            except ssl.SSLError:
                await self._flush()  # the alert that says why
                raise

    async def recv(self) -> bytes:
        pieces: list[bytes] = []
        size = 0
        while size < CHUNK:
            try:
                piece = self._tls.read(CHUNK)
            except ssl.SSLWantReadError:
                if pieces:
                    break
                await self._flush()
                if not await self._feed():
                    return b""
                continue
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                break
            if not piece:
                break
            pieces.append(piece)
            size += len(piece)
        return b"".join(pieces)

    async def send(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._tls.write(view[:CHUNK]) :]
            await self._flush()

    async def finish(self) -> None:
        with contextlib.suppress(ssl.SSLError, OSError):
            try:
                self._tls.unwrap()
            except ssl.SSLWantReadError:
                pass
            await self._flush()
            await self._inner.finish()

    async def _feed(self) -> bool:
        data = await self._inner.recv()
        if data:
            self._incoming.write(data)
        else:
            self._incoming.write_eof()
        return bool(data)

    async def _flush(self) -> None:
        # One after the other: two senders' records must not mix on the way.
        async with self._sending:
            while data := self._outgoing.read():
                await self._inner.send(data)
