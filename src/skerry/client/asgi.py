"""An ASGI application on another thread's event loop, reached as if it were a server.

``httpx.ASGITransport`` holds a response back until it is complete; these transports stream both ways. All state of an
exchange lives on the application's loop; the two transports only submit coroutines to it and wait.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, MutableMapping
from typing import Any, TypeVar, cast

import httpx

T = TypeVar("T")

Message = MutableMapping[str, Any]
App = Callable[
    [MutableMapping[str, Any], Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]
]

_WINDOW = 256 * 1024


class Host:
    """The loop an application runs on, and the calls that are in progress on it."""

    def __init__(self, app: App, loop: asyncio.AbstractEventLoop) -> None:
        self.app = app
        self.loop = loop
        self._process = os.getpid()
        self._calls: dict[asyncio.Task[None], Call] = {}

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        if self._process != os.getpid() or self.loop.is_closed():
            work.close()
            raise httpx.ConnectError(
                "The embedded server is closed, or belongs to the process this one was forked from."
            )
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def begin(self, call: Call, task: asyncio.Task[None]) -> None:
        self._calls[task] = call
        task.add_done_callback(lambda task: self._calls.pop(task, None))

    async def close(self, grace: float = 2.0) -> None:
        """Tell every call that its caller left, then cancel the ones that do not end."""
        for call in list(self._calls.values()):
            call.disconnect()
        if self._calls:
            _, late = await asyncio.wait(list(self._calls), timeout=grace)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)


class Call:
    """One ``app(scope, receive, send)``: messages go in and come out, each side waiting when the other is behind."""

    def __init__(self, host: Host, scope: MutableMapping[str, Any], leave: str) -> None:
        self._host = host
        self._scope = scope
        self._leave = leave
        self._inbox: deque[Message] = deque()
        self._outbox: deque[Message] = deque()
        self._held = 0
        self._changed = asyncio.Event()
        self._gone = False
        self._ended = False
        self.failure: Exception | None = None

    def start(self) -> None:
        self._host.begin(self, self._host.loop.create_task(self._run()))

    def disconnect(self) -> None:
        self._gone = True
        self._wake()

    async def put(self, message: Message) -> bool:
        """Give the application a message; False when it no longer listens."""
        while len(self._inbox) > 1 and not self._ended and not self._gone:
            await self._wait()
        if self._ended or self._gone:
            return False
        self._inbox.append(message)
        self._wake()
        return True

    async def take(self) -> Message | None:
        """What the application said next; None when it has ended."""
        while not self._outbox and not self._ended:
            await self._wait()
        if not self._outbox:
            return None
        message = self._outbox.popleft()
        self._held -= len(message.get("body", b"") or message.get("bytes") or b"")
        self._wake()
        return message

    def peek(self) -> Message | None:
        return self._outbox[0] if self._outbox else None

    async def _run(self) -> None:
        try:
            await self._host.app(self._scope, self._receive, self._send)
        except Exception as error:  # noqa: BLE001 - it belongs to the caller, who raises it on the other side
            self.failure = error
        finally:
            self._ended = True
            self._wake()

    async def _receive(self) -> Message:
        while not self._inbox and not self._gone:
            await self._wait()
        if self._gone:
            return {"type": self._leave, "code": 1005}
        message = self._inbox.popleft()
        self._wake()
        return message

    async def _send(self, message: Message) -> None:
        while self._held > _WINDOW and not self._gone:
            await self._wait()
        if self._gone:
            # What uvicorn does too: an application that has not noticed yet talks to no one.
            return
        self._held += len(message.get("body", b"") or message.get("bytes") or b"")
        self._outbox.append(message)
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait(self) -> None:
        await self._changed.wait()


Opened = tuple[int, list[tuple[bytes, bytes]], list[bytes], bool]


class Exchange:
    """An HTTP request and its response."""

    def __init__(self, host: Host, request: httpx.Request) -> None:
        self._host = host
        self._scope = scope_of(request, "http")
        self._call: Call | None = None

    async def open(self, body: bytes | None) -> None:
        """Begin; with ``body`` the request is complete, without it ``feed`` brings the pieces."""
        self._call = Call(self._host, self._scope, "http.disconnect")
        self._call.start()
        if body is not None:
            await self.feed(body, more=False)

    async def feed(self, piece: bytes, *, more: bool) -> bool:
        assert self._call is not None
        return await self._call.put({"type": "http.request", "body": piece, "more_body": more})

    async def head(self) -> Opened:
        """Status, headers, and what of the body is there already, so that a short answer costs one crossing."""
        assert self._call is not None
        message = await self._call.take()
        while message is not None and message["type"] != "http.response.start":
            message = await self._call.take()
        if message is None:
            raise httpx.RemoteProtocolError(f"The embedded server gave no answer: {self._call.failure!r}")
        pieces, complete = ([], False) if self._call.peek() is None else await self.more()
        return message["status"], list(message.get("headers", [])), pieces, complete

    async def open_whole(self, body: bytes) -> Opened:
        try:
            await self.open(body)
            return await self.head()
        except asyncio.CancelledError:
            self.close()
            raise

    async def more(self) -> tuple[list[bytes], bool]:
        """The next pieces of the body, all that wait, and whether it is complete."""
        assert self._call is not None
        pieces = []
        while True:
            message = await self._call.take()
            if message is None:
                raise httpx.RemoteProtocolError(f"The embedded server broke off: {self._call.failure!r}")
            if piece := message.get("body", b""):
                pieces.append(piece)
            if not message.get("more_body", False):
                return pieces, True
            if pieces and self._call.peek() is None:
                return pieces, False

    def close(self) -> None:
        if self._call is not None:
            self._call.disconnect()

    def abandon(self) -> None:
        """Close from another thread."""
        if not self._host.loop.is_closed():
            self._host.loop.call_soon_threadsafe(self.close)


def scope_of(request: httpx.Request, kind: str) -> dict[str, Any]:
    url = request.url
    return {
        "type": kind,
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http" if kind == "http" else "ws",
        "path": url.path,
        "raw_path": url.raw_path.split(b"?")[0],
        "query_string": url.query,
        "root_path": "",
        "headers": [(name.lower(), value) for name, value in request.headers.raw],
        "client": ("127.0.0.1", 0),
        "server": None,  # nothing listens
        "extensions": {},
    }


class _AsyncBody(httpx.AsyncByteStream):
    def __init__(self, host: Host, exchange: Exchange, pieces: list[bytes], complete: bool) -> None:
        self._host, self._exchange, self._pieces, self._complete = host, exchange, pieces, complete

    async def __aiter__(self) -> AsyncIterator[bytes]:
        pieces, complete = self._pieces, self._complete
        while True:
            for piece in pieces:
                yield piece
            if complete:
                return
            pieces, complete = await asyncio.wrap_future(self._host.submit(self._exchange.more()))

    async def aclose(self) -> None:
        self._exchange.abandon()


class _Body(httpx.SyncByteStream):
    def __init__(self, host: Host, exchange: Exchange, pieces: list[bytes], complete: bool) -> None:
        self._host, self._exchange, self._pieces, self._complete = host, exchange, pieces, complete

    def __iter__(self) -> Iterator[bytes]:
        pieces, complete = self._pieces, self._complete
        while True:
            yield from pieces
            if complete:
                return
            pieces, complete = self._host.submit(self._exchange.more()).result()

    def close(self) -> None:
        self._exchange.abandon()


class AsyncASGITransport(httpx.AsyncBaseTransport):
    def __init__(self, host: Host) -> None:
        self._host = host

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        exchange = Exchange(self._host, request)
        try:
            if isinstance(request.stream, httpx.ByteStream):
                body = b"".join(request.stream)
                opened = await self._on_host(exchange.open_whole(body))
            else:
                await self._on_host(exchange.open(None))
                async for piece in cast(httpx.AsyncByteStream, request.stream):
                    if not await self._on_host(exchange.feed(piece, more=True)):
                        break
                await self._on_host(exchange.feed(b"", more=False))
                opened = await self._on_host(exchange.head())
        except BaseException:
            exchange.abandon()
            raise
        status, headers, pieces, complete = opened
        return httpx.Response(status, headers=headers, stream=_AsyncBody(self._host, exchange, pieces, complete))

    async def _on_host(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(self._host.submit(work))


class ASGITransport(httpx.BaseTransport):
    def __init__(self, host: Host) -> None:
        self._host = host

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        exchange = Exchange(self._host, request)
        try:
            if isinstance(request.stream, httpx.ByteStream):
                opened = self._host.submit(exchange.open_whole(b"".join(request.stream))).result()
            else:
                self._host.submit(exchange.open(None)).result()
                for piece in cast(httpx.SyncByteStream, request.stream):
                    if not self._host.submit(exchange.feed(piece, more=True)).result():
                        break
                self._host.submit(exchange.feed(b"", more=False)).result()
                opened = self._host.submit(exchange.head()).result()
        except BaseException:
            exchange.abandon()
            raise
        status, headers, pieces, complete = opened
        return httpx.Response(status, headers=headers, stream=_Body(self._host, exchange, pieces, complete))
