"""Ports of a bridge's sandbox. A tunnel speaks HTTP and WebSockets under a name of its own, and nothing else.

Whoever connects to a port gets a socket as if it were the port's own; requests that are written to it are sent to the
tunnel with the tunnel's host name and path.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import socket
import ssl
from collections.abc import Awaitable, Callable
from urllib.parse import SplitResult, urlsplit

from skerry.errors import ProviderUnreachableError
from skerry.providers.cloudflare.reach import Reach

LONGEST_HEAD = 256 << 10
CHUNK = 1 << 16
_DROPPED = re.compile(rb"(?:host|connection|keep-alive)\s*:", re.IGNORECASE)
_UPGRADE = re.compile(rb"^connection\s*:.*\bupgrade\b", re.IGNORECASE | re.MULTILINE)


class Tunnels:
    def __init__(self, bridge: Reach, id: str, listens: Callable[[int], Awaitable[bool]]) -> None:
        self._bridge, self._id, self._listens = bridge, id, listens
        self._addresses: dict[int, SplitResult] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def connect(self, port: int) -> socket.socket:
        """Raises ``ConnectionRefusedError`` where nothing listens, which a tunnel does not tell from other failures."""
        if not await self._listens(port):
            raise OSError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        if port not in self._addresses:
            self._addresses[port] = urlsplit(await self._bridge.tunnel(self._id, port))
        ours, theirs = _pair()
        task = asyncio.get_running_loop().create_task(_relay(ours, self._addresses[port]))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return theirs

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a TCP connection: who connects to a port sets what only TCP has."""
    with socket.create_server(("127.0.0.1", 0), backlog=8) as server:
        theirs = socket.create_connection(server.getsockname())
        while True:
            ours, peer = server.accept()
            if peer == theirs.getsockname():  # any program of this machine could have come in between
                break
            ours.close()
    for end in (ours, theirs):
        end.setblocking(False)
    return ours, theirs


async def _relay(ours: socket.socket, address: SplitResult) -> None:
    """One request and its answer; connections that could carry more are closed after the first."""
    reader, writer = await asyncio.open_connection(sock=ours, limit=LONGEST_HEAD)
    try:
        with contextlib.suppress(
            OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ProviderUnreachableError
        ):
            head = await reader.readuntil(b"\r\n\r\n")
            far_reader, far_writer = await _open(address)
            try:
                far_writer.write(_rewritten(head, address))
                sending = asyncio.ensure_future(_copy(reader, far_writer))
                try:
                    await _copy(far_reader, writer)
                finally:
                    sending.cancel()
                    await asyncio.gather(sending, return_exceptions=True)
            finally:
                far_writer.close()
    finally:
        writer.close()


async def _open(address: SplitResult) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    name = address.hostname or ""
    secure = address.scheme == "https"
    # Names below localhost are this machine (RFC 6761), which not every resolver knows.
    host = "127.0.0.1" if name == "localhost" or name.endswith(".localhost") else name
    context = ssl.create_default_context() if secure else None
    port = address.port or (443 if secure else 80)
    return await asyncio.open_connection(host, port, ssl=context, server_hostname=name if secure else None)


def _rewritten(head: bytes, address: SplitResult) -> bytes:
    line, _, fields = head.partition(b"\r\n")
    method, _, rest = line.partition(b" ")
    path, _, version = rest.rpartition(b" ")
    path = address.path.rstrip("/").encode() + path
    if address.query:
        path += (b"&" if b"?" in path else b"?") + address.query.encode()
    upgrade = _UPGRADE.search(fields) is not None
    kept = [field for field in fields.split(b"\r\n") if field and not _DROPPED.match(field)]
    kept.append(b"Connection: Upgrade" if upgrade else b"Connection: close")
    return b"\r\n".join([b" ".join((method, path, version)), b"Host: " + address.netloc.encode(), *kept, b"", b""])


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(CHUNK):
            writer.write(data)
            await writer.drain()
