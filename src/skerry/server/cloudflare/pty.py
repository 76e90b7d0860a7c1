"""``/ws/pty``: the terminal of a session, with the frames the container's clients know."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from starlette.responses import PlainTextResponse
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from skerry.control.registry import Registry
from skerry.errors import SessionExistsError, SkerryError
from skerry.models import CreateSession
from skerry.runtime.viewer import Screen
from skerry.server.errors import as_skerry_error
from skerry.server.terminal import bridge

_LARGEST = 1000


async def serve(registry: Registry, id: str, socket: WebSocket, session: str | None = None) -> None:
    """First what the terminal shows already, then ``ready``, then everything as it comes; at the end ``exit``."""
    session = session or socket.query_params.get("sessionId") or socket.query_params.get("session")
    size = _size(socket)
    if not session or size is None:
        said = "sessionId query parameter required" if not session else "cols and rows must be numbers from 1 to 1000"
        return await refuse(socket, said)
    await socket.accept()
    try:
        async with registry.use(id) as runtime:
            if session != "default" and all(known.id != session for known in runtime.sessions.list()):
                with suppress(SessionExistsError):  # another request was quicker
                    await runtime.sessions.create(CreateSession(id=session, isolation=False))
            how: dict[str, Any] = {"cols": size[0] or 80, "rows": size[1] or 24}
            terminal = await runtime.terminals.of_session(session, shell=socket.query_params.get("shell"), **how)
        about = terminal.info()
        terminal.resize(size[0] or about.cols, size[1] or about.rows)
        viewer = terminal.attach()
        try:
            shown = await viewer.next()
            assert isinstance(shown, Screen)
            if shown.data:
                await socket.send_bytes(shown.data)
            await socket.send_json({"type": "ready"})
            await bridge(socket, terminal, viewer, lambda: registry.rouse(id))
        finally:
            terminal.detach(viewer)
    except WebSocketDisconnect:
        return
    except Exception as error:  # noqa: BLE001
        known: SkerryError = as_skerry_error(error, during="pty")
        with suppress(WebSocketDisconnect):
            await socket.send_json({"type": "error", "message": known.message})
    if WebSocketState.DISCONNECTED not in (socket.client_state, socket.application_state):
        with suppress(WebSocketDisconnect):
            await socket.close()


def _size(socket: WebSocket) -> tuple[int | None, int | None] | None:
    found: list[int | None] = []
    for name in ("cols", "rows"):
        text = socket.query_params.get(name)
        if text is not None and not (text.isascii() and text.isdigit() and 1 <= int(text) <= _LARGEST):
            return None
        found.append(None if text is None else int(text))
    return found[0], found[1]


async def refuse(socket: WebSocket, said: str, status: int = 400) -> None:
    """A plain answer in place of the upgrade, where the server can give one."""
    if "websocket.http.response" in socket.scope.get("extensions", {}):
        await socket.send_denial_response(PlainTextResponse(said, status))
    else:
        await socket.close()
