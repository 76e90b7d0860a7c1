"""AgentPod's worker API: sandboxes with an agent, messages to it, and its own API and page behind a proxy.

/sandbox  /sandbox/{id}…        as its clients write it, led to
/v1/worker  /v1/sandboxes/{id}/worker…    which whoever guards, counts and records requests knows
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Annotated, Any
from urllib.parse import quote, unquote_to_bytes

import websockets
from fastapi import APIRouter, Header, Request, Response
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect
from websockets.asyncio.client import ClientConnection
from websockets.typing import Subprotocol

from skerry.agents.models import (
    AgentFault,
    WorkerAnswer,
    WorkerCreate,
    WorkerDeleted,
    WorkerInfo,
    WorkerMessage,
    WorkerSync,
)
from skerry.agents.opencode.running import PORT
from skerry.agents.worker import Worker
from skerry.control.actor import own_id
from skerry.control.exposures import Exposure
from skerry.control.registry import Registry
from skerry.errors import AgentError, NotFoundError, SkerryError, TooLargeError
from skerry.models import ExposePort, SyncRequest
from skerry.server.answers import answer
from skerry.server.auth import chosen_protocol
from skerry.server.disconnect import until_disconnect
from skerry.server.errors import as_skerry_error, error_response
from skerry.server.fetch import checked, marked
from skerry.server.nouns import noun_router
from skerry.server.paths import SandboxId
from skerry.server.places import Places
from skerry.server.preview.access import Admission
from skerry.server.preview.address import visit_of
from skerry.server.preview.front import Previews
from skerry.server.sse import EventStream
from skerry.settings import Settings

NAME = "opencode"
"""Of the preview that browsers are led to."""
OPENCODE = "/v1/sandboxes/{id}/worker/opencode{rest:path}"
STREAMED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer; or server-sent events, if they were asked for: `start`, the agent's own, `done`.",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    }
}
CREATED: dict[int | str, dict[str, Any]] = {200: {"description": "It runs, with its agent."}}

_WRITTEN = re.compile(r"/sandbox/([A-Za-z0-9][A-Za-z0-9_-]*)(?!/(?:error|pr)$)(/.*)?")  # those are a session's own
_AUTH = re.compile(rb"/+auth/+(.{1,100}?)/*", re.DOTALL)
"""However it is written: what is not found to be a key goes inside."""
_LARGEST_CREDENTIAL = 64 << 10
_RAW = re.compile(rb"/v1/sandboxes/([^/]+)/worker/opencode(?=/|$)")


class WorkerAddresses:
    """An ASGI layer in front of the guard: the addresses that AgentPod's clients know."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan" and scope["path"].startswith("/sandbox"):
            path = _path(scope["path"])
            if path is not None:
                raw = scope.get("raw_path") or scope["path"].encode()
                scope = {**scope, "path": path, "raw_path": (_path(raw.decode("latin-1")) or path).encode("latin-1")}
        await self.app(scope, receive, send)


def _path(written: str) -> str | None:
    if written == "/sandbox":
        return "/v1/worker"
    found = _WRITTEN.fullmatch(written)
    return None if found is None else f"/v1/sandboxes/{found[1]}/worker{found[2] or ''}"


def routes(registry: Registry, worker: Worker) -> APIRouter:
    router = noun_router("/v1", "worker")

    @router.post("/worker", response_model=WorkerInfo, responses=CREATED)
    async def create_worker_sandbox(body: WorkerCreate, request: Request) -> Response:
        return answer(await until_disconnect(request.receive, worker.create(body)))

    @router.get("/sandboxes/{id}/worker", response_model=WorkerInfo)
    async def get_worker_sandbox(id: SandboxId) -> Response:
        return answer(await worker.get(id))

    @router.delete("/sandboxes/{id}/worker", response_model=WorkerDeleted)
    async def delete_worker_sandbox(id: SandboxId) -> Response:
        return answer(await worker.delete(id))

    @router.post("/sandboxes/{id}/worker/wake", response_model=WorkerInfo)
    async def wake_worker_sandbox(id: SandboxId) -> Response:
        return answer(await worker.wake(id))

    @router.post("/sandboxes/{id}/worker/message", response_model=WorkerAnswer, responses=STREAMED)
    async def send_message(
        id: SandboxId, body: WorkerMessage, request: Request, accept: Annotated[str, Header()] = ""
    ) -> Response:
        if body.stream or "text/event-stream" in accept:
            return EventStream(nullcontext(worker), lambda held: held.message(id, body), _failed)
        return answer(await until_disconnect(request.receive, worker.answer(id, body)))

    @router.post("/sandboxes/{id}/worker/sync", response_model=WorkerSync)
    async def sync_worker_sandbox(id: SandboxId, request: Request, body: SyncRequest | None = None) -> Response:
        return answer(await until_disconnect(request.receive, worker.sync(id, body)))

    return router


def _failed(error: SkerryError) -> AgentFault:
    return AgentFault(error=error.message, code=error.code)


def proxy_routes(registry: Registry, worker: Worker, previews: Previews, settings: Settings) -> list[Any]:
    proxy = OpenCodeProxy(registry, worker, previews, settings)
    previews.pool.revive = proxy.revive
    return [
        Route(OPENCODE, proxy, name="opencode", include_in_schema=False),
        WebSocketRoute(OPENCODE, proxy.socket, name="opencode_socket"),
    ]


class OpenCodeProxy:
    """An ASGI application: OpenCode's own API, with the API's key, started and woken if need be. A model's key that is
    given to it stays at the door.

    Programs are let through here. A browser is led to the preview of the port: what OpenCode shows comes from a
    sandbox, and must not be a page of the API's own address.
    """

    def __init__(self, registry: Registry, worker: Worker, previews: Previews, settings: Settings) -> None:
        self._registry = registry
        self._worker = worker
        self._previews = previews
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        visit = visit_of(scope)
        place = None if visit is None else _RAW.match(visit.path)
        if visit is None or place is None:
            raise NotFoundError("There is no such address.", hint="It is /sandbox/{id}/opencode/ and the path inside.")
        id = own_id(place[1].decode("latin-1"))
        path = visit.path[place.end() :] or b"/"
        sent = dict(visit.headers)
        if sent.get(b"sec-fetch-mode") == b"navigate" and visit.method in ("GET", "HEAD"):
            led = await self._lead(id, path, visit.query, scope)
            return await led(scope, receive, send)
        visit = replace(checked(visit), authority=f"localhost:{PORT}", path=path)
        target = path + (b"?" + visit.query if visit.query else b"")
        inside = Exposure(id, PORT, token="", name=NAME, wake_on_request=True)
        admission = Admission(inside, target, visit.query, b"", None, [], self._previews.reception)
        try:
            if visit.method == "PUT" and (provider := _AUTH.fullmatch(unquote_to_bytes(path))) is not None:
                body = await _body(receive)
                await self._worker.authorize(id, provider[1].decode(errors="replace"), body)
                return await JSONResponse(True)(scope, receive, send)
            await self._started(id)
            await self._previews.passage.carry(admission, visit, receive, marked(send))
        except SkerryError as error:
            await error_response(error)(scope, receive, send)

    async def _started(self, id: str) -> None:
        """The agent runs. It is not held: who only listens does not keep a sandbox awake for ever."""
        if not self._worker.runs(id):
            async with self._worker.agent(id):
                return

    async def revive(self, exposure: Exposure) -> bool:
        """A page that was open while the sandbox slept, or OpenCode died, goes on: it asks again and again."""
        if exposure.port != PORT or exposure.name != NAME:
            return False
        async with self._worker.agent(exposure.sandbox_id) as agent:
            if await agent.lives():
                return True
        async with self._worker.agent(exposure.sandbox_id):
            return True

    async def _lead(self, id: str, path: bytes, query: bytes, scope: Scope) -> Response:
        try:
            await self._started(id)
            exposure = await self._registry.exposures.find(id, PORT)
            if exposure is None:
                wanted = ExposePort(port=PORT, name=NAME, wake_on_request=True)
                exposure = await self._registry.exposures.expose(id, wanted)
        except SkerryError as error:
            return error_response(error)
        places = Places(exposure, self._settings, scope)
        place, _, token = (places.url or places.path_url).partition("?")
        words = "&".join(part for part in (token, query.decode("latin-1")) if part)
        location = place.rstrip("/") + path.decode("latin-1") + (f"?{words}" if words else "")
        return Response(status_code=307, headers={"Location": location, "Cache-Control": "no-store"})

    async def socket(self, socket: WebSocket) -> None:
        """OpenCode's WebSockets (its terminals), message by message."""
        id = own_id(socket.path_params["id"])
        path = socket.path_params["rest"] or "/"
        query = f"?{socket.url.query}" if socket.url.query else ""
        try:
            async with self._worker.agent(id), self._registry.use(id) as runtime:
                sock = await runtime.portal.connect(PORT)
            theirs = await websockets.connect(
                f"ws://localhost:{PORT}{quote(path)}{query}",
                sock=sock,
                subprotocols=[Subprotocol(word) for word in socket.scope.get("subprotocols") or []] or None,
                max_size=None,
                proxy=None,
                open_timeout=10,
            )
        except (SkerryError, OSError, websockets.WebSocketException, TimeoutError) as error:
            if not isinstance(error, SkerryError):
                error = AgentError("OpenCode did not open this WebSocket.")
            known = as_skerry_error(error)
            # Accepted first: nobody is told why a handshake failed, but a close code is told.
            await socket.accept(chosen_protocol(socket.scope))
            return await socket.close(4000 + known.status, reason=known.code)
        async with theirs:
            await socket.accept(theirs.subprotocol)
            with self._registry.attend(id) as presence:
                await _relay(socket, theirs, presence.stir)


async def _body(receive: Receive) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > _LARGEST_CREDENTIAL:
            raise TooLargeError("This is too large for a credential.")
    return body


async def _relay(socket: WebSocket, theirs: ClientConnection, stir: Callable[[], None]) -> None:
    async def inward() -> None:
        with contextlib.suppress(WebSocketDisconnect, websockets.ConnectionClosed):
            while (message := await socket.receive())["type"] == "websocket.receive":
                stir()
                await theirs.send(message["text"] if message.get("text") is not None else message["bytes"])

    async def outward() -> None:
        with contextlib.suppress(WebSocketDisconnect, websockets.ConnectionClosed, RuntimeError):
            async for message in theirs:
                stir()
                await (socket.send_text(message) if isinstance(message, str) else socket.send_bytes(message))
            code = theirs.close_code or 1000
            await socket.close(code if code in range(1000, 1004) else 1000)

    tasks = [asyncio.ensure_future(inward()), asyncio.ensure_future(outward())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
