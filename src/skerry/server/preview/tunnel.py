"""WebSockets of previews: once both ends agreed, bytes go to and fro as they are, with no idea of frames.

So subprotocols, extensions, pings and close codes are between the browser and the app. Only the handshake is read: its
headers are cleaned as those of any request, and after a refusal the connection is closed, for what came next on it
would go to the app unseen.
"""

from __future__ import annotations

import asyncio
import contextlib
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from starlette.types import Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from skerry.control.actor import PREVIEW, actor
from skerry.errors import InvalidRequestError, PreviewFailedError, RequestTimeoutError
from skerry.server.errors import as_skerry_error
from skerry.server.preview import headers
from skerry.server.preview.access import Admission
from skerry.server.preview.address import visit_of
from skerry.server.preview.exchange import Body
from skerry.server.preview.flows import Flow
from skerry.server.preview.pages import refusal
from skerry.server.preview.upstream import SWITCHING, OriginError, Upstream

if TYPE_CHECKING:
    from skerry.server.preview.listener import Listener

WRITE_AHEAD = 256 * 1024
HANDSHAKE_SECONDS = 60.0
LINGER_SECONDS = 30.0
"""How long one end may stay silent after the other has said its last."""

_UPGRADE = [b"connection: Upgrade", b"upgrade: websocket"]


class Side(asyncio.Protocol):
    """One end. What it says is written to the other, and it is not listened to while the other is behind."""

    inward = False
    """Whether what it says goes into the sandbox."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport
        self.other: Side | None = None
        self.flow: Flow | None = None
        self.ended = False
        self.lost = asyncio.get_running_loop().create_future()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        if self.other is not None and self.flow is not None:
            self.flow.stir(self.inward)
            self.other.transport.write(data)

    def pause_writing(self) -> None:
        if self.other is not None and not self.other.transport.is_closing():
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and not self.other.transport.is_closing():
            self.other.transport.resume_reading()

    def eof_received(self) -> bool:
        """Pass it on; what the other end still has to say may yet come. False closes the connection."""
        other = self.other
        if other is None or other.ended or other.transport.is_closing() or not other.transport.can_write_eof():
            return False
        self.ended = True
        other.transport.write_eof()
        self.linger()
        return True

    def connection_lost(self, error: Exception | None) -> None:
        if not self.lost.done():
            self.lost.set_result(None)
        if self._timer is not None:
            self._timer.cancel()
        if self.other is not None and not self.other.lost.done():
            if error is None:
                self.other.transport.close()
                self.other.linger()
            else:
                self.other.transport.abort()

    def linger(self) -> None:
        if self._timer is None and not self.lost.done():
            self._timer = self._loop.call_later(LINGER_SECONDS, self._lingered)

    def _lingered(self) -> None:
        self._timer = None
        if self.transport.is_closing() or self.flow is None or self.flow.silent_for() >= LINGER_SECONDS:
            self.abort()
        else:
            self.linger()

    def abort(self) -> None:
        for side in (self, self.other):
            if side is not None and not side.lost.done():
                side.transport.abort()


class Visitor(Side):
    """The end outside: a connection that asked for a WebSocket of a preview."""

    inward = True

    def __init__(self, listener: Listener, scope: Scope) -> None:
        super().__init__()
        self._listener = listener
        self._scope = scope
        self._previews = listener.previews
        self._writable = asyncio.Event()
        self._writable.set()
        self.transport = listener.transport

    def open(self) -> None:
        self.transport.pause_reading()
        self.transport.set_protocol(self)
        self.transport.set_write_buffer_limits(high=WRITE_AHEAD)
        self._listener.connections.add(self)  # type: ignore[arg-type]
        task = self._loop.create_task(self._run())
        self._listener.tasks.add(task)
        task.add_done_callback(self._listener.tasks.discard)

    def pause_writing(self) -> None:
        self._writable.clear()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._writable.set()
        super().resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        self._writable.set()
        super().connection_lost(error)

    def shutdown(self) -> None:
        """Called by the server when it closes."""
        self.abort()

    async def _run(self) -> None:
        config = self._listener.config
        app: Any = self._visit
        if config.proxy_headers:
            app = ProxyHeadersMiddleware(app, config.forwarded_allow_ips)
        try:
            await app(self._scope, None, None)
        except Exception as error:  # noqa: BLE001
            by_host = not self._scope["path"].startswith("/preview/")
            answer = refusal(as_skerry_error(error, during="tunnel"), page=False, by_host=by_host)
            self._say(answer.status_code, [*answer.raw_headers, (b"connection", b"close")], bytes(answer.body))
        finally:
            self._listener.connections.discard(self)
            if self.transport.get_protocol() is self:
                self.transport.close()

    async def _visit(self, scope: Scope, _receive: Receive, _send: Send) -> None:
        visit = visit_of(scope)
        claim = visit and self._previews.addresses.claim(visit)
        admitted = await self._previews.access.admit(claim, visit, redirects=False) if claim and visit else None
        if not isinstance(admitted, Admission) or visit is None:
            self._listener.hand_over()
            return
        actor.set(PREVIEW)
        if Body(visit).present:
            raise InvalidRequestError("A request for a WebSocket cannot have a body.")
        upstream = await self._previews.pool.connect(admitted.exposure)
        try:
            upstream.ask(headers.request_head(visit, admitted, _UPGRADE), upgrade=True)
            await self._converse(upstream, admitted)
        finally:
            upstream.close()

    async def _converse(self, upstream: Upstream, admission: Admission) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                status = await upstream.head()
        except OriginError as error:
            raise PreviewFailedError(
                "The server inside did not answer the WebSocket's handshake.", hint=str(error)
            ) from None
        except TimeoutError:
            raise RequestTimeoutError(
                f"The server inside did not answer the WebSocket's handshake for {HANDSHAKE_SECONDS:g} seconds."
            ) from None
        passed = headers.response_headers(upstream.headers, admission)
        with self._previews.flows.begin(admission.exposure, self.abort, admission.known) as self.flow:
            if status == SWITCHING:
                self._say(status, [*passed, (b"connection", b"Upgrade"), (b"upgrade", b"websocket")], upstream.rest)
                await self._relay(upstream)
            else:
                await self._pass_refusal(status, passed, upstream)

    async def _relay(self, upstream: Upstream) -> None:
        inside = Side()
        inside.transport, inside.flow = upstream.transport, self.flow
        inside.other, self.other = self, inside
        upstream.transport.set_protocol(inside)
        upstream.transport.set_write_buffer_limits(high=WRITE_AHEAD)
        if upstream.closed or self.lost.done():
            return
        for side in (inside, self):
            side.transport.resume_reading()
        try:
            await self.lost
            await inside.lost
        finally:
            self.abort()

    async def _pass_refusal(self, status: int, passed: headers.Headers, upstream: Upstream) -> None:
        """An answer without a length ends where the connection does, and this one ends in any case."""
        if upstream.length is not None:
            passed.append((b"content-length", b"%d" % upstream.length))
        self._say(status, [*passed, (b"connection", b"close")], b"")
        with contextlib.suppress(OriginError):
            while data := await upstream.read():
                await self._writable.wait()
                if self.lost.done():
                    return
                self.transport.write(data)

    def _say(self, status: int, fields: headers.Headers, body: bytes) -> None:
        phrase = HTTPStatus(status).phrase if status in HTTPStatus._value2member_map_ else ""
        lines = [f"HTTP/1.1 {status} {phrase}".encode(), *(name + b": " + value for name, value in fields), b"\r\n"]
        self.transport.write(b"\r\n".join(lines) + body)
