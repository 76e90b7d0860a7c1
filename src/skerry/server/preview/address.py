"""Which preview a request is for, by its host name, its path or the page it comes from."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple
from urllib.parse import urlsplit

from starlette.types import Scope

from skerry.server.auth import is_loopback
from skerry.server.preview import cookies
from skerry.server.preview.wire import Wire
from skerry.settings import Settings

OWN_HOST = "preview"
"""The name below the preview domain where path previews live, so that their pages are no pages of the API's origin."""

API_PATHS = ("/v1", "/health", "/docs", "/openapi.json")
"""What a link of a path preview never reaches where previews share the API's host name."""

_LABEL = re.compile(r"([1-9][0-9]{0,4})-([a-z0-9][a-z0-9_-]*)-([a-z0-9_]{1,63})", re.ASCII)
_NUMBERED = re.compile(r"[0-9]+-")
_AUTHORITY = re.compile(r"(?:[a-z0-9_.-]+|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?")
_PATH = re.compile(rb"/preview/([a-z0-9][a-z0-9_-]{0,72})/([1-9][0-9]{0,4})(?=/|$)")


class Form(Enum):
    HOST = "the host name says it"
    PATH = "the path says it"
    LINK = "a page of a path preview led there"


class Place(NamedTuple):
    """A port of a sandbox, as an address names it. Whether there is such a one is another question."""

    id: str
    port: int


@dataclass(frozen=True, slots=True)
class Claim:
    """A request that asks for a preview."""

    form: Form
    place: Place | None
    """None for an address that can be none."""
    token: str | None
    path: bytes
    """As the app inside shall see it."""
    shared: bool = False
    """Whether a request that turns out to be for no preview is for the API."""
    domain: str = ""


@dataclass(slots=True)
class Visit:
    """What of a request decides whether it is for a preview, and whether it may see it."""

    scheme: str
    method: str
    authority: str
    path: bytes
    query: bytes
    cookie: bytes
    accept: bytes
    referer: bytes
    headers: list[tuple[bytes, bytes]]
    client: str
    browser: bool
    wire: Wire | None = None
    """The connection itself, where there is one."""

    @property
    def hostname(self) -> str:
        return hostname(self.authority)

    @property
    def wants_page(self) -> bool:
        return b"text/html" in self.accept

    @property
    def secure(self) -> bool:
        return self.scheme in ("https", "wss")


def visit_of(scope: Scope) -> Visit | None:
    """The visit of an ASGI request; None for one that does not say which host it is for."""
    authority = cookie = accept = referer = b""
    hosts, browser = 0, False
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    for header, value in headers:
        if header == b"host":
            authority = value
            hosts += 1
        elif header == b"cookie":
            cookie = cookie + b"; " + value if cookie else value
        elif header == b"accept":
            accept = value
        elif header == b"referer":
            referer = value
        elif header == b"sec-fetch-site":
            browser = True
    name = authority.decode("latin-1").lower()
    if hosts != 1 or not _AUTHORITY.fullmatch(name):
        return None
    client = scope.get("client")
    return Visit(
        scheme=scope["scheme"],
        method=scope["method"],
        authority=name,
        path=scope.get("raw_path") or scope["path"].encode(),
        query=scope["query_string"],
        cookie=cookie,
        accept=accept,
        referer=referer,
        headers=headers,
        client=client[0] if client else "",
        browser=browser or b"text/html" in accept,
        wire=scope.get("skerry.wire"),
    )


def hostname(authority: str) -> str:
    """Without port and final dot."""
    if authority.startswith("["):
        return authority.partition("]")[0] + "]"
    return authority.partition(":")[0].rstrip(".")


def port_of(authority: str) -> str:
    """``:8787``, or nothing."""
    _, colon, port = authority.rpartition("]")[2].rpartition(":")
    return colon + port if port.isascii() and port.isdigit() else ""


class Addresses:
    """Reads addresses, for one server's settings."""

    def __init__(self, settings: Settings) -> None:
        self._scheme = settings.preview_scheme
        self._domain = settings.preview_domain
        known = ["localhost"] + ([hostname(self._domain)] if self._domain else [])
        self._domains = frozenset(known)
        self._own_hosts = frozenset(f"{OWN_HOST}.{domain}" for domain in known)

    def claim(self, visit: Visit) -> Claim | None:
        """What the request asks for; None when it is for the API."""
        host = visit.hostname
        label, _, rest = host.partition(".")
        if _NUMBERED.match(label) and rest:
            known = rest in self._domains
            match = _LABEL.fullmatch(label)
            if match is not None:
                place = _place(match[2], match[1])
                return Claim(Form.HOST, place, match[3], visit.path, shared=not known, domain=rest)
            if known:
                return Claim(Form.HOST, None, None, visit.path)
        own = host in self._own_hosts
        if visit.path.startswith(b"/preview/"):
            found = _PATH.match(visit.path)
            if found is None:
                return Claim(Form.PATH, None, None, visit.path)
            place = _place(found[1].decode(), found[2].decode())
            return Claim(Form.PATH, place, None, visit.path[found.end() :])
        if cookies.CURRENT in visit.cookie:
            linked = self._linked(visit, own)
            if linked is not None:
                return Claim(Form.LINK, linked, None, visit.path, shared=not own)
        return Claim(Form.PATH, None, None, visit.path) if own else None

    def _linked(self, visit: Visit, own: bool) -> Place | None:
        """The preview whose page led here, which is known by its address or by what the browser saw last."""
        came_from = _path_of(visit.referer, visit.authority)
        if came_from is not None and (match := _PATH.match(came_from)):
            return _place(match[1].decode(), match[2].decode())
        if not own:
            if _of_api(visit.path) or (visit.path == b"/" and came_from is None):
                return None
            if came_from is not None and (came_from == b"/" or _of_api(came_from)):
                return None
        return current(visit.cookie)

    def moved(self, visit: Visit) -> str | None:
        """Where a browser has to go to see a path preview, if not here.

        A page at the API's own address could call a server without keys as its user; there is a name of its own for
        previews wherever there is a domain for them, and *.localhost always means this machine.
        """
        host = visit.hostname
        if not visit.browser or host in self._own_hosts:
            return None
        if is_loopback(host):
            home = f"{visit.scheme}://{OWN_HOST}.localhost{port_of(visit.authority)}"
        elif self._domain:
            home = f"{self._scheme or 'https'}://{OWN_HOST}.{self._domain}"
        else:
            return None
        return home + visit.path.decode("ascii", "replace") + _after_path(visit.query)


def current(cookie: bytes) -> Place | None:
    """The path preview that the browser saw last."""
    value = cookies.read(cookie, cookies.CURRENT)
    if value is None:
        return None
    match = _PATH.fullmatch(b"/preview/" + value.replace(b".", b"/", 1))
    return _place(match[1].decode(), match[2].decode()) if match else None


def without(query: bytes, names: Iterable[bytes]) -> bytes:
    """The query without some parameters, the rest byte for byte as it was."""
    prefixes = tuple(name + b"=" for name in names)
    return b"&".join(part for part in query.split(b"&") if not part.startswith(prefixes))


def parameter(query: bytes, name: bytes) -> str | None:
    for part in query.split(b"&"):
        key, equals, value = part.partition(b"=")
        if key == name and equals:
            return value.decode("latin-1")
    return None


def _place(id: str, port: str) -> Place | None:
    number = int(port)
    return Place(id, number) if number <= 65535 else None


def _path_of(referer: bytes, authority: str) -> bytes | None:
    if not referer:
        return None
    try:
        parts = urlsplit(referer.decode("latin-1"))
    except ValueError:
        return None
    return parts.path.encode("latin-1") if parts.netloc.lower() == authority else None


def _of_api(path: bytes) -> bool:
    text = path.decode("latin-1")
    return any(text == known or text.startswith(known + "/") for known in API_PATHS)


def _after_path(query: bytes) -> str:
    return "?" + query.decode("latin-1") if query else ""
