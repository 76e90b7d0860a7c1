"""SOCKS5 (RFC 1928): CONNECT, without authentication, to names and addresses."""

from __future__ import annotations

import socket

from skerry.egress.streams import PlainStream

GRANTED, REFUSED, UNREACHABLE, NO_SUCH_COMMAND, NO_SUCH_KIND = 0, 2, 4, 7, 8
_NOTHING_SUITS = b"\x05\xff"


class _Reader:
    """Exactly so many bytes at a time; what came beyond stays with the stream."""

    def __init__(self, stream: PlainStream) -> None:
        self._stream = stream
        self.held = b""

    async def take(self, size: int) -> bytes:
        while len(self.held) < size:
            data = await self._stream.recv()
            if not data:
                raise ConnectionResetError("it closed in the middle of a greeting")
            self.held += data
        taken, self.held = self.held[:size], self.held[size:]
        return taken


async def greet(stream: PlainStream) -> tuple[str, int]:
    """Whom the client wants to be connected to; one that wants anything else is told so and left."""
    reader = _Reader(stream)
    version, count = await reader.take(2)
    methods = await reader.take(count)
    if version != 5 or 0 not in methods:
        await stream.send(_NOTHING_SUITS)
        raise ConnectionResetError("no way to authenticate that both know")
    await stream.send(b"\x05\x00")
    version, command, _, kind = await reader.take(4)
    if kind == 1:
        host = socket.inet_ntop(socket.AF_INET, await reader.take(4))
    elif kind == 4:
        host = f"[{socket.inet_ntop(socket.AF_INET6, await reader.take(16))}]"
    elif kind == 3:
        host = (await reader.take((await reader.take(1))[0])).decode("utf-8", "replace")
    else:
        await reply(stream, NO_SUCH_KIND)
        raise ConnectionResetError("an address of no known kind")
    port = int.from_bytes(await reader.take(2), "big")
    if version != 5 or command != 1 or not port:
        await reply(stream, NO_SUCH_COMMAND)
        raise ConnectionResetError("something else than a connection")
    stream.put_back(reader.held)
    return host, port


async def reply(stream: PlainStream, code: int) -> None:
    await stream.send(answered(code))


def answered(code: int) -> bytes:
    return bytes((5, code, 0, 1)) + bytes(6)
