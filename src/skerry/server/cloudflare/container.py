"""The container's API over HTTP and WebSockets, below each sandbox."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any, cast

from pydantic_core import from_json
from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse
from starlette.routing import BaseRoute, Match, Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from skerry.control.actor import own_id
from skerry.control.audit import Audit
from skerry.control.inquiry import answered, asked_for
from skerry.control.registry import Registry
from skerry.errors import InvalidSandboxIdError, SkerryError
from skerry.models import shown_id
from skerry.server.bounds import BoundedRequest
from skerry.server.cloudflare import early, pty
from skerry.server.cloudflare.box import Json, Stream, named
from skerry.server.cloudflare.calls import Calls
from skerry.server.cloudflare.faults import Fault, fault_of
from skerry.server.cloudflare.multiplex import Multiplex
from skerry.server.cloudflare.record import Record
from skerry.server.cloudflare.rpc import Rpc
from skerry.server.cloudflare.writing import as_event, as_json
from skerry.server.disconnect import until_disconnect
from skerry.server.sse import HEADERS, EventStream

NAME = "container"
CODE = "/api/execute/code"
GREETING = "This is a sandbox of Skerry; it speaks the container API of Cloudflare's Sandbox 0.x.\n"
_PROXY = re.compile(r"/proxy/([0-9]{1,5})(?=/|$)")
_CORS = [
    (b"access-control-allow-origin", b"*"),
    (b"access-control-allow-methods", b"GET, POST, PUT, DELETE, OPTIONS"),
    (b"access-control-allow-headers", b"Content-Type, Authorization, X-Session-Id, X-Sandbox-Id, X-Trace-Id"),
]


class Container:
    """An ASGI application."""

    def __init__(
        self, registry: Registry, fetch: ASGIApp, audit: Audit | None = None, *, is_early: bool = False
    ) -> None:
        self._registry = registry
        self._record = Record(audit)
        self._fetch = fetch
        self._is_early = is_early
        self._calls = Calls(registry, early.find) if is_early else Calls(registry)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = f"/{scope['path_params']['rest'].lstrip('/')}".rstrip("/") or "/"
        if scope["type"] == "websocket":
            return await self._connect(WebSocket(scope, receive, send), path)
        request = BoundedRequest(scope, receive)
        try:
            if path == "/":
                return await PlainTextResponse(GREETING)(scope, receive, send)
            if proxied := _PROXY.match(path):
                return await self._pass(request, int(proxied[1]), receive, send)
            await self._answer(request, path, receive, send)
        except ClientDisconnect:
            return
        except Fault as fault:
            answered(fault.status, fault.code)
            await _write(send, fault.status, self._wire(fault, path))
        except SkerryError as error:
            said = fault_of(error)
            answered(said.status, error.code)
            await _write(send, said.status, self._wire(said, path), retry_after=error.retry_after)

    def _wire(self, fault: Fault, path: str) -> Json:
        if self._is_early:
            return early.fault_wire(fault)
        # Running code has an error shape of its own.
        is_code = path == CODE and fault.status != 404
        return {"error": fault.message, "code": fault.code, "details": fault.context} if is_code else fault.to_wire()

    async def _answer(self, request: BoundedRequest, path: str, receive: Receive, send: Send) -> None:
        if request.method == "OPTIONS":
            return await _write(send, 204, None)
        asked_for(f"{request.method} {path}")
        id, body = _sandbox(request), await _body(request)
        answer = await until_disconnect(receive, self._work(request, id, path, body, send))
        if answer is not None:
            await _write(send, 200, answer)

    async def _work(self, request: BoundedRequest, id: str, path: str, body: Json, send: Send) -> Json | None:
        """What is to be answered; None when it was a stream, and has been sent."""
        async with AsyncExitStack() as stack:
            call = self._calls.call(id, request.method, path, body, request.query_params)
            answer = await stack.enter_async_context(call)
            if not isinstance(answer, Stream):
                return answer
            # The stream keeps the sandbox for as long as it lasts, and ends what it holds when the client leaves.
            kind = _Lines if self._is_early and path == CODE else _Events
            await kind(stack.pop_all(), answer).run(send, request.app.state.closing)
        return None

    async def _pass(self, request: BoundedRequest, port: int, receive: Receive, send: Send) -> None:
        """``/proxy/{port}/…``: straight to a server inside, if its port is exposed."""
        id = _sandbox(request)
        if await self._registry.exposures.find(id, port) is None:
            raise Fault("PORT_NOT_EXPOSED", f"Port {port} is not exposed", {"port": port})
        raw = request.scope["raw_path"].split(b"/proxy/", 1)[1]
        path = b"/v1/sandboxes/%s/ports/%d/proxy/%s" % (shown_id(id).encode(), port, raw.partition(b"/")[2])
        await self._fetch({**request.scope, "path": path.decode("latin-1"), "raw_path": path}, receive, send)

    async def _connect(self, socket: WebSocket, path: str) -> None:
        try:
            id = _sandbox(socket)
        except SkerryError as error:
            return await pty.refuse(socket, error.message, error.status)
        match path:
            case "/ws/pty":
                await pty.serve(self._registry, id, socket)
            case "/ws" | "/api/ws":
                await Multiplex(self._calls, id, socket, self._record).serve()
            case "/rpc":
                await Rpc(self._registry, self._calls, id, socket, self._record).serve()
            case _:
                await pty.refuse(socket, "There is no such address.", 404)


class _Events(EventStream[Any]):
    """The same stream of events as everywhere, of plain dictionaries."""

    head = [*HEADERS, *_CORS]

    def __init__(self, held: AsyncExitStack, stream: Stream, frame: Callable[[Json], bytes] = as_event) -> None:
        super().__init__(held, lambda _: cast("Any", stream.events), cast("Any", _failure), frame)


class _Lines(_Events):
    """A line of JSON for each."""

    head = [(b"content-type", b"application/x-ndjson"), *HEADERS[1:], *_CORS]
    alive = b"\n"

    def __init__(self, held: AsyncExitStack, stream: Stream) -> None:
        super().__init__(held, stream, early.as_line)


def _failure(error: SkerryError) -> Json:
    return {"type": "error", "error": error.message, "data": error.message}


def _sandbox(request: BoundedRequest | WebSocket) -> str:
    id = request.path_params.get("id")
    if id is None:
        raise InvalidSandboxIdError(
            "The request names no sandbox.", hint="Send its id as X-Sandbox-Id, or use /v1/sandboxes/{id}/container."
        )
    return own_id(id)


async def _body(request: BoundedRequest) -> Json:
    """Any object that is JSON, whatever the header calls it: clients of this API are not careful about it."""
    raw = await request.body()
    try:
        body = from_json(raw, allow_inf_nan=False) if raw else {}
    except ValueError as error:
        raise Fault("INTERNAL_ERROR", f"Failed to parse request body: {error}") from None
    return cast("Json", named(body, request.headers.get("x-session-id")))


async def _write(send: Send, status: int, body: Json | None, *, retry_after: float | None = None) -> None:
    content = b"" if body is None else as_json(body)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content)), *_CORS]
    if retry_after is not None:
        headers.append((b"retry-after", b"%d" % max(1, round(retry_after))))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})


def container_routes(registry: Registry, fetch: ASGIApp, audit: Audit | None = None) -> list[BaseRoute]:
    """``fetch`` carries requests to servers inside. Without a sandbox's name at the root, the answer says how to."""
    container = Container(registry, fetch, audit)
    path = "/v1/sandboxes/{id}/container{rest:path}"
    return [
        Route(
            "/v1/sandboxes/{id}/container-0.3{rest:path}",
            Container(registry, fetch, audit, is_early=True),
            name=f"{NAME}_of_old",
            include_in_schema=False,
        ),
        Route(path, container, name=NAME, include_in_schema=False),
        WebSocketRoute(path, container, name=f"{NAME}_connection"),
        _Unnamed("/api{rest:path}", container, name=f"{NAME}_unnamed", include_in_schema=False),
    ]


class _Unnamed(Route):
    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        # What lies there is not of this API, and must answer itself to a method that it does not take.
        return (Match.NONE, {}) if scope["path"].startswith(("/api/v2/", "/api/auth/")) else super().matches(scope)
