"""The other addresses of a container, led to the one below ``/v1/sandboxes`` before anybody judges the request.

    /api/… /ws… /rpc /proxy/…            at the root, with the header X-Sandbox-Id
    {id}.container.localhost[:port]/…    a host name of its own; below the preview domain, where there is one

So whoever guards, counts or records requests knows one path for each thing. The host name is checked as any other: a
server without keys answers to localhost alone.
"""

from __future__ import annotations

import re
from urllib.parse import parse_qsl, urlencode

from starlette.types import ASGIApp, Receive, Scope, Send

from skerry.server.preview.address import hostname
from skerry.settings import Settings

LABEL = "container"
_HEADER = b"x-sandbox-id"
_AT_ROOT = re.compile(r"/(?:api|ws|proxy)/|/(?:ws|rpc)$")
_DOCUMENTS = frozenset({"/v1/openapi", "/v1/openapi.json", "/v1/openapi.html"})
_ID = re.compile(rb"[A-Za-z0-9][A-Za-z0-9_-]*")
LONGEST = 63


class ContainerAddresses:
    """An ASGI layer in front of the guard."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self.app = app
        domains = ["localhost"] + ([hostname(settings.preview_domain)] if settings.preview_domain else [])
        self._endings = tuple(f".{LABEL}.{domain}" for domain in domains)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        id = None if scope["type"] == "lifespan" else self._sandbox(scope)
        if id is not None:
            front = b"/v1/sandboxes/%s/container" % id
            raw = scope.get("raw_path") or scope["path"].encode()
            scope = {**scope, "path": front.decode() + scope["path"], "raw_path": front + raw}
        elif scope["type"] == "http" and scope["path"] in _DOCUMENTS and b"token=" in scope["query_string"]:
            scope = _with_key(scope)
        await self.app(scope, receive, send)

    def _sandbox(self, scope: Scope) -> bytes | None:
        """The sandbox that the request names in one of these ways, as it is written there."""
        named, hosts = b"", []
        for header, value in scope["headers"]:
            if header == b"host":
                hosts.append(value)
            elif header == _HEADER:
                named = value
        if len(hosts) == 1:
            host = hostname(hosts[0].decode("latin-1").lower())
            for ending in self._endings:
                if host.endswith(ending):
                    return _checked(host.removesuffix(ending).encode("latin-1"))
        return _checked(named) if named and _AT_ROOT.match(scope["path"]) else None


def _with_key(scope: Scope) -> Scope:
    """The bridge's document may be opened in a browser, with the key in the address; nobody else shall see it there."""
    query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    given = next((value for name, value in query if name == "token"), "").encode("latin-1", "replace")
    rest = urlencode([(name, value) for name, value in query if name != "token"]).encode()
    headers = scope["headers"]
    if not any(name == b"authorization" for name, _ in headers):
        headers = [*headers, (b"authorization", b"Bearer " + given)]
    return {**scope, "query_string": rest, "headers": headers}


def _checked(id: bytes) -> bytes | None:
    # A Durable Object's own id has one character more than a name may have; it says no less without it.
    return id[:LONGEST] if _ID.fullmatch(id) and len(id) <= LONGEST + 1 else None
