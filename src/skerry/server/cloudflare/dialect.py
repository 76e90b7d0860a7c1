"""What the server itself says to these clients (no key, too many requests, a fault of ours), in the words they know."""

from __future__ import annotations

import json
import re
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from skerry.models import ANSWERED_BY
from skerry.server.cloudflare.faults import moment

_CONTAINER = re.compile(r"/v1/sandboxes/[^/]+/container(?:-0\.3)?(?:/|$)")
_BRIDGE = re.compile(r"/v1/(?:sandbox|pool|openapi)(?:[/.]|$)")
_TRANSIENT = (429, 503)
_BY_APP = ANSWERED_BY.lower().encode()


class Dialects:
    """An ASGI layer around the guard. What is no error of the native API's shape passes as it is."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        words = _words(scope)
        if words is None:
            return await self.app(scope, receive, send)
        held: Message | None = None

        async def worded(message: Message) -> None:
            nonlocal held
            if message["type"] == "http.response.start" and message["status"] >= 400:
                held = message
                return
            if held is not None and message["type"] == "http.response.body":
                start, held = held, None
                body = b"" if message.get("more_body") else message.get("body", b"")
                by_app = any(name == _BY_APP for name, _ in start["headers"])
                told = None if by_app else _native(body)
                if told is not None:
                    content = json.dumps(words(start["status"], told)).encode()
                    kept = [(name, value) for name, value in start["headers"] if name != b"content-length"]
                    start = {**start, "headers": [*kept, (b"content-length", b"%d" % len(content))]}
                    message = {**message, "body": content}
                await send(start)
            await send(message)

        await self.app(scope, receive, worded)


def _words(scope: Scope) -> Any:
    if scope["type"] != "http":
        return None
    if _CONTAINER.match(scope["path"]):
        return _fault
    return _refusal if _BRIDGE.match(scope["path"]) else None


def _native(body: bytes) -> dict[str, Any] | None:
    if not body.startswith(b'{"ok": false, "error": {'):
        return None
    error: dict[str, Any] = json.loads(body)["error"]
    return error


def _fault(status: int, error: dict[str, Any]) -> dict[str, Any]:
    code = "CONTAINER_UNAVAILABLE" if status in _TRANSIENT else "INTERNAL_ERROR"
    code = "SERVICE_NOT_RESPONDING" if error["code"] == "port_not_listening" else code
    body = {"code": code, "message": error["message"], "context": error["details"], "httpStatus": status}
    body |= {"timestamp": moment(), "error": error["message"]}  # clients of 0.3 read it from there
    return body | ({} if error["hint"] is None else {"suggestion": error["hint"]})


def _refusal(status: int, error: dict[str, Any]) -> dict[str, Any]:
    said = error["message"] if error["hint"] is None else f"{error['message']} {error['hint']}"
    return {"error": said, "code": error["code"]}
