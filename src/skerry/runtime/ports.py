"""Waiting until something inside listens, or answers."""

from __future__ import annotations

import asyncio
import contextlib
import socket

from skerry.errors import InvalidRequestError
from skerry.models import WaitResult
from skerry.portal.contract import Portal

FIRST_PAUSE, LAST_PAUSE = 0.01, 0.2
ANSWER_TIMEOUT = 5.0


async def port_opens(
    portal: Portal, port: int, *, mode: str, path: str = "/", status_min: int = 200, status_max: int = 399
) -> WaitResult:
    """Returns when the port accepts a connection or, in http mode, answers with a status in the range."""
    if any(ord(c) <= 32 or ord(c) > 126 for c in path) or not path.startswith("/"):
        raise InvalidRequestError("The path to ask for must begin with / and hold no spaces or control characters.")
    pause = FIRST_PAUSE
    while True:
        with contextlib.suppress(OSError, TimeoutError):
            sock = await portal.connect(port)
            with sock:
                if mode == "tcp":
                    return WaitResult(port=port)
                async with asyncio.timeout(ANSWER_TIMEOUT):
                    status = await _status(sock, port, path)
                if status_min <= status <= status_max:
                    return WaitResult(port=port, status_code=status)
        await asyncio.sleep(pause)
        pause = min(pause * 1.5, LAST_PAUSE)


async def _status(sock: socket.socket, port: int, path: str) -> int:
    loop = asyncio.get_running_loop()
    request = f"GET {path} HTTP/1.1\r\nHost: localhost:{port}\r\nConnection: close\r\nUser-Agent: skerry\r\n\r\n"
    await loop.sock_sendall(sock, request.encode())
    line = b""
    while b"\n" not in line and len(line) < 4096:
        data = await loop.sock_recv(sock, 4096)
        if not data:
            break
        line += data
    words = line.split(b"\n", 1)[0].split()
    return int(words[1]) if len(words) > 1 and words[0].startswith(b"HTTP/") and words[1].isdigit() else 0
