"""HTTP to a program inside of a sandbox, through its portal: no network, no proxy, no name.

The program is as untrusted as everything inside, so what it answers is bounded in size and in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import h11

LARGEST_ANSWER = 64 << 20
LARGEST_LINE = 16 << 20
CONNECT_TIMEOUT = 5.0

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

Connect = Callable[[], Awaitable[socket.socket]]


def parsed(data: bytes | bytearray) -> Any:
    """JSON whose texts can be written again. Programs cut texts in the middle of an emoji, and half of one is none."""
    found = json.loads(data)
    if _SURROGATE.search(data):
        text = json.dumps(found, ensure_ascii=False).encode("utf-16", "surrogatepass")
        return json.loads(text.decode("utf-16", "replace"))
    return found


class HttpFailed(Exception):
    """It could not be reached, or did not speak HTTP, or said no: then ``status`` says how."""

    def __init__(self, message: str, status: int | None = None, body: bytes = b"") -> None:
        super().__init__(message)
        self.status = status
        self.body = body


class Http:
    """A connection for each request: they cost a fraction of a millisecond, and none can be stale."""

    def __init__(self, connect: Connect, headers: Mapping[str, str] | None = None) -> None:
        self._connect = connect
        self._headers = dict(headers or {})

    async def json(self, method: str, path: str, body: Any = None, timeout: float = 30.0) -> Any:
        """What is answered, parsed; None for nothing. Raises ``HttpFailed``, also for a status of 400 and more."""
        try:
            async with asyncio.timeout(timeout), self._exchange(method, path, body) as answer:
                data = bytearray()
                async for piece in answer.body():
                    data += piece
                    if len(data) > LARGEST_ANSWER:
                        raise HttpFailed(f"The answer to {method} {path} is too large.")
        except TimeoutError:
            raise HttpFailed(f"{method} {path} was not answered within {timeout:g} seconds.") from None
        if answer.status >= 400:
            raise HttpFailed(f"{method} {path} was answered with {answer.status}.", answer.status, bytes(data[:10_000]))
        if not data:
            return None
        try:
            return parsed(data)
        except ValueError:
            raise HttpFailed(
                f"The answer to {method} {path} is no JSON.", answer.status, bytes(data[:10_000])
            ) from None

    @asynccontextmanager
    async def events(self, path: str, silence: float) -> AsyncIterator[AsyncGenerator[dict[str, Any], None]]:
        """The JSON of each server-sent event; raises ``HttpFailed`` when it breaks off, or is silent for too long."""
        async with self._exchange("GET", path, None, accept="text/event-stream") as answer:
            if answer.status != 200:
                raise HttpFailed(f"GET {path} was answered with {answer.status}.", answer.status)
            async with contextlib.aclosing(_events(answer, path, silence)) as events:
                yield events

    @asynccontextmanager
    async def _exchange(
        self, method: str, path: str, body: Any, accept: str = "application/json"
    ) -> AsyncIterator[_Answer]:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                sock = await self._connect()
                reader, writer = await asyncio.open_connection(sock=sock)
        except (OSError, TimeoutError) as error:
            raise HttpFailed(f"Nothing answers {method} {path}: {error}.") from error
        try:
            raw = b"" if body is None else json.dumps(body).encode()
            headers = {**self._headers, "host": "localhost", "accept": accept, "connection": "close"}
            if body is not None:
                headers |= {"content-type": "application/json", "content-length": str(len(raw))}
            answer = _Answer(reader)
            writer.write(answer.asked(h11.Request(method=method, target=path, headers=list(headers.items())), raw))
            await writer.drain()
            await answer.head(method, path)
            yield answer
        except OSError as error:
            raise HttpFailed(f"The connection broke off during {method} {path}.") from error
        finally:
            writer.transport.abort()


class _Answer:
    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._wire = h11.Connection(h11.CLIENT)
        self.status = 0

    def asked(self, request: h11.Request, body: bytes) -> bytes:
        parts = [self._wire.send(request), self._wire.send(h11.Data(body)) if body else b""]
        return b"".join(part for part in (*parts, self._wire.send(h11.EndOfMessage())) if part)

    async def head(self, method: str, path: str) -> None:
        while not isinstance(event := await self._next(), h11.Response):
            if not isinstance(event, h11.InformationalResponse):
                raise HttpFailed(f"{method} {path} was not answered.")
        self.status = event.status_code

    async def body(self) -> AsyncGenerator[bytes, None]:
        while isinstance(event := await self._next(), h11.Data):
            yield bytes(event.data)

    async def _next(self) -> Any:
        try:
            while (event := self._wire.next_event()) is h11.NEED_DATA:
                self._wire.receive_data(await self._reader.read(1 << 16))
        except h11.RemoteProtocolError as error:
            raise HttpFailed(f"What was answered is no HTTP: {error}.") from error
        return event


async def _events(answer: _Answer, path: str, silence: float) -> AsyncGenerator[dict[str, Any], None]:
    data, rest = b"", b""
    body = answer.body()
    while True:
        try:
            async with asyncio.timeout(silence):
                piece = await anext(body)
        except StopAsyncIteration:
            raise HttpFailed(f"The stream {path} has ended.") from None
        except TimeoutError:
            raise HttpFailed(f"The stream {path} was silent for {silence:g} seconds.") from None
        *lines, rest = (rest + piece).split(b"\n")
        if len(rest) + len(data) > LARGEST_LINE:
            raise HttpFailed(f"An event of the stream {path} is too large.")
        for line in lines:
            line = line.rstrip(b"\r")
            if line.startswith(b"data:"):
                data += line[5:].removeprefix(b" ") + b"\n"
            elif not line and data:
                whole, data = data, b""
                with contextlib.suppress(ValueError):
                    event = parsed(whole)
                    if isinstance(event, dict):
                        yield event
