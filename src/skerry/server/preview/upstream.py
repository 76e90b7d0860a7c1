"""A connection to a server inside a sandbox, which may say anything.

The head of a response and chunks are parsed by llhttp in its strict mode; how long a body is follows from exactly one
header, or the response is refused. What is read ahead is bounded.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import httptools

from skerry.server.preview.wire import LARGE, Splice

if TYPE_CHECKING:
    from skerry.runtime.runtime import Runtime

READ_AHEAD = 512 * 1024
SMALL = 16 * 1024
"""Pieces below this size are passed on together with what follows them."""
WRITE_AHEAD = 256 * 1024
LARGEST_HEAD = 256 * 1024
MOST_INTERIM = 20
SWITCHING = 101

Headers = list[tuple[bytes, bytes]]


class OriginError(Exception):
    """The origin's side of a connection went wrong."""


class Ended(OriginError):
    """It closed before the response was whole."""


class Garbled(OriginError):
    """It said what is no HTTP response, or one of unclear length."""


class Upstream(asyncio.Protocol):
    """One connection, for one request after the other."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.closed = False
        self.heard = False
        """Whether anything came since the request was sent."""
        self.status = 0
        self.headers: Headers = []
        self.length: int | None = None
        self.complete = False
        self.continued = False
        self.rest = b""
        """What followed the head of a 101."""
        self.transport: asyncio.Transport
        self.when_lost: Callable[[], None] | None = None
        self._loop = asyncio.get_running_loop()
        self._parser: httptools.HttpResponseParser | None = None
        self._chunks: deque[bytes] = deque()
        self._queued = 0
        self._reading = True
        self._held = False
        self._splice: Splice | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._drained: asyncio.Future[None] | None = None
        self._writable = True
        self._failure: OriginError | None = None
        self._bodiless = self._upgrade = False
        self._dirty = self._until_close = self._persistent = False
        self._interim = self._head_size = self._left = 0

    # -- asking --------------------------------------------------------------------------------------------------------

    def ask(self, head: bytes, *, bodiless: bool = False, upgrade: bool = False) -> None:
        """Send the head of a request. The response to ``bodiless`` ones (HEAD) has none either."""
        self._parser = httptools.HttpResponseParser(self)
        self.status, self.headers, self.length = 0, [], None
        self.complete = self.heard = self.continued = False
        self._bodiless, self._upgrade = bodiless, upgrade
        self._dirty = self._until_close = self._persistent = False
        self._interim = self._head_size = self._left = 0
        self._failure = Ended("The connection is closed.") if self.closed else None
        self.transport.write(head)

    async def write(self, data: bytes) -> None:
        """Send more of the request, as fast as the origin takes it. What a closed connection is given is dropped."""
        if not self._writable and not self.closed:
            self._drained = self._loop.create_future()
            await self._drained
        if not self.closed:
            self.transport.write(data)

    async def go_ahead(self) -> None:
        """Until the origin says that it wants the body, or answers without it."""
        while not (self.continued or self.status or self._failure):
            await self._wait()

    async def head(self) -> int:
        """The response's status, once its head is there; raises OriginError."""
        while not self.status:
            self._check()
            await self._wait()
        return self.status

    async def read(self) -> bytes:
        """The next part of the body, b"" after the last; raises OriginError when it breaks off."""
        while not self._chunks:
            if self.complete:
                return b""
            self._check()
            await self._wait()
        data = self._chunks.popleft()
        if self._chunks and len(data) < SMALL:
            data += b"".join(self._chunks)
            self._chunks.clear()
        self._queued -= len(data)
        if not self._held and self._queued < READ_AHEAD // 2:
            self._read_on()
        return data

    def hold(self) -> bool:
        """Read no more of a body for now, if what is still to come is large and its length known; whether it is."""
        if self._left < LARGE or self._failure or self.closed:
            return False
        self._held = True
        if self._reading:
            self._reading = False
            self.transport.pause_reading()
        return True

    @property
    def waiting(self) -> bool:
        """Whether some of the body was received and not yet read."""
        return bool(self._chunks)

    async def pour(self, target: int, moved: Callable[[int], None], patience: float) -> None:
        """Let the kernel move the rest of a body that is held to another socket, all of it unless that raises.

        Raises OriginError when it breaks off, ``Unspliceable`` when it cannot be done this way, and OSError for what
        the other socket says.
        """
        source = os.dup(self.transport.get_extra_info("socket").fileno())
        try:
            self._splice = Splice(source, target, moved, lambda: self.closed, patience)
            self._left -= await self._splice.run(self._left)
            self.complete = self._left == 0
        finally:
            self._splice = None
            os.close(source)
            self.release()
        if not self.complete:
            self._failure = self._failure or Ended("The connection was closed in the middle of a response.")
            self.close()
            self._check()

    def release(self) -> None:
        """Read on, after ``hold``."""
        self._held = False
        self._read_on()

    def _read_on(self) -> None:
        if not self._reading and not self.transport.is_closing():
            self._reading = True
            self.transport.resume_reading()

    @property
    def finished(self) -> bool:
        """Whether all of the body has been read."""
        return self.complete and not self._chunks

    @property
    def reusable(self) -> bool:
        return self._persistent and self.complete and not self._dirty and not self.closed and not self._chunks

    def rest_idle(self) -> None:
        """Nothing is expected from now on, and what comes anyhow ends the connection."""
        self._parser = None

    def close(self) -> None:
        if not self.closed:
            self.transport.abort()

    def forget(self) -> None:
        """Close it, and hold nothing of what nobody will read."""
        self.close()
        self._chunks.clear()
        self._queued = 0

    def _check(self) -> None:
        if self._failure is not None:
            # A copy: raised itself, it would hold this by its traceback, and this holds it.
            raise type(self._failure)(*self._failure.args)

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._splice is not None:
            self._splice.wake()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- what the transport reports ------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        transport.set_write_buffer_limits(high=WRITE_AHEAD)

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def data_received(self, data: bytes) -> None:
        self.heard = True
        if self._parser is None or self.complete:
            # Said without being asked: on a connection in use again it would be taken for the next answer.
            self._dirty = True
            self.close()
            return
        try:
            if self._left and self.status:
                self._take(data)
            elif self._until_close:
                self._append(data)
            else:
                self._parser.feed_data(data)
                if not self.status:
                    self._head_size += len(data)
                    if self._head_size > LARGEST_HEAD:
                        raise Garbled(f"The response's head has more than {LARGEST_HEAD} bytes.")
        except httptools.HttpParserUpgrade as upgrade:
            self.rest = data[upgrade.args[0] :]
            self._reading = False
            self.transport.pause_reading()  # until another protocol takes over
        except (httptools.HttpParserError, Garbled) as error:
            cause = error.__context__ if isinstance(error, httptools.HttpParserCallbackError) else error
            if not self.complete:
                self._failure = cause if isinstance(cause, Garbled) else Garbled("The response is not HTTP.")
            self._dirty = True
            self.close()
        if self._queued > READ_AHEAD and self._reading and not self.transport.is_closing():
            self._reading = False
            self.transport.pause_reading()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        if self._until_close and self.status and error is None and not self._failure:
            self.complete = True
        elif not self.complete and not self._failure:
            self._failure = Ended("The connection was closed in the middle of a response.")
        if self.when_lost is not None:
            self.when_lost()
        self._wake()
        self.resume_writing()

    # -- what the parser reports ---------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self.complete:
            self._dirty = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.status:
            return  # a trailer
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        if self.complete:
            return
        status = self._parser.get_status_code()
        if 100 <= status < 200 and status != SWITCHING:
            self._interim += 1
            if self._interim > MOST_INTERIM:
                raise Garbled("The origin answers with one interim response after the other.")
            self.continued = self.continued or status == 100
            self.headers = []
            return
        if not 101 <= status <= 599 or (status == SWITCHING and not self._upgrade):
            raise Garbled(f"The origin answers with status {status}.")
        if status == SWITCHING and not self._parser.should_upgrade():
            raise Garbled("The origin switches protocols without saying to which.")
        self._frame(status)
        self.status = status

    def on_body(self, data: bytes) -> None:
        if self.complete:
            self._dirty = True
        elif self._left:
            self._take(data)
        else:
            self._append(data)

    def on_message_complete(self) -> None:
        if self.status and self._left == 0 and not self._until_close:
            self.complete = True

    def _frame(self, status: int) -> None:
        """How the body is delimited: by exactly one of the ways there are."""
        assert self._parser is not None
        codings = [value for name, value in self.headers if name == b"transfer-encoding"]
        lengths = [value for name, value in self.headers if name == b"content-length"]
        options = {
            option.strip().lower()
            for name, value in self.headers
            if name == b"connection"
            for option in value.split(b",")
        }
        modern = self._parser.get_http_version() == "1.1"
        self._persistent = b"close" not in options and (modern or b"keep-alive" in options)
        if codings and (lengths or len(codings) > 1 or codings[0].strip().lower() != b"chunked" or not modern):
            raise Garbled("The response does not say clearly how long it is.")
        if lengths:
            self.length = int(lengths[0])  # one number, as the parser has seen to
        if self._bodiless:
            # Careless servers send the body all the same, some of it later: the connection is of no further use.
            self.complete, self._persistent = True, False
        elif status in (SWITCHING, 204, 304):
            self.complete = True
        elif self.length is not None:
            self._left = self.length
            self.complete = self.length == 0
        elif not codings:
            self._until_close, self._persistent = True, False

    def _take(self, data: bytes) -> None:
        """Bytes of a body of known length; what is beyond belongs to no response."""
        if len(data) > self._left:
            self._dirty = True
            data = data[: self._left]
        self._left -= len(data)
        self._append(data)
        self.complete = self._left == 0

    def _append(self, data: bytes) -> None:
        self._chunks.append(data)
        self._queued += len(data)
