"""The first words in a tunnel: which host they name.

A tunnel was asked for by name, and hosts that share a front answer to whatever name is said to them once it is open.
TLS says it in its first message, in the clear; HTTP says it in every request.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from skerry.egress.relay import Quiet, readable

TLS_RECORD = 0x16
LARGEST = 64 * 1024
DENIED = bytes((21, 3, 3, 0, 2, 2, 49))
"""TLS's own words for it: a fatal alert, access denied."""
_CLIENT_HELLO, _SERVER_NAME, _HOST_NAME = 1, 0, 0


class Garbled(Exception):
    """It begins as TLS or HTTP and does not go on as that."""


@dataclass(frozen=True)
class Opening:
    """What a client said first, and what that is: ``names`` for TLS, ``http``, or neither."""

    data: bytes
    names: Sequence[str] | None = None
    http: bool = False


async def overhear(inside: socket.socket, outside: socket.socket, said: bytes, head: float, idle: float) -> Opening:
    """Wait for whoever speaks first; where that is the host it is neither TLS nor HTTP, and no name will be said."""
    loop = asyncio.get_running_loop()
    if not said:
        async with asyncio.timeout(idle):
            if inside not in await readable(inside, outside):
                return Opening(b"")
        said = await loop.sock_recv(inside, LARGEST)
    async with asyncio.timeout(head):
        while said and (opening := read(said)) is None:
            more = await loop.sock_recv(inside, LARGEST)
            if not more:
                raise Quiet
            said += more
    return Opening(b"") if not said else opening or Opening(said)


def read(said: bytes) -> Opening | None:
    """None as long as it can still become either; raises ``Garbled``."""
    if len(said) > LARGEST:
        raise Garbled
    if said[0] == TLS_RECORD:
        names = server_names(said)
        return None if names is None else Opening(said, names)
    text = said.lstrip(b"\r\n")
    line, end, _ = text.partition(b"\n")
    if not end:
        # Whoever sends a request byte by byte is waited for; what is no text is no request.
        return None if all(byte in b"\t\r" or 32 <= byte < 127 for byte in line) else Opening(said)
    return Opening(said, http=b"http/1" in line.lower())


def server_names(data: bytes) -> Sequence[str] | None:
    """The names in the ClientHello that ``data`` begins with, or None if it goes on; raises ``Garbled``."""
    message = b""
    while len(message) < 4 or len(message) < 4 + int.from_bytes(message[1:4], "big"):
        if len(data) < 5:
            return None
        size = int.from_bytes(data[3:5], "big")
        if data[0] != TLS_RECORD or data[1] != 3 or not size:
            raise Garbled
        if len(data) < 5 + size:
            return None
        message, data = message + data[5 : 5 + size], data[5 + size :]
        if message[0] != _CLIENT_HELLO or len(message) > LARGEST:
            raise Garbled
    reader = _Reader(message[4 : 4 + int.from_bytes(message[1:4], "big")])
    reader.take(2 + 32)
    reader.block(1), reader.block(2), reader.block(1)
    extensions = _Reader(reader.block(2) if reader.left else b"")
    names: list[str] = []
    while extensions.left:
        kind, body = int.from_bytes(extensions.take(2), "big"), extensions.block(2)
        if kind == _SERVER_NAME:
            entries = _Reader(_Reader(body).block(2))
            while entries.left:
                if entries.take(1)[0] != _HOST_NAME:
                    raise Garbled
                names.append(entries.block(2).decode("ascii", "replace"))
    return names


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data

    @property
    def left(self) -> int:
        return len(self._data)

    def take(self, size: int) -> bytes:
        if size > len(self._data):
            raise Garbled
        taken, self._data = self._data[:size], self._data[size:]
        return taken

    def block(self, width: int) -> bytes:
        """So many bytes as the first ``width`` of them say."""
        return self.take(int.from_bytes(self.take(width), "big"))
