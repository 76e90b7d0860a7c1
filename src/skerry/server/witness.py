"""The outermost layer: gives every request a name, and puts on record what was asked for and what became of it.

An entry of the audit log is made when the answer begins, and for a stream of events when it ends. What changes more
than the inside of a sandbox is in the store before it is answered.
"""

from __future__ import annotations

import os
import pwd
import re
import time
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from skerry.control.actor import PREVIEW, STRANGER, actor
from skerry.control.audit import Audit, clean
from skerry.control.inquiry import Inquiry, inquiry
from skerry.errors import AuditUnavailableError
from skerry.models import Outcome
from skerry.redaction import redact
from skerry.server.allowance import Allowance
from skerry.server.directory import FOUND
from skerry.server.errors import error_response

log = structlog.get_logger("skerry.access")

EMBEDDED = "embedded"
REQUEST_ID = b"x-request-id"
READING = frozenset({"GET", "HEAD", "OPTIONS"})
INSIDE = frozenset({"commands", "code", "files", "processes", "git", "proxy", "opencode", "container", "bridge"})
"""Nouns that change only what is inside a sandbox: on record soon, not before the answer."""
BEYOND = frozenset({"permission_denied", "read_only", "bucket_denied", "git_auth_failed"})
"""Codes that look like a refusal of the server's, but are somebody else's."""
HIDDEN = frozenset({"sandbox_not_found", "snapshot_not_found", "backup_not_found", "preview_not_found"})
"""Not there, or somebody else's: who asks is not told which, and so both are on record."""
STRANGERS = (20, 60.0, 4096)
"""So many refusals of one kind for one address are on record in a minute, and how many more there were."""
LONGEST_AGENT = 200
LONGEST_DETAIL = 200

_SANE = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._:-]{0,63}")
_STREAM = b"text/event-stream"
_CLIENT_GONE = 499
_TRY_LATER = 1013
_BOX = re.compile(r"/v1/sandboxes/([A-Za-z0-9][A-Za-z0-9_-]{0,62})(?=/|$)")


@dataclass(frozen=True, slots=True)
class Operation:
    """What a route does, as the audit log names it."""

    name: str
    path: str
    lasting: bool
    """Whether it changes more than the inside of a sandbox."""


_NOTHING = Operation("unknown", "", False)
_PREVIEW = Operation("preview", "preview", False)


def _request_id() -> str:
    # Not a counter: how much others ask for is nobody's business. Always as long: an answer's length says nothing.
    return os.urandom(10).hex()


@lru_cache(maxsize=256)
def _shown(agent: bytes) -> str:
    text = agent.decode("latin-1")
    return redact("".join(character if character.isprintable() else "?" for character in text))


class Witness:
    def __init__(self, app: ASGIApp, audit: Audit | None, access_log: bool) -> None:
        self.app = app
        self._audit = audit if audit is not None and audit.enabled else None
        self._access_log = access_log
        self._strangers = Allowance(*STRANGERS)
        self._operations: dict[int, Operation] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        asked = _inquiry(scope)
        inquiry.set(asked)
        actor.set(STRANGER)
        sight = _Sight(self, scope, asked, send)
        try:
            if self._audit is not None and not sight.reads:
                try:
                    self._audit.require()
                except AuditUnavailableError as error:
                    if scope["type"] == "websocket":
                        return await send({"type": "websocket.close", "code": _TRY_LATER})
                    return await error_response(error)(scope, receive, sight.send)
            await self.app(scope, receive, sight.send)
        finally:
            await sight.end()

    def operation(self, scope: Scope) -> Operation:
        if actor.get() == PREVIEW:
            return _PREVIEW
        route = scope.get(FOUND) or scope.get("route") or _route(scope)
        if route is None:
            return _NOTHING
        known = self._operations.get(id(route))
        if known is None:
            tags = getattr(route, "tags", None) or (route.name.partition("_")[0],)
            lasting = not INSIDE.intersection(tags)
            known = self._operations[id(route)] = Operation(route.name, route.path, lasting)
        return known

    def note(self, operation: Operation, sight: _Sight, *, took: float | None, suffix: str = "") -> bool:
        """Put it on record, if it belongs there; whether it does, and must be in the store before it is answered."""
        audit, asked = self._audit, sight.asked
        by = EMBEDDED if sight.embedded else actor.get()
        if audit is None or by == PREVIEW:  # previews are put on record by who lets them in
            return False
        status, code = sight.status or asked.status, asked.code
        outcome = outcome_of(status, code)
        if sight.reads and outcome != "refused":
            return False
        details = _details(sight.scope, asked)
        if outcome == "refused":
            withheld = self._strangers.take((asked.client, code, by))
            if withheld is None:
                return False
            if withheld:
                details["withheld"] = withheld
        audit.note(
            {
                "actor": by,
                "key": asked.key,
                "owner": asked.owner,
                "user": asked.user,
                "client": asked.client,
                "agent": asked.agent,
                "request_id": asked.request_id,
                "operation": operation.name + suffix,
                "method": sight.scope.get("method", "WEBSOCKET"),
                "sandbox_id": _sandbox(sight.scope, asked),
                "outcome": outcome,
                "status": status,
                "code": code if outcome != "ok" else None,
                "took": None if took is None else int(took * 1000),
                "command": asked.command,
                "details": details,
            }
        )
        if outcome == "refused" or code == AuditUnavailableError.code:
            return False
        return operation.lasting or bool(asked.made)

    async def settled(self) -> None:
        if self._audit is not None:
            await self._audit.settled()

    def access(self, operation: Operation, sight: _Sight, took: float) -> None:
        if self._access_log:
            asked = sight.asked
            if asked.sandbox is None:
                asked.sandbox = _sandbox(sight.scope, asked)
            log.info(
                "request",
                method=sight.scope.get("method", "WEBSOCKET"),
                route=operation.path or None,
                status=sight.status,
                code=asked.code,
                took=took,
            )


class _Sight:
    """One request as it is answered."""

    def __init__(self, witness: Witness, scope: Scope, asked: Inquiry, send: Send) -> None:
        self._witness = witness
        self._send = send
        self._began = time.perf_counter()
        self._noted = self._streams = False
        self._accepted = self._replaced = False
        self.scope = scope
        self.asked = asked
        self.status: int | None = None
        self.embedded = scope.get("server") is None
        self.reads = scope["type"] == "http" and scope["method"] in READING

    async def send(self, message: Message) -> None:
        kind = message["type"]
        if kind == "http.response.body":
            if self._replaced:
                return
            if self._streams and not message.get("more_body", False):
                await self._note()
        elif kind == "http.response.start":
            self.status = message["status"]
            if actor.get() != PREVIEW:
                message = {**message, "headers": self._named(message)}
                self._streams = any(n == b"content-type" and v.startswith(_STREAM) for n, v in message["headers"])
                if not self._streams:
                    try:
                        await self._note()
                    except AuditUnavailableError as error:
                        return await self._replace(error)
        elif kind == "websocket.accept":
            self._accepted = True
            await self._note()
        await self._send(message)

    def _named(self, message: Message) -> list[tuple[bytes, bytes]]:
        kept = [pair for pair in message.get("headers", ()) if pair[0].lower() != REQUEST_ID]
        return [*kept, (REQUEST_ID, self.asked.request_id.encode())]

    async def _note(self) -> None:
        if not self._noted:
            self._noted = True
            operation = self._witness.operation(self.scope)
            if self._witness.note(operation, self, took=self._took()):
                await self._witness.settled()

    async def _replace(self, error: AuditUnavailableError) -> None:
        """Another answer than the one that was to be given."""
        self._replaced = True
        other = error_response(error)
        self.status = other.status_code
        start = {"type": "http.response.start", "status": other.status_code, "headers": other.raw_headers}
        await self._send({**start, "headers": self._named(start)})
        await self._send({"type": "http.response.body", "body": other.body})

    async def end(self) -> None:
        """It is over, however it ended."""
        operation = self._witness.operation(self.scope)
        took = self._took()
        if self._accepted:
            if self.asked.code is None or self.asked.status not in (401, 403):
                self._witness.note(operation, self, took=took, suffix="_closed")
        elif not self._noted:
            if self.status is None:
                self.status, self.asked.code = _CLIENT_GONE, "client_gone"
            self._witness.note(operation, self, took=took)
        self._witness.access(operation, self, took)

    def _took(self) -> float:
        return round((time.perf_counter() - self._began) * 1000, 3)


def outcome_of(status: int | None, code: str | None) -> Outcome:
    if code is None and (status is None or status < 400):
        return "ok"
    if code in HIDDEN or (status in (401, 403, 429) and code not in BEYOND):
        return "refused"
    return "failed"


def _inquiry(scope: Scope) -> Inquiry:
    agent = given = b""
    for name, value in scope["headers"]:
        if name == b"user-agent":
            agent = value
        elif name == REQUEST_ID:
            given = value
    box = _BOX.match(scope["path"])
    sandbox = box[1].lower() if box else None
    request_id = given.decode() if _SANE.fullmatch(given) else _request_id()
    if scope.get("server") is None:
        return Inquiry(request_id, "", _shown(agent[:LONGEST_AGENT]), user=_own_user(), sandbox=sandbox)
    client = scope.get("client")
    return Inquiry(request_id, client[0] if client else "", _shown(agent[:LONGEST_AGENT]), sandbox=sandbox)


@cache
def _own_user() -> str:
    """Who runs the program that the server is a part of."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def _route(scope: Scope) -> Any:
    """The route of a request that was refused before it got there."""
    directory = getattr(scope["app"].state, "directory", None) if "app" in scope else None
    found = None if directory is None else directory.find(scope)
    if found is None:
        return None
    route, child = found
    scope[FOUND] = route
    scope.setdefault("path_params", child.get("path_params", {}))
    return route


def _sandbox(scope: Scope, asked: Inquiry) -> str | None:
    if asked.sandbox is not None:
        return asked.sandbox
    if scope["path"].startswith("/v1/sandboxes/"):
        id = scope.get("path_params", {}).get("id")
        if id is not None:
            return clean(str(id)[:LONGEST_DETAIL].strip().lower())
    return asked.made[0] if asked.made else None


def _details(scope: Scope, asked: Inquiry) -> dict[str, Any]:
    """What else names the thing that was asked for: a port, a snapshot, an image, the sandboxes that were made."""
    about: dict[str, Any] = {}
    parameters = scope.get("path_params")
    if parameters:
        named = scope["path"].startswith("/v1/sandboxes/")
        for name, value in parameters.items():
            if name not in ("rest", "path") and not (named and name == "id"):
                about[name] = clean(redact(str(value)[:LONGEST_DETAIL]))
    if asked.call is not None:
        about["call"] = clean(redact(asked.call[:LONGEST_DETAIL]))
    if asked.made:
        about["made"] = list(asked.made)
    return about
