"""A connection to the control plane or to a program of this sandbox: straight, or through the sandbox's proxy."""

from __future__ import annotations

import asyncio
import socket
from typing import Any
from urllib.parse import SplitResult, urlsplit

LIMIT = 1 << 20
HERE = ("127.0.0.1", "localhost")


class NotAllowed(OSError):
    """The sandbox's proxy does not let it go there."""


async def reach(url: SplitResult) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Raises ``OSError`` where nobody answers."""
    safe = url.scheme in ("https", "wss")
    host, port = url.hostname or "", url.port or (443 if safe else 80)
    context: Any = None
    if safe:
        import ssl

        context = ssl.create_default_context()
    proxy = None if host in HERE else _proxy("https" if safe else "http", host)
    if proxy is None:
        return await asyncio.open_connection(host, port, ssl=context, limit=LIMIT)
    connection = await _through(proxy, host, port)
    return await asyncio.open_connection(
        sock=connection, ssl=context, server_hostname=host if safe else None, limit=LIMIT
    )


async def _through(proxy: SplitResult, host: str, port: int) -> socket.socket:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(proxy.hostname, proxy.port or 80, type=socket.SOCK_STREAM)
    connection = socket.socket(found[0][0], socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        await loop.sock_connect(connection, found[0][4])
        asked = f"CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n"
        await loop.sock_sendall(connection, asked.encode("latin-1"))
        answer = b""
        while b"\r\n\r\n" not in answer:  # behind it comes nothing until we have spoken
            piece = await loop.sock_recv(connection, 4096)
            answer += piece
            if not piece or len(answer) > LIMIT:
                raise OSError("The sandbox's proxy does not answer.")
        if answer.split(b" ", 2)[1:2] != [b"200"]:
            raise NotAllowed(f"The sandbox may not reach {host}:{port}.")
    except BaseException:
        connection.close()
        raise
    return connection


def _proxy(scheme: str, host: str) -> SplitResult | None:
    from urllib.request import getproxies, proxy_bypass

    known = getproxies()
    if scheme not in known or proxy_bypass(host):
        return None
    found = urlsplit(known[scheme])
    return found if found.scheme == "http" and found.hostname else None
