"""Where an exposed port is to be found: by a subdomain of its own, and by a path."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import Scope

from skerry.control.exposures import Exposure
from skerry.server.auth import is_loopback
from skerry.settings import Settings

LONGEST_LABEL = 63

_NO_SERVER = (
    "This sandbox runs inside the program that asked, where no server listens. Start one with `skerry serve` to see "
    "the preview."
)
_NO_DOMAIN = "This server has no domain for previews (SKERRY_PREVIEW_DOMAIN), so only the path works."


class Places:
    """The addresses of an exposure, as whoever asks with this request can use them; ``note`` says what is missing."""

    def __init__(self, exposure: Exposure, settings: Settings, scope: Scope) -> None:
        self.url: str | None = None
        self.note: str | None = None
        base = settings.public_url or _base(scope)
        self.path_url = f"{base}/preview/{exposure.sandbox_id}/{exposure.port}/?token={exposure.token}"
        local = _local(settings, scope)
        host = exposure.hostname or settings.preview_domain or local
        if host == "localhost":
            host = local or host
        label = f"{exposure.port}-{exposure.sandbox_id}-{exposure.token}"
        if host is None:
            self.note = _NO_SERVER if scope.get("server") is None else _NO_DOMAIN
        elif len(label) > LONGEST_LABEL:
            self.note = (
                f"Port, id and token make a name of {len(label)} characters, and a part of a host name has at most "
                f"{LONGEST_LABEL}. Use the path, or a shorter id or token."
            )
        else:
            scheme = settings.preview_scheme or ("http" if is_loopback(_name(host)) else "https")
            self.url = f"{scheme}://{label}.{host}/"


def _local(settings: Settings, scope: Scope) -> str | None:
    """``localhost:port``, where that reaches this server."""
    if scope.get("server") is None:
        return None
    authority = Headers(scope=scope).get("host", "")
    if is_loopback(name := _name(authority)):
        # As the client came: the port may be one that a tunnel or a container maps to ours.
        return f"localhost{authority.removeprefix(name)}"
    port = scope["server"][1]
    return f"localhost:{port}" if port and is_loopback(settings.host) else None


def _base(scope: Scope) -> str:
    """The address the client used; nothing, which leaves a path alone, where there is no server."""
    authority = Headers(scope=scope).get("host")
    return f"{scope['scheme']}://{authority}" if authority and scope.get("server") is not None else ""


def _name(authority: str) -> str:
    return authority.partition("]")[0] + "]" if authority.startswith("[") else authority.partition(":")[0]
