"""Headers on their way through: what is said from hop to hop stays on its hop, what is secret stays here."""

from __future__ import annotations

from collections.abc import Iterable

from skerry.server.preview import cookies
from skerry.server.preview.access import Admission
from skerry.server.preview.address import Visit, port_of

Headers = list[tuple[bytes, bytes]]

HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authentication-info",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"http2-settings",
    }
)
# Said anew on each request, from what this server itself knows; a client's own word would be taken for ours.
_SAID_HERE = frozenset(
    {
        b"host",
        b"cookie",
        b"content-length",
        b"expect",
        b"forwarded",
        b"x-real-ip",
        b"x-original-url",
        b"x-sandbox-name",
        b"x-skerry-owner",
        b"x-skerry-csrf",
        b"x-forwarded-for",
        b"x-forwarded-host",
        b"x-forwarded-proto",
        b"x-forwarded-port",
        b"x-forwarded-prefix",
        b"x-forwarded-server",
    }
)
_NOT_TO_APP = HOP | _SAID_HERE
# Uvicorn says the date itself. The others are orders to a proxy in front of this server, to send files of its own.
_NOT_TO_BROWSER = HOP | {b"date", b"content-length", b"x-accel-redirect", b"x-sendfile", b"x-lighttpd-send-file"}
# On a host that previews share, these would speak for all of them.
_FOR_A_WHOLE_HOST = frozenset(
    {b"clear-site-data", b"service-worker-allowed", b"strict-transport-security", b"alt-svc", b"public-key-pins"}
)


def request_head(visit: Visit, admission: Admission, framing: Iterable[bytes]) -> bytes:
    """The request as the app inside gets it. ``framing`` are the lines that say how its body is sent, if any."""
    named = _named_in_connection(visit.headers)
    lines = [
        b"%b %b HTTP/1.1" % (visit.method.encode(), admission.target),
        b"host: " + visit.authority.encode("latin-1"),
    ]
    for name, value in visit.headers:
        if name in _NOT_TO_APP or name in named or admission.is_ours(name, value):
            continue
        lines.append(name + b": " + value)
    place = admission.exposure
    if visit.cookie:
        seen = cookies.to_app(visit.cookie, admission.cookie_scope)
        if seen:
            lines.append(b"cookie: " + seen)
    scheme = "https" if visit.secure else "http"
    port = port_of(visit.authority)[1:] or ("443" if visit.secure else "80")
    shown = visit.path + (b"?" + admission.query if admission.query else b"")
    lines += [
        b"x-forwarded-for: " + visit.client.encode("latin-1"),
        b"x-forwarded-host: " + visit.authority.encode("latin-1"),
        f"x-forwarded-proto: {scheme}".encode(),
        f"x-forwarded-port: {port}".encode(),
        f"x-original-url: {scheme}://{visit.authority}".encode("latin-1") + shown,
        f"x-sandbox-name: {place.sandbox}".encode(),
    ]
    if admission.prefix:
        lines.append(b"x-forwarded-prefix: " + admission.prefix)
    lines += framing
    lines.append(b"\r\n")
    return b"\r\n".join(lines)


def response_headers(headers: Headers, admission: Admission) -> Headers:
    """The origin's headers as the browser gets them, but for those that frame the body."""
    named = _named_in_connection(headers)
    scope = admission.cookie_scope
    passed: Headers = []
    for name, value in headers:
        if name in _NOT_TO_BROWSER or name in named:
            continue
        if name == b"set-cookie":
            cookie = cookies.to_browser(value, scope)
            if cookie is not None:
                passed.append((name, cookie))
        elif scope is None or name not in _FOR_A_WHOLE_HOST:
            passed.append((name, value))
    passed.extend((b"set-cookie", cookie) for cookie in admission.set_cookies)
    return passed


def _named_in_connection(headers: Headers) -> frozenset[bytes]:
    """The further headers that one of the two ends declared to be for its own hop."""
    for name, value in headers:
        if name == b"connection" and value.lower() not in (b"close", b"keep-alive"):
            break
    else:
        return frozenset()
    return frozenset(
        token.strip().lower() for name, value in headers if name == b"connection" for token in value.split(b",")
    )
