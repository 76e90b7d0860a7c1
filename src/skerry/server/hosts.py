"""The names that the server answers to, and the web pages that may call it.

A browser can be made to send requests to any address that it reaches, and DNS can be made to lead any name there. It
cannot lie about ``Host`` and ``Origin``, so these two tell what a page of somebody else sends from the rest.
"""

from __future__ import annotations

import re
import socket
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from skerry.control.reception import Reception
from skerry.errors import ForbiddenError
from skerry.server.auth import Refusal, is_loopback, turn_away
from skerry.settings import Settings

REMEMBERED = 256
_AUTHORITY = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]/@]*)(?::[0-9]{0,5})?")
_METHODS = b"GET, HEAD, POST, PUT, PATCH, DELETE"
_HEADERS = b"authorization, content-type, x-api-key, x-skerry-owner"
_HOUR = b"3600"


def hostname(authority: str) -> str:
    """Of ``Name.Example.:8787``, ``name.example``; nothing of what is no authority."""
    found = _AUTHORITY.fullmatch(authority.lower())
    return found[1].rstrip(".") if found else ""


class Hosts:
    """Lets a request through to the app, or answers it."""

    def __init__(self, app: ASGIApp, settings: Settings, reception: Reception) -> None:
        self.app = app
        self._reception = reception
        self._origins = frozenset(settings.origins)
        own = {urlsplit(settings.public_url).netloc.lower()} if settings.public_url else set()
        self._own_pages = own | {name for name in settings.hosts if "*" not in name}
        names = {hostname(name) for name in self._own_pages}
        below = {name[1:] for name in settings.hosts if name.startswith("*.")}
        # The first of each without keys, the other with them.
        self._names = [frozenset(names), frozenset(names | {settings.host.lower(), socket.gethostname().lower()})]
        self._below = [tuple(below), tuple(below)]
        if settings.preview_domain:
            self._names[True] |= {hostname(settings.preview_domain)}
            self._below[True] += ("." + hostname(settings.preview_domain),)
        self._any = "*" in settings.hosts
        self._known: dict[tuple[bytes, bool], bool] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        hosts, origin, site, asked = [], None, b"none", False
        for name, value in scope["headers"]:
            if name == b"host":
                hosts.append(value)
            elif name == b"origin":
                origin = value
            elif name == b"sec-fetch-site":
                site = value
            elif name == b"access-control-request-method":
                asked = True
        listed = origin is not None and origin.decode("latin-1").lower() in self._origins
        refused = self._unknown_host(hosts) or (None if listed else self._unknown_page(scope, hosts, origin, site))
        if refused is not None:
            return await turn_away(refused, scope, receive, send)
        if not listed or origin is None or scope["type"] != "http":
            return await self.app(scope, receive, send)
        if asked and scope["method"] == "OPTIONS":
            return await _preflight(origin, send)
        await self.app(scope, receive, _readable(origin, send))

    def _unknown_host(self, hosts: list[bytes]) -> Refusal | None:
        if all(self._knows(host) for host in hosts) and len(hosts) < 2:
            return None
        host = hosts[0].decode("latin-1")
        if self._reception.closed:
            return "host_refused", ForbiddenError(
                f"This server does not answer to the name {host!r}.",
                hint="Use its address or a name that it knows; SKERRY_HOSTS and SKERRY_PUBLIC_URL add names.",
            )
        return "host_refused", ForbiddenError(
            f"A server without API keys answers only to localhost, not to {host!r}.",
            hint="Use http://127.0.0.1 or http://localhost, or give the server an API key (SKERRY_API_KEYS).",
        )

    def _knows(self, authority: bytes) -> bool:
        asked = authority, self._reception.closed
        known = self._known.get(asked)
        if known is None:
            known = self._is_known(hostname(authority.decode("latin-1")), self._reception.closed)
            if len(self._known) < REMEMBERED:
                self._known[asked] = known
        return known

    def _is_known(self, host: str, keyed: bool) -> bool:
        if self._any or is_loopback(host) or host in self._names[keyed] or host.endswith(self._below[keyed]):
            return True
        # No page can have an address as its name and somebody else's DNS behind it.
        return keyed and _is_address(host)

    def _unknown_page(self, scope: Scope, hosts: list[bytes], origin: bytes | None, site: bytes) -> Refusal | None:
        # A mere GET names no origin, but browsers of this decade say that it comes from a page of another. Where there
        # are keys it opens nothing, and a link that leads here is no attack.
        keyed = self._reception.closed
        if not keyed and site not in (b"none", b"same-origin"):
            return "origin_refused", ForbiddenError(
                "A server without API keys does not answer requests that a page of another site makes.",
                hint="Type the address into the browser, or give the server an API key (SKERRY_API_KEYS).",
            )
        if origin is None:
            return None
        page = origin.decode("latin-1").lower()
        scheme, _, place = page.partition("://")
        host = hosts[0].decode("latin-1").lower() if hosts else ""
        # A proxy that speaks TLS for a server does not always say so.
        same = place == host and (keyed or scheme == _SCHEMES.get(scope["scheme"], scope["scheme"]))
        if same or place in self._own_pages:
            return None
        return "origin_refused", ForbiddenError(
            f"This server does not answer web pages of other origins ({page!r}).",
            hint="Call it from your own backend, or add the page's origin to SKERRY_ORIGINS.",
        )


_SCHEMES = {"ws": "http", "wss": "https"}


def _is_address(host: str) -> bool:
    try:
        ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


async def _preflight(origin: bytes, send: Send) -> None:
    """A browser asks whether a page may send what it is about to. Its answer is that page's alone, without cookies."""
    headers = [
        (b"access-control-allow-origin", origin),
        (b"access-control-allow-methods", _METHODS),
        (b"access-control-allow-headers", _HEADERS),
        (b"access-control-max-age", _HOUR),
        (b"vary", b"Origin"),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body"})


def _readable(origin: bytes, send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            added = [(b"access-control-allow-origin", origin), (b"vary", b"Origin")]
            message = {**message, "headers": [*message.get("headers", ()), *added]}
        await send(message)

    return sending
