"""Who may talk to the server: holders of a key or a session, or, without keys, programs of this machine."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import re
from contextlib import suppress
from dataclasses import replace
from ipaddress import ip_address
from typing import Literal
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from skerry.control.actor import LOCAL_CLIENT, Caller, actor, caller
from skerry.control.identity import OWNER
from skerry.control.inquiry import answered, inquiry
from skerry.control.keys import acting_as
from skerry.control.reception import Known, Reception
from skerry.errors import (
    ForbiddenError,
    InvalidRequestError,
    NotFoundError,
    RateLimitedError,
    SkerryError,
    UnauthorizedError,
)
from skerry.models import KeyScope
from skerry.server import security
from skerry.server.errors import error_response
from skerry.server.keys import key_in
from skerry.server.preview import cookies
from skerry.server.scopes import Need, Rule, rule_of
from skerry.server.tickets import Tickets
from skerry.settings import Settings

SESSION_COOKIES = (b"__Host-skerry-session", b"skerry-session")
"""The first where the connection is known to be safe, the other on plain HTTP, where browsers refuse the first."""
KEY_HEADERS = (b"authorization", b"x-api-key")
LOCAL = Caller(LOCAL_CLIENT)
SANDBOX = re.compile(r"/v1/sandboxes/([^/]+)")
TERMINAL = re.compile(r"/v1/sandboxes/([^/]+)/terminal")
PROTOCOL = "skerry.terminal"
"""The WebSocket subprotocol of terminals. A browser may offer its key beside it, as ``skerry.key.<base64url>``."""
_KEY_PROTOCOL = "skerry.key."

Refusal = tuple[str | None, SkerryError]
"""The kind of security event that it is, if it is one, and what the client is told."""


def is_loopback(host: str) -> bool:
    """Whether a host name or address, without port, always means this machine."""
    host = host.removeprefix("[").removesuffix("]").lower()
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def chosen_protocol(scope: Scope) -> str | None:
    """Ours, if the client offered it: a browser ends a connection on which none of its offers was taken up."""
    return PROTOCOL if PROTOCOL in scope.get("subprotocols", ()) else None


def _offered_key(scope: Scope) -> bytes:
    for offer in scope.get("subprotocols", ()):
        if offer.startswith(_KEY_PROTOCOL):
            encoded = offer.removeprefix(_KEY_PROTOCOL)
            try:
                return base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4))
            except (binascii.Error, ValueError):
                return b""
    return b""


async def turn_away(refused: Refusal, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request that is not let in, and write down that it was made."""
    kind, refusal = refused
    host, client = Headers(scope=scope).get("host", ""), scope.get("client")
    place = SANDBOX.match(scope["path"])
    sandbox = security.shown_host(place[1]) if place else None
    if kind is not None:
        security.report(kind, client[0] if client else "", host=security.shown_host(host), sandbox=sandbox)
    answered(refusal.status, refusal.code)
    if scope["type"] == "websocket":
        scope["query_string"] = b""  # Uvicorn logs it, and there may be a ticket in it
        # Accepted first: a browser is not told why a handshake failed, but it is told a close code.
        await receive()
        await send({"type": "websocket.accept", "subprotocol": chosen_protocol(scope)})
        return await send({"type": "websocket.close", "code": 4000 + refusal.status, "reason": refusal.code})
    await error_response(refusal)(scope, receive, send)


class Guard:
    """Lets a request through to the app, or answers it."""

    def __init__(self, app: ASGIApp, settings: Settings, reception: Reception | None = None) -> None:
        self.app = app
        self._reception = reception or Reception(settings)
        self._metrics_open = settings.metrics_open
        self._tickets = Tickets()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        scope["tickets"] = self._tickets
        scope["by_ticket"] = None
        headers = Headers(scope=scope)
        if not self._reception.closed:
            _announce(LOCAL)
            scope["by_ticket"] = None if (ticket := self._redeem(scope)) is None else isinstance(ticket, Caller)
            # What may be a page of somebody else was turned away before (hosts.py).
            return await self.app(scope, receive, send)
        try:
            found = await self._identify(headers, scope)
        except SkerryError as error:
            found = "rate_limited" if isinstance(error, RateLimitedError) else None, error
        if not isinstance(found, Known):
            return await turn_away(found, scope, receive, send)
        _announce(found.caller, by_session=scope.get("session") is not None)
        if found.caller.credential is None:
            return await self.app(scope, receive, send)
        await self._attend(found, scope, receive, send)

    async def _attend(self, known: Known, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request for as long as what it came with is good."""
        begun = False

        async def noted(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        with self._reception.visit(known) as visit:
            try:
                return await self.app(scope, receive, noted)
            except asyncio.CancelledError:
                if not visit.ended:
                    raise
                if visit.task is not None:
                    visit.task.uncancel()
        # What was begun is broken off: there is no other way to say that it is not the end.
        if scope["type"] == "websocket":
            with suppress(Exception):
                await send({"type": "websocket.close", "code": 4401, "reason": "unauthorized"})
        elif not begun:
            await error_response(_wanted())(scope, receive, send)

    # -- who it is -----------------------------------------------------------------------------------------------------

    async def _identify(self, headers: Headers, scope: Scope) -> Known | Refusal:
        """Whoever asks, if they may ask this."""
        method = "WS" if scope["type"] == "websocket" else scope["method"]
        rule = rule_of(method, scope["path"])
        if rule.need is Need.OPEN or (self._metrics_open and rule.route == "GET /metrics"):
            return Known(Caller("anybody", scope=KeyScope.READ_ONLY), None, None, 0.0)
        known, by_session = await self._known(headers, scope), False
        if known is None and scope["by_ticket"] is None:
            token = _session_in(headers)
            known = None if token is None else await self._reception.by_session(token)
            by_session = known is not None
        if known is None:
            return self._unknown(headers, scope)
        if by_session and (forged := _forged(known, headers, scope, method)) is not None:
            return forged
        scope["session"] = known if by_session else None
        self._reception.pace(known.caller)
        if not rule.allows(known.caller, by_session=by_session):
            return _beyond(known.caller, rule, scope)
        if known.caller.sandbox is not None and (place := SANDBOX.match(scope["path"])) is not None:
            known.caller.id(place[1])  # here too, where a WebSocket that is refused is told so
        owner = headers.get("x-skerry-owner")
        if owner is not None and owner != known.caller.owner:
            if known.caller.scope is not KeyScope.ADMIN:
                return "scope_refused", ForbiddenError("Only an admin acts for another owner.")
            if not OWNER.fullmatch(owner):
                return None, InvalidRequestError("X-Skerry-Owner is not the name of an owner.")
            known = replace(known, caller=acting_as(known.caller, owner))
        return known

    async def _known(self, headers: Headers, scope: Scope) -> Known | None:
        """By a key, or by a ticket, which is taken out of the query and used up in any case."""
        ticket = self._redeem(scope)
        for name, value in headers.raw:
            if name in KEY_HEADERS and (key := key_in(name, value)) is not None:
                known = await self._reception.by_key(key)
                if known is not None:
                    return known
        if scope["type"] == "websocket" and TERMINAL.fullmatch(scope["path"]):
            known = await self._reception.by_key(_offered_key(scope))
            if known is not None:
                return known
        if ticket is None:
            return None
        scope["by_ticket"] = isinstance(ticket, Caller)
        if not isinstance(ticket, Caller):
            return None
        return await self._reception.again(replace(ticket, name="terminal page"))

    def _unknown(self, headers: Headers, scope: Scope) -> Refusal:
        if scope["by_ticket"] is not None:
            kind = "ticket_wrong"
        else:
            given = any(name in headers for name in ("authorization", "x-api-key")) or _offered_key(scope)
            kind = "api_key_wrong" if given else "api_key_missing"
        return kind, _wanted()

    def _redeem(self, scope: Scope) -> Caller | Literal[False] | None:
        """Whose ticket the request came with. It is taken out of the query, so that no one logs it.

        False for one that is not good, None for a request without one.
        """
        page = TERMINAL.fullmatch(scope["path"])
        if page is None or not scope["query_string"] or scope.get("method", "GET") != "GET":
            return None
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True, errors="surrogateescape")
        given = [value for name, value in query if name == "ticket"]
        if not given:
            return None
        rest = [(name, value) for name, value in query if name != "ticket"]
        scope["query_string"] = urlencode(rest, errors="surrogateescape").encode()
        return (self._tickets.redeem(given[0], page[1].strip().lower()) or False) if len(given) == 1 else False


def _announce(who: Caller, *, by_session: bool = False) -> None:
    """Tell all that comes after who asks, and the record."""
    actor.set(who.name)
    caller.set(who)
    asked = inquiry.get()
    if asked is not None and who.name != LOCAL_CLIENT:
        asked.owner = who.owner
        if by_session:
            asked.user = who.name
        else:
            asked.key = who.credential or who.name


def _wanted() -> UnauthorizedError:
    return UnauthorizedError(
        "This server wants an API key.", hint="Send it as `Authorization: Bearer KEY` or `X-API-Key: KEY`."
    )


def _beyond(who: Caller, rule: Rule, scope: Scope) -> Refusal:
    if not rule.route:
        where = f"{scope.get('method', 'GET')} {scope['path']}"
        return None, NotFoundError(f"There is no route {where}.", hint="GET /openapi.json lists them all.")
    if rule.need in (Need.SESSION, Need.ACCOUNT):
        return "scope_refused", ForbiddenError("This is for people who have signed in.")
    return "scope_refused", ForbiddenError(
        f"A key of scope {who.scope.value!r} may not do this.",
        hint=f"It takes one of scope {'admin' if rule.need is Need.ADMIN else 'use'!r}.",
        details={"scope": who.scope.value, "needs": rule.need.value},
    )


def _session_in(headers: Headers) -> bytes | None:
    for value in headers.getlist("cookie"):
        for name in SESSION_COOKIES:
            if (token := cookies.read(value.encode("latin-1"), name)) is not None:
                return token
    return None


def _forged(known: Known, headers: Headers, scope: Scope, method: str) -> Refusal | None:
    """A browser sends its cookies with what any page makes it send; only a page of ours knows the session's word."""
    origin = headers.get("origin")
    if origin is not None and not _same_origin(origin, headers, scope):
        return "csrf_refused", ForbiddenError("A page of another origin may not use this session.")
    if method in ("GET", "HEAD") or (method == "WS" and origin is not None):
        return None
    if scope["path"].startswith("/api/") and origin is None and "sec-fetch-site" not in headers:
        return None  # no browser, so nobody's page
    given = headers.get("x-skerry-csrf", "")
    if hmac.compare_digest(given.encode("latin-1"), (known.csrf or "").encode()) and known.csrf:
        return None
    return "csrf_refused", ForbiddenError(
        "A request that changes something wants the session's word against forgery.",
        hint="Send the `csrf` of GET /v1/auth/me as the header X-Skerry-CSRF.",
    )


def _same_origin(origin: str, headers: Headers, scope: Scope) -> bool:
    scheme = {"ws": "http", "wss": "https"}.get(scope["scheme"], scope["scheme"])
    host = headers.get("host", "").lower()
    # A proxy in front may have ended the TLS of it.
    return origin.lower() in (f"{scheme}://{host}", f"https://{host}")
