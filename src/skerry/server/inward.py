"""What sandboxes of sessions reach of this server: over their own loopback, and nothing but their own session.

The connections are made inside and accepted out here (``portal.listen``), so no network is needed, and no other route
can be asked for.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections import Counter
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.auto import AutoWebSocketsProtocol
from uvicorn.server import ServerState

from skerry.agents.sessions.sessions import Sessions
from skerry.agents.sessions.spawner import CONTROL_PORT
from skerry.control.actor import SANDBOX, Caller, actor, caller
from skerry.control.audit import Audit
from skerry.errors import ForbiddenError
from skerry.models import KeyScope
from skerry.server import errors
from skerry.server import sessions as session_routes
from skerry.server.closing import Closing
from skerry.server.errors import error_response
from skerry.server.witness import Witness
from skerry.settings import Settings

_WebSockets: Any = AutoWebSocketsProtocol
_SPEAKER = "skerry.session"
MOST_CONNECTIONS = 32
"""Of one session's sandbox at a time: each is a descriptor of this server's, and a bridge and its tools need few."""
_SESSION = re.compile(r"/sessions/([^/]+)/")


class Inward:
    def __init__(self, sessions: Sessions, settings: Settings, closing: Closing, audit: Audit | None = None) -> None:
        app = FastAPI(title="Skerry", openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
        app.state.settings = settings
        app.state.closing = closing
        errors.install(app)
        app.router.routes.extend(session_routes.inside_routes(sessions).routes)
        self._app: ASGIApp = Witness(_Only(errors.Faults(app)), audit, access_log=False)
        self._settings = settings
        self.connections: set[asyncio.BaseTransport] = set()
        self._of: Counter[str] = Counter()

    async def __call__(self, session: str, connection: socket.socket) -> None:
        """Serve a connection that comes out of the sandbox of this session, for as long as it lasts."""
        if self._of[session] >= MOST_CONNECTIONS:
            return  # which closes it
        self._of[session] += 1
        try:
            await self._serve(session, connection)
        finally:
            self._of[session] -= 1
            if not self._of[session]:
                del self._of[session]

    async def _serve(self, session: str, connection: socket.socket) -> None:
        over = asyncio.Event()

        class Http(HttpToolsProtocol):
            def connection_lost(self, exc: Exception | None) -> None:
                super().connection_lost(exc)
                over.set()

        class WebSocket(_WebSockets):  # type: ignore[misc]
            def connection_lost(self, exc: Exception | None) -> None:
                super().connection_lost(exc)
                over.set()

        config = uvicorn.Config(
            self._speaking_for(session),
            ws=WebSocket,
            ws_max_size=self._settings.max_json_bytes,
            ws_ping_interval=None,  # the bridge's own heartbeat tells more
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
        )
        config.load()
        transport, _ = await asyncio.get_running_loop().connect_accepted_socket(
            lambda: Http(config=config, server_state=ServerState(), app_state={}), sock=connection
        )
        self.connections.add(transport)
        try:
            await over.wait()
        finally:
            self.connections.discard(transport)
            transport.abort()

    def _speaking_for(self, session: str) -> ASGIApp:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await self._app({**scope, _SPEAKER: session, "server": ("127.0.0.1", CONTROL_PORT)}, receive, send)

        return app


class _Only:
    """Lets nothing through but what is about one session."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        actor.set(SANDBOX)
        caller.set(Caller(SANDBOX, scope=KeyScope.READ_ONLY))
        about = _SESSION.match(scope["path"])
        if about is not None and about[1] != scope[_SPEAKER]:
            refusal = error_response(ForbiddenError("A sandbox speaks for its own session only."))
            if scope["type"] == "websocket":
                return await _deny(refusal, send)
            return await refusal(scope, receive, send)
        await self._app(scope, receive, send)


async def _deny(refusal: object, send: Send) -> None:
    await send({"type": "websocket.http.response.start", "status": 403, "headers": []})
    await send({"type": "websocket.http.response.body", "body": b""})
