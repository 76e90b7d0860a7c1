"""HTTP/1.1 over a stream: h11 says what is a message, and everything that is passed on is written anew."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import h11

from skerry.egress.streams import Stream
from skerry.egress.turns import Turn, at_once

LARGEST_HEAD = 64 * 1024
PIECE = 16 * 1024
MANY = 64
"""So many events are one turn: a body may come in chunks of one byte."""
IDLE_SECONDS = 900.0
"""An answer may take this long to begin, and a body may pause this long: models think."""
_HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)

Headers = list[tuple[bytes, bytes]]


class Unclear(Exception):
    """A message of which not everybody would say the same."""


class Wire:
    def __init__(self, stream: Stream, role: type[h11.CLIENT] | type[h11.SERVER], turn: Turn = at_once) -> None:
        self.stream = stream
        self._turn = turn
        self._events = 0
        self.http = h11.Connection(role, max_incomplete_event_size=LARGEST_HEAD)
        self._later = b""

    async def next(self, seconds: float = IDLE_SECONDS) -> Any:
        """The next event; raises ``h11.RemoteProtocolError`` and ``TimeoutError``."""
        self._events += 1
        if self._events >= MANY:
            self._events = 0
            await self._turn()
        while (event := self.http.next_event()) is h11.NEED_DATA:
            if self._later:
                data = self._later
            else:
                async with asyncio.timeout(seconds):
                    data = await self.stream.recv()
            # A head in small pieces: h11 bounds only what is incomplete.
            size = PIECE if self.http.their_state in (h11.IDLE, h11.SEND_RESPONSE) else len(data)
            self._later = data[size:]
            self.http.receive_data(data[:size])
        return event

    async def head(self, seconds: float) -> h11.Request | None:
        """The head of the next request, all of it within so many seconds; None when no more come."""
        async with asyncio.timeout(seconds):
            event = await self.next(seconds)
        return event if isinstance(event, h11.Request) else None

    async def send(self, *events: Any) -> None:
        pieces = [self.http.send(event) for event in events]
        await self.stream.send(b"".join(piece for piece in pieces if piece))

    @property
    def rest(self) -> bytes:
        """What came after the last message that was HTTP."""
        return bytes(self.http.trailing_data[0]) + self._later


def end_to_end(headers: h11._headers.Headers | Iterable[tuple[bytes, bytes]]) -> Headers:
    """Headers as they came, without those that are only for the next hop, or were declared to be."""
    raw = list(headers.raw_items()) if isinstance(headers, h11._headers.Headers) else list(headers)
    named = {token for name, value in raw if name.lower() == b"connection" for token in _tokens(value)}
    hop = _HOP_BY_HOP | named
    return [(name, value) for name, value in raw if name.lower() not in hop]


def framing(headers: Sequence[tuple[bytes, bytes]]) -> Headers:
    """The one header that says how long the body is; raises ``Unclear`` where there are two."""
    lengths = {value for name, value in headers if name.lower() == b"content-length"}
    chunked = any(name.lower() == b"transfer-encoding" for name, _ in headers)
    if chunked and lengths:
        raise Unclear("both a length and chunks")
    if chunked:
        return [(b"Transfer-Encoding", b"chunked")]
    return [(b"Content-Length", length) for length in lengths]


def without(headers: Headers, *names: bytes) -> Headers:
    return [(name, value) for name, value in headers if name.lower() not in names]


def wants_upgrade(headers: Sequence[tuple[bytes, bytes]]) -> bytes | None:
    """What a request wants the connection to become; only WebSockets are passed on."""
    named = {token for name, value in headers if name.lower() == b"connection" for token in _tokens(value)}
    kinds = [value for name, value in headers if name.lower() == b"upgrade"]
    return kinds[0] if b"upgrade" in named and [kind.lower() for kind in kinds] == [b"websocket"] else None


def _tokens(value: bytes) -> list[bytes]:
    return [token.strip().lower() for token in value.split(b",")]
