"""What a server's connections speak: HTTP as Uvicorn reads it, with a bound on heads and previews' WebSockets apart."""

from __future__ import annotations

import json
from typing import Any

import httptools
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from skerry.errors import HeadersTooLargeError
from skerry.server import security
from skerry.server.preview.address import visit_of
from skerry.server.preview.front import Previews
from skerry.server.preview.tunnel import Visitor
from skerry.server.preview.wire import Wire

LARGEST_HEAD = 64 * 1024
LINGER_SECONDS = 2.0


class _Oversized(Exception):
    pass


class Listener(HttpToolsProtocol):
    """One connection from outside."""

    previews: Previews

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._head_size = 0
        self._oversized = False

    def data_received(self, data: bytes) -> None:
        if self._oversized:
            return
        super().data_received(data)
        if self._in_head and not self._oversized:
            # One field of any length reaches the callbacks only when it is whole.
            self._head_size += len(data)
            if self._head_size > LARGEST_HEAD:
                self._refuse()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_size = True, 0

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # later ones are trailers, and would appear among the headers
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > LARGEST_HEAD:
            self._oversized = True
            raise _Oversized
        super().on_headers_complete()
        if self.cycle is not None:
            self.scope["skerry.wire"] = Wire(self.cycle)  # type: ignore[typeddict-unknown-key]

    def send_400_response(self, msg: str) -> None:
        if self._oversized:
            self._refuse()
        elif not self.transport.is_closing():
            security.report("request_malformed", self._address())
            super().send_400_response(msg)

    def _refuse(self) -> None:
        self._oversized = True
        if self.transport.is_closing():
            return
        security.report("headers_too_large", self._address())
        error = HeadersTooLargeError(
            f"The head of the request is larger than {LARGEST_HEAD} bytes.",
            hint="Send fewer or smaller headers; cookies of this host may be to blame.",
        )
        text = json.dumps(error.to_wire()).encode()
        self.transport.write(
            b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
            b"connection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(text), text)
        )
        # Closed at once, with more on its way in, the connection would be reset and the answer lost.
        self.transport.write_eof()
        self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def _address(self) -> str:
        return self.client[0] if self.client else ""

    def handle_websocket_upgrade(self) -> None:
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


def speaking(previews: Previews) -> type[Listener]:
    """The protocol for Uvicorn, which makes one for each connection."""
    return type("Listener", (Listener,), {"previews": previews})
