"""Cookies between a browser and an app in a preview: ours stay here, and those of one sandbox reach no other.

By host name the browser itself keeps them apart, once no cookie says ``Domain``. Path previews share a host, so there
each app's cookies carry a prefix in the browser that they lose on the way to the app.
"""

from __future__ import annotations

OURS = b"skerry-"
_OURS = (OURS, b"__Host-" + OURS)
CURRENT = b"skerry-preview"


def token_name(id: str, port: int) -> bytes:
    return f"skerry-preview.{id}.{port}".encode()


def link_name(id: str, port: int) -> bytes:
    return f"skerry-link.{id}.{port}".encode()


def prefix(id: str, port: int) -> bytes:
    """Of the names of one path preview's cookies."""
    return f"skerry-app.{id}.{port}.".encode()


def read(header: bytes, name: bytes) -> bytes | None:
    for part in header.split(b";"):
        key, equals, value = part.strip().partition(b"=")
        if key == name and equals:
            return value
    return None


def to_app(header: bytes, scope: bytes | None) -> bytes:
    """The Cookie header as the app may see it; ``scope`` is the prefix of its names, if they have one."""
    if scope is None:
        if OURS not in header:
            return header
        return b"; ".join(part.strip() for part in header.split(b";") if not part.strip().startswith(_OURS))
    parts = (part.strip() for part in header.split(b";"))
    return b"; ".join(part[len(scope) :] for part in parts if part.startswith(scope))


def to_browser(header: bytes, scope: bytes | None) -> bytes | None:
    """A Set-Cookie header as the browser may see it; None for one that would overwrite ours."""
    pair, *attributes = header.split(b";")
    pair = pair.strip()
    if scope is not None:
        kept = [part for part in attributes if not _is(part, b"domain", b"path")]
        return b";".join([scope + pair, *kept, b" Path=/"])
    # Of a cookie without a name browsers send back the bare value, which could be spelled like one of ours.
    if pair.startswith((*_OURS, b"=")):
        return None
    if b"domain" not in header.lower():
        return header
    return b";".join([pair, *(part for part in attributes if not _is(part, b"domain"))])


def ours(name: bytes, value: bytes, *, secure: bool, lasting: int | None = None) -> bytes:
    """A Set-Cookie header for a cookie of ours."""
    parts = [name + b"=" + value, b"Path=/", b"HttpOnly", b"SameSite=Lax"]
    if lasting is not None:
        parts.append(b"Max-Age=%d" % lasting)
    if secure:
        parts.append(b"Secure")
    return b"; ".join(parts)


def _is(part: bytes, *attributes: bytes) -> bool:
    return part.partition(b"=")[0].strip().lower() in attributes
