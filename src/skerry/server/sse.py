"""Server-sent events: ``data: <json>`` blocks over one long response."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from typing import Any, Generic, TypeVar, cast

from fastapi import Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from skerry.agents.task_models import TaskEvent
from skerry.control.inquiry import inquiry
from skerry.errors import InvalidRequestError, SkerryError
from skerry.models import Result, SandboxEvent
from skerry.server.closing import Closing
from skerry.server.disconnect import until_disconnect
from skerry.server.errors import as_skerry_error

T = TypeVar("T")
KEEPALIVE = 15.0
OPENING = 0.5
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def encode(event: Result) -> bytes:
    # With a number, where there is one, a client that lost the connection goes on where it was.
    number = b"id: %d\n" % event.id if isinstance(event, SandboxEvent | TaskEvent) else b""
    return number + b"data: " + event.model_dump_json(by_alias=True, exclude_none=True).encode() + b"\n\n"


def encode_failure(event: Result, error: SkerryError) -> bytes:
    """An `error` event in the stream's own shape, with the code, hint and details of the error beside it."""
    fields = event.model_dump(mode="json", by_alias=True, exclude_none=True)
    fields |= {"code": error.code, "hint": error.hint, "details": error.details}
    if (asked := inquiry.get()) is not None:
        fields["requestId"] = asked.request_id
    return b"data: " + json.dumps(fields, ensure_ascii=False, default=str).encode("utf-8", "replace") + b"\n\n"


def last_seen(header: str | None, after: int) -> int:
    """The last event that a client has seen: ``Last-Event-ID``, with which browsers come back, before ``after``."""
    if not header:
        return after
    if len(header) > 18 or not header.isascii() or not header.isdigit():
        raise InvalidRequestError(f"Last-Event-ID {header[:40]!r} is not the id of an event.")
    return int(header)


def documented(event: type[Result]) -> dict[int | str, dict[str, Any]]:
    """The OpenAPI entry of a stream of such events."""
    kinds = ", ".join(f"`{kind}`" for kind in event.model_fields["type"].annotation.__args__)  # type: ignore[union-attr]
    data = {"type": "string", "contentMediaType": "application/json", "description": f"{event.__name__}: {kinds}."}
    schema = {"type": "object", "properties": {"data": data}, "required": ["data"]}
    return {200: {"description": "Server-sent events.", "content": {"text/event-stream": {"schema": schema}}}}


class EventStream(Response, Generic[T]):
    """Holds the sandbox and the source of events for exactly as long as the client listens.

    An error before the first event is an ordinary HTTP error; a later one becomes an `error` event. A source that stays
    silent at first gets its response started all the same, so that clients do not wait for headers.
    """

    head = HEADERS
    keepalive: float | None = None
    """Seconds of silence after which something is sent."""
    alive = b": keepalive\n\n"
    """What is sent where nothing else is for long; whoever reads the stream passes over it."""

    def __init__(
        self,
        use: AbstractAsyncContextManager[T],
        source: Callable[[T], AsyncIterator[Result]],
        failure: Callable[[SkerryError], Result],
        encoder: Callable[[Any], bytes] | None = None,
    ) -> None:
        super().__init__()
        self._use, self._source, self._failure = use, source, failure
        self._encode = encoder or encode
        self._encode_failure = encode_failure if encoder is None else lambda event, _: self._encode(event)
        self._started = self._closing = False
        self._turn = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientDisconnect):
            await until_disconnect(receive, self.run(send, scope["app"].state.closing))

    async def run(self, send: Send, closing: Closing) -> None:
        # Everything is entered, iterated and left in this one task: a source may hold timeouts or task groups open
        # across its yields, and those belong to a task.
        async with self._use as held:
            pump = asyncio.current_task()
            assert pump is not None
            heart = self._heart = _Heart(lambda: self._write(send, self.alive), OPENING, self.keepalive or KEEPALIVE)
            forget = closing.tell(lambda: self._close(pump))
            try:
                async with aclosing(cast("AsyncGenerator[Result, None]", self._source(held))) as events:
                    async for event in events:
                        await self._write(send, self._encode(event))
                        await asyncio.sleep(0)  # a source that never waits must not starve the others
            except asyncio.CancelledError:
                if not self._closing:
                    raise
                pump.uncancel()
            except Exception as error:
                if not self._started:
                    raise
                known = as_skerry_error(error, during="stream")
                await self._write(send, self._encode_failure(self._failure(known), known))
            finally:
                forget()
                await heart.stop()
            await self._write(send, b"", more=False)

    async def _write(self, send: Send, data: bytes, *, more: bool = True) -> None:
        async with self._turn:
            if not self._started:
                await send({"type": "http.response.start", "status": 200, "headers": self.head})
                self._started = True
            self._heart.rest()
            await send({"type": "http.response.body", "body": data, "more_body": more})

    def _close(self, pump: asyncio.Task[None]) -> None:
        self._closing = True
        pump.cancel()


class _Heart:
    """Says something whenever nothing else was said for a while. No task of its own: most streams are short."""

    def __init__(self, beat: Callable[[], Coroutine[Any, Any, None]], first: float, then: float) -> None:
        self._beat, self._pause = beat, then
        self._loop = asyncio.get_running_loop()
        self._said: float | None = None
        """When something was said last."""
        self._beating: asyncio.Task[None] | None = None
        self._timer = self._loop.call_later(first, self._due)

    def rest(self) -> None:
        """Something was said."""
        self._said = self._loop.time()

    def _due(self) -> None:
        left = 0.0 if self._said is None else self._said + self._pause - self._loop.time()
        if left <= 0 and (self._beating is None or self._beating.done()):
            self._beating = asyncio.ensure_future(self._beat())
        self._timer = self._loop.call_later(left if left > 0 else self._pause, self._due)

    async def stop(self) -> None:
        self._timer.cancel()
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)
