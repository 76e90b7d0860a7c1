"""What a server's connections speak: HTTP as Uvicorn reads it, with bounds on what a client may cost.

A head must come within some time and be of some size, an answer must be taken, and there are only so many connections.
Previews' WebSockets leave here.
"""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus
from typing import Any

import httptools
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from skerry.errors import HeadersTooLargeError, RequestTimeoutError, SkerryError, TooManyConnectionsError
from skerry.server import security
from skerry.server.connections import Connections
from skerry.server.preview.address import visit_of
from skerry.server.preview.front import Previews
from skerry.server.preview.tunnel import Visitor
from skerry.server.preview.wire import Wire
from skerry.settings import Settings

LARGEST_HEAD = 64 * 1024
LINGER_SECONDS = 2.0


class _Oversized(Exception):
    pass


class Listener(HttpToolsProtocol):
    """One connection from outside."""

    previews: Previews
    admitted: Connections
    head_timeout: float
    send_timeout: float

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._in_body = False
        self._head_size = 0
        self._refused = False
        self._upgraded = False
        self._patience: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        try:
            self.admitted.admit(self._address(), transport)
        except TooManyConnectionsError as error:
            security.report("connections_exceeded", self._address())
            return self._refuse(error)
        self._patience = self.loop.call_later(self.head_timeout, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        self.admitted.release(self._address(), self.transport)
        self._rest()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        in_body = self._in_body
        super().data_received(data)
        if self._refused or self._upgraded or self.transport.is_closing():
            return
        if self._in_head:
            # One field of any length reaches the callbacks only when it is whole.
            self._head_size += len(data)
            if self._head_size > LARGEST_HEAD:
                return self._refuse_head()
        elif self._in_body or not self.cycle.response_complete:
            return
        elif in_body:
            # The end of a body that was answered before it came: the connection is as good as any.
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
            return
        # Most heads are whole when they come, and cost no timer. Empty lines between requests are no head yet.
        if self._patience is None:
            self._patience = self.loop.call_later(self.head_timeout, self._give_up)

    def _give_up(self) -> None:
        """A head did not come, or the rest of a body that nobody waits for any more."""
        self._patience = None
        if self._in_head and self._head_size:
            security.report("client_slow", self._address())
            self._refuse(
                RequestTimeoutError(
                    f"The head of the request did not arrive within {self.head_timeout:g} seconds.",
                    hint="Send the request again.",
                )
            )
        elif not self.transport.is_closing():
            self.transport.close()

    def _rest(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_size = True, 0

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # later ones are trailers, and would appear among the headers
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head, self._in_body = False, True
        self._head_size = 0
        self._rest()
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > LARGEST_HEAD:
            self._refused = True
            raise _Oversized
        super().on_headers_complete()
        if self.cycle is not None:
            self.scope["skerry.wire"] = Wire(self.cycle, self.send_timeout)  # type: ignore[typeddict-unknown-key]

    def on_message_complete(self) -> None:
        self._in_body = False
        self._rest()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._in_body and self._patience is None and not self.transport.is_closing():
            # Refused unread, for instance. What is still to come is thrown away, but not for ever.
            self._patience = self.loop.call_later(self.head_timeout, self._give_up)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stalled is None:
            self._stalled = self.loop.call_later(self.send_timeout, self._cut_off)

    def resume_writing(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        super().resume_writing()

    def _cut_off(self) -> None:
        """The client has not taken its answer. Closing would wait for it, too."""
        self._stalled = None
        security.report("client_slow", self._address())
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        if self._refused:
            self._refuse_head()
        elif not self.transport.is_closing():
            security.report("request_malformed", self._address())
            super().send_400_response(msg)

    def _refuse_head(self) -> None:
        if not self.transport.is_closing():
            security.report("headers_too_large", self._address())
        self._refuse(
            HeadersTooLargeError(
                f"The head of the request is larger than {LARGEST_HEAD} bytes.",
                hint="Send fewer or smaller headers; cookies of this host may be to blame.",
            )
        )

    def _refuse(self, error: SkerryError) -> None:
        """Answer before there is a request that could be answered, and hang up."""
        self._refused = True
        self._rest()
        if self.transport.is_closing():
            return
        text = json.dumps(error.to_wire()).encode()
        self.transport.write(
            b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b"
            % (error.status, HTTPStatus(error.status).phrase.encode(), len(text), text)
        )
        # Closed at once, with more on its way in, the connection would be reset and the answer lost.
        self.transport.write_eof()
        self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def _address(self) -> str:
        return self.client[0] if self.client else ""

    def handle_websocket_upgrade(self) -> None:
        self._upgraded = True
        self._rest()
        self.resume_writing()
        try:
            parts = httptools.parse_url(self.url)
            path = parts.path.decode("ascii")
        except (httptools.HttpParserError, UnicodeDecodeError, AttributeError):
            return super().handle_websocket_upgrade()
        scope: Scope = {**self.scope, "path": path, "raw_path": parts.path, "query_string": parts.query or b""}
        visit = visit_of(scope)
        if visit is None or self.previews.addresses.claim(visit) is None:
            return super().handle_websocket_upgrade()
        self.connections.discard(self)
        Visitor(self, scope).open()

    def hand_over(self) -> None:
        """It was for the API after all."""
        super().handle_websocket_upgrade()
        self.transport.resume_reading()


def speaking(previews: Previews, settings: Settings) -> type[Listener]:
    """The protocol for Uvicorn, which makes one for each connection."""
    bounds = {"head_timeout": settings.head_timeout, "send_timeout": settings.send_timeout}
    return type("Listener", (Listener,), {"previews": previews, "admitted": Connections(settings), **bounds})
