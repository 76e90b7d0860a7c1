"""A WebSocket to the control plane (RFC 6455), from the client's side."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import struct
import time
from typing import Any
from urllib.parse import urlsplit

from reach import reach

LARGEST = 64 * 2**20
_MAGIC = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_TEXT, _BINARY, _CLOSE, _PING, _PONG = 1, 2, 8, 9, 10


class Refused(Exception):
    """The handshake was answered with something else; ``status`` says what."""

    def __init__(self, status: int) -> None:
        super().__init__(f"The control plane answered with status {status}.")
        self.status = status


class Closed(Exception):
    """The connection is over; ``code`` is what the other side gave as its reason, if it gave one."""

    def __init__(self, code: int | None = None) -> None:
        super().__init__(f"The connection was closed ({code}).")
        self.code = code


class WebSocket:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._sending = asyncio.Lock()
        self.heard = time.monotonic()
        """When the other side was heard last, be it that it answered a ping."""

    async def ping(self) -> None:
        await self._frame(_PING, b"")

    async def send(self, text: str) -> None:
        await self._frame(_TEXT, text.encode())

    async def receive(self) -> str:
        """The next message. Raises ``Closed``."""
        whole = b""
        while True:
            try:
                final, opcode, data = await self._next()
            except (OSError, asyncio.IncompleteReadError, EOFError):
                raise Closed() from None
            if opcode == _PING:
                await self._frame(_PONG, data)
            elif opcode == _CLOSE:
                code = struct.unpack("!H", data[:2])[0] if len(data) >= 2 else None
                try:
                    await self._frame(_CLOSE, data[:2])
                except Closed:
                    pass
                raise Closed(code)
            elif opcode != _PONG:
                whole += data
                if len(whole) > LARGEST:
                    raise Closed(1009)
                if final:
                    return whole.decode("utf-8", "replace")

    async def close(self, code: int = 1000) -> None:
        try:
            await asyncio.wait_for(self._frame(_CLOSE, struct.pack("!H", code)), 1)
        except (Closed, asyncio.TimeoutError):
            pass
        self._writer.close()

    def abort(self) -> None:
        transport: Any = self._writer.transport
        transport.abort()

    async def _frame(self, opcode: int, data: bytes) -> None:
        mask = os.urandom(4)
        length = len(data)
        if length < 126:
            head = struct.pack("!BB", 0x80 | opcode, 0x80 | length)
        elif length < 1 << 16:
            head = struct.pack("!BBH", 0x80 | opcode, 0x80 | 126, length)
        else:
            head = struct.pack("!BBQ", 0x80 | opcode, 0x80 | 127, length)
        try:
            async with self._sending:
                self._writer.write(head + mask + _masked(data, mask))
                await self._writer.drain()
        except (OSError, RuntimeError):
            raise Closed() from None

    async def _next(self) -> tuple[bool, int, bytes]:
        first, second = await self._reader.readexactly(2)
        self.heard = time.monotonic()
        length = second & 0x7F
        if length == 126:
            (length,) = struct.unpack("!H", await self._reader.readexactly(2))
        elif length == 127:
            (length,) = struct.unpack("!Q", await self._reader.readexactly(8))
        if length > LARGEST:
            raise EOFError
        mask = await self._reader.readexactly(4) if second & 0x80 else b""
        data = await self._reader.readexactly(length)
        return bool(first & 0x80), first & 0x0F, _masked(data, mask) if mask else data


async def connect(url: str, headers: dict[str, str], patience: float = 20.0) -> WebSocket:
    """Raises ``Refused``, or ``OSError`` where nobody answers."""
    parts = urlsplit(url)
    try:
        reader, writer = await asyncio.wait_for(reach(parts), patience)
    except asyncio.TimeoutError:
        raise OSError("The control plane does not answer.") from None
    try:
        return await asyncio.wait_for(_shake_hands(reader, writer, parts, headers), patience)
    except asyncio.TimeoutError:
        writer.close()
        raise OSError("The control plane does not answer.") from None
    except BaseException:
        writer.close()
        raise


async def _shake_hands(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, parts: Any, headers: dict[str, str]
) -> WebSocket:
    key = base64.b64encode(os.urandom(16))
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    lines = {
        "Host": parts.netloc,
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": key.decode(),
        **headers,
    }
    head = f"GET {target} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items()) + "\r\n"
    writer.write(head.encode("latin-1"))
    await writer.drain()
    try:
        answer = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = int(answer[0].split(" ", 2)[1])
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, IndexError, ValueError):
        raise OSError("The control plane's answer makes no sense.") from None
    if status != 101:
        raise Refused(status)
    accept = base64.b64encode(hashlib.sha1(key + _MAGIC).digest()).decode()
    given = dict(line.lower().split(": ", 1) for line in answer[1:] if ": " in line)
    if given.get("sec-websocket-accept") != accept.lower():
        raise OSError("The control plane's answer is not that of a WebSocket.")
    return WebSocket(reader, writer)


def _masked(data: bytes, mask: bytes) -> bytes:
    length = len(data)
    key = (mask * (length // 4 + 1))[:length]
    return (int.from_bytes(data, "big") ^ int.from_bytes(key, "big")).to_bytes(length, "big")
