"""Who may talk to the server: holders of an API key, or, without keys, programs of this machine."""

from __future__ import annotations

import base64
import binascii
import re
from ipaddress import ip_address
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from skerry.control.actor import LOCAL_CLIENT, actor
from skerry.errors import ForbiddenError, SkerryError, UnauthorizedError
from skerry.server import security
from skerry.server.errors import error_response
from skerry.server.keys import Keys
from skerry.server.tickets import Tickets
from skerry.settings import Settings

OPEN_PATHS = frozenset({"/health"})
SANDBOX = re.compile(r"/v1/sandboxes/([^/]+)")
TERMINAL = re.compile(r"/v1/sandboxes/([^/]+)/terminal")
PROTOCOL = "skerry.terminal"
"""The WebSocket subprotocol of terminals. A browser may offer its key beside it, as ``skerry.key.<base64url>``."""
_KEY_PROTOCOL = "skerry.key."

Refusal = tuple[str, SkerryError]
"""The kind of security event that it is, and what the client is told."""


def is_loopback(host: str) -> bool:
    """Whether a host name or address, without port, always means this machine."""
    host = host.removeprefix("[").removesuffix("]").lower()
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _hostname(authority: str) -> str:
    if authority.startswith("["):
        return authority.partition("]")[0] + "]"
    return authority.partition(":")[0]


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


class Guard:
    """Lets a request through to the app, or answers it."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self.app = app
        self._keys = Keys(settings.api_keys)
        self._open = OPEN_PATHS | ({"/metrics"} if settings.metrics_open else set())
        self._tickets = Tickets()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        scope["tickets"] = self._tickets
        scope["by_ticket"] = self._redeem(scope)
        refused = self._refusal(Headers(scope=scope), scope)
        if refused is None:
            return await self.app(scope, receive, send)
        kind, refusal = refused
        host, client = Headers(scope=scope).get("host", ""), scope.get("client")
        place = SANDBOX.match(scope["path"])
        sandbox = security.shown_host(place[1]) if place else None
        security.report(kind, client[0] if client else "", host=security.shown_host(host), sandbox=sandbox)
        if scope["type"] == "websocket":
            # Accepted first: a browser is not told why a handshake failed, but it is told a close code.
            await receive()
            await send({"type": "websocket.accept", "subprotocol": chosen_protocol(scope)})
            return await send({"type": "websocket.close", "code": 4000 + refusal.status, "reason": refusal.code})
        await error_response(refusal)(scope, receive, send)

    def _refusal(self, headers: Headers, scope: Scope) -> Refusal | None:
        if not self._keys:
            actor.set(LOCAL_CLIENT)
            return self._foreign(headers, scope)
        number = self._key(headers, scope)
        if number:
            # Its place in the list of keys: a name for the record that gives nothing of it away.
            actor.set(f"API key {number}")
        elif scope["by_ticket"]:
            actor.set("terminal page")
        if number or scope["path"] in self._open or scope["by_ticket"]:
            return None
        if scope["by_ticket"] is False:
            kind = "ticket_wrong"
        else:
            given = any(name in headers for name in ("authorization", "x-api-key")) or _offered_key(scope)
            kind = "api_key_wrong" if given else "api_key_missing"
        return kind, UnauthorizedError(
            "This server wants an API key.", hint="Send it as `Authorization: Bearer KEY` or `X-API-Key: KEY`."
        )

    def _redeem(self, scope: Scope) -> bool | None:
        """Whether the ticket that the request came with is good. It is taken out of the query, so that no one logs it.

        None for a request without one.
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
        return len(given) == 1 and self._tickets.redeem(given[0], page[1].strip().lower())

    def _key(self, headers: Headers, scope: Scope) -> int:
        """The number of the key that the request came with; 0 if it has none."""
        number = max((self._keys.number_in(name, value) for name, value in headers.raw), default=0)
        if not number and scope["type"] == "websocket" and TERMINAL.fullmatch(scope["path"]):
            number = self._keys.number(_offered_key(scope))
        return number

    def _foreign(self, headers: Headers, scope: Scope) -> Refusal | None:
        # Without a key the only protection is that the port is on loopback, and a browser on this machine breaks it:
        # any web page may send requests here, and one whose DNS name is rebound to 127.0.0.1 also reads the answers.
        # Browsers cannot lie about Host and Origin, so these two tell such requests from those of local programs.
        hosts = headers.getlist("host")
        host = hosts[0] if hosts else ""
        if not all(is_loopback(_hostname(name)) for name in hosts):
            return "host_refused", ForbiddenError(
                f"A server without API keys answers only to localhost, not to {host!r}.",
                hint="Use http://127.0.0.1 or http://localhost, or give the server an API key (SKERRY_API_KEYS).",
            )
        # A mere GET names no origin, but browsers of this decade say that it comes from a page of another.
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return "origin_refused", ForbiddenError(
                "A server without API keys does not answer requests that a page of another site makes.",
                hint="Type the address into the browser, or give the server an API key (SKERRY_API_KEYS).",
            )
        origin = headers.get("origin")
        scheme = {"ws": "http", "wss": "https"}.get(scope["scheme"], scope["scheme"])
        if origin is not None and origin.lower() != f"{scheme}://{host}".lower():
            return "origin_refused", ForbiddenError(
                f"A server without API keys does not answer web pages of other origins ({origin!r}).",
                hint="Give the server an API key (SKERRY_API_KEYS) and send it from your own backend.",
            )
        return None
