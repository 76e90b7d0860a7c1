"""One request of the bridge: its sandbox, its session, what it sent; and how it is refused."""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from starlette.responses import Response

from skerry.control.actor import own_id
from skerry.control.identity import LONGEST
from skerry.control.registry import Registry
from skerry.errors import FileNotFoundInSandboxError, SessionExistsError, SessionNotFoundError, SkerryError
from skerry.models import CreateSession
from skerry.runtime.runtime import Runtime
from skerry.server.bounds import BoundedRequest
from skerry.server.errors import told
from skerry.settings import Settings

ROOT = "/workspace"
_ID = re.compile(r"[a-z2-7]{1,128}")
_SESSION = re.compile(r"[a-zA-Z0-9._-]{1,128}")


class Refused(Exception):
    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


def refusal(error: SkerryError, otherwise: str) -> Refused:
    error = told(error)
    if isinstance(error, FileNotFoundInSandboxError):
        return Refused(404, "workspace_read_not_found", error.message)
    status = error.status if error.status in (400, 401, 403, 404, 408, 409, 410, 413, 429) else 502
    return Refused(status, otherwise, str(error))


def is_sandbox(id: object) -> bool:
    return isinstance(id, str) and _ID.fullmatch(id) is not None


def is_session(id: object) -> bool:
    return isinstance(id, str) and _SESSION.fullmatch(id) is not None and ".." not in id


def sandbox_of(id: str) -> str:
    """The bridge's ids may be longer than ours."""
    return id if len(id) <= LONGEST else f"{id[:30]}-{hashlib.sha256(id.encode()).hexdigest()[:32]}"


Handler = Callable[["Call"], Awaitable[Response]]


class Call:
    """One request: its sandbox, its session, and what it sent."""

    def __init__(self, registry: Registry, request: BoundedRequest) -> None:
        self.registry = registry
        self.request = request

    @property
    def settings(self) -> Settings:
        settings: Settings = self.request.app.state.settings
        return settings

    @property
    def id(self) -> str:
        id: str = self.request.path_params["id"]
        if not is_sandbox(id):
            raise Refused(400, "invalid_request", "A sandbox's id is 1 to 128 of a-z and 2-7.")
        return own_id(sandbox_of(id))

    @property
    def session(self) -> str | None:
        given = self.request.headers.get("session-id")
        if given and not is_session(given):
            raise Refused(400, "invalid_request", "Session-Id is 1 to 128 letters, digits and . _ - without ..")
        return given or None

    async def json(self) -> dict[str, Any]:
        raw = await self.request.body()
        try:
            body = json.loads(raw) if raw else {}
        except (ValueError, RecursionError):
            raise Refused(400, "invalid_request", "The request body is not JSON.") from None
        if not isinstance(body, dict):
            raise Refused(400, "invalid_request", "The request body is not an object.")
        return body

    async def ready(self, runtime: Runtime) -> str | None:
        """The session that is named, made if it is unknown."""
        session = self.session
        if session is not None and session != "default":
            try:
                runtime.sessions.find(session)
            except SessionNotFoundError:
                with suppress(SessionExistsError):  # another request was quicker
                    await runtime.sessions.create(CreateSession(id=session, isolation=False))
        return session


def below(path: str) -> str:
    """A path of the workspace, absolute; whatever leads elsewhere is refused."""
    if "\0" in path:
        raise Refused(400, "invalid_request", "A path cannot hold a zero byte.")
    found = posixpath.normpath(posixpath.join(ROOT, path))
    if found != ROOT and not found.startswith(ROOT + "/"):
        raise Refused(403, "invalid_request", f"{path[:200]!r} is not below {ROOT}.")
    return found
