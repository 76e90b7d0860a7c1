"""A sandbox as one request of the container's API sees it: its runtime, and sessions that exist when they are named."""

from __future__ import annotations

import base64
import binascii
import posixpath
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from skerry.control.inquiry import asked_to_run
from skerry.control.registry import Registry
from skerry.errors import SessionExistsError, SessionNotFoundError
from skerry.models import CreateSession
from skerry.runtime.runtime import Runtime
from skerry.server.cloudflare.faults import Fault, invalid, moment

SESSIONLESS = "__DISABLE_SESSION__"
HOME = "/root"
Json = dict[str, Any]


@dataclass(frozen=True)
class Stream:
    """An answer that is a stream of events."""

    events: AsyncIterator[Json]


Answer = Json | Stream
Operation = Callable[["Box"], Awaitable[Answer]]


@dataclass
class Box:
    registry: Registry
    id: str
    runtime: Runtime
    body: Json = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    """What the route's path holds."""

    def done(self, **facts: Any) -> Json:
        return {"success": True, **facts, "timestamp": moment()}

    # -- what the request says -----------------------------------------------------------------------------------------

    def text(self, name: str, default: str | None = None) -> str:
        value = self.body.get(name, default)
        if value is None:
            raise invalid(f"{name} is required")
        if not isinstance(value, str):
            raise invalid(f"{name} must be a string")
        return value

    def command(self, name: str = "command") -> str:
        command = self.text(name)
        asked_to_run(command)
        return command

    def maybe(self, name: str, kind: type | tuple[type, ...] = str) -> Any:
        value = self.body.get(name)
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool) != (kind is bool)):
            raise invalid(f"{name} has a type that it cannot have")
        return value

    def timeout(self) -> float | None:
        value = self.maybe("timeoutMs", (int, float))
        if value is not None and value <= 0:
            raise invalid("timeoutMs must be greater than 0")
        return None if value is None else float(value)

    def env(self, name: str = "env") -> dict[str, str | None]:
        value = self.maybe(name, dict) or {}
        if not all(isinstance(one, str) or one is None for one in value.values()):
            raise invalid(f"{name} must hold strings")
        return dict(value)

    # -- sessions ------------------------------------------------------------------------------------------------------

    @property
    def session_id(self) -> str | None:
        given = self.maybe("sessionId") or self.query.get("session") or self.query.get("sessionId")
        return given or None

    async def session(self) -> str | None:
        """The session that is meant, made now if it is unknown; None for none at all."""
        id = self.session_id
        if id == SESSIONLESS:
            return None
        if id is None:
            return "default"
        try:
            self.runtime.sessions.find(id)
        except SessionNotFoundError:
            with suppress(SessionExistsError):  # another request was quicker
                await self.runtime.sessions.create(CreateSession(id=id, isolation=False))
        return id

    # -- paths ---------------------------------------------------------------------------------------------------------

    async def path(self, name: str = "path") -> str:
        """A path of the request; one that is not absolute is meant from where the session stands."""
        given = self.text(name)
        problem = "Path must be a non-empty string" if not given else ""
        if "\0" in given:
            problem = "Path contains null bytes"
        if problem:
            error = {"field": name, "message": problem, "code": "INVALID_PATH"}
            raise invalid(f"Invalid path format for '{given}': {problem}", validationErrors=[error])
        if given.startswith("/"):
            return posixpath.normpath(given)
        session = await self.session()
        cwd = "/workspace"
        if session is not None:
            cwd, _ = await self.runtime.sessions.find(session).state()
        return posixpath.normpath(posixpath.join(cwd, given))


def decoded(content: str, encoding: str | None, path: str) -> bytes:
    if encoding in (None, "utf-8", "utf8"):
        try:
            return content.encode()
        except UnicodeEncodeError:
            raise invalid(f"The content for '{path}' is not valid Unicode text") from None
    if encoding != "base64":
        raise invalid(f"Unknown encoding '{encoding}'", encoding=encoding)
    try:
        return base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError):
        error = {"field": "content", "message": "Invalid base64 characters", "code": "INVALID_BASE64"}
        raise invalid(
            f"Invalid base64 content for '{path}': must contain only A-Z, a-z, 0-9, +, /, =", validationErrors=[error]
        ) from None


def named(body: Any, session: Any) -> Any:
    """A request whose session is named beside it, unless it names one itself."""
    return {"sessionId": session, **body} if session and isinstance(body, dict) else body


def unknown_route() -> Fault:
    return Fault("UNKNOWN_ERROR", "The requested endpoint was not found", status=404)
