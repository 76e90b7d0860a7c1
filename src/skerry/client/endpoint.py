"""Which server a client talks to: the given URL, SKERRY_URL, a server on the same home, or one inside this process."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass, field
from http.cookiejar import CookieJar, DefaultCookiePolicy
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlencode, urlsplit

import httpx

from skerry.client.frames import AsyncFrames, AsyncLocalFrames, AsyncWireFrames, Frames, LocalFrames, WireFrames
from skerry.errors import InvalidRequestError, ServerUnreachableError

if TYPE_CHECKING:
    from skerry.client.asgi import Host

_LOOPBACK = {"127.0.0.1", "localhost", "::1"}

# Commands may be silent for hours, so nothing but connecting has a deadline of its own.
_TIMEOUT = httpx.Timeout(None, connect=10.0)
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=100, keepalive_expiry=4.0)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server that can be talked to; ``socket`` is a Unix socket's path, ``host`` the server inside this process."""

    url: str
    headers: dict[str, str] = field(default_factory=dict)
    socket: str | None = None
    host: Host | None = None

    def client_async(self) -> httpx.AsyncClient:
        transport: httpx.AsyncBaseTransport | None = None
        if self.host is not None:
            from skerry.client.asgi import AsyncASGITransport

            transport = AsyncASGITransport(self.host)
        elif self.socket is not None:
            transport = httpx.AsyncHTTPTransport(uds=self.socket, limits=_LIMITS, verify=False)
        return httpx.AsyncClient(transport=transport, **self._options())

    def client(self) -> httpx.Client:
        transport: httpx.BaseTransport | None = None
        if self.host is not None:
            from skerry.client.asgi import ASGITransport

            transport = ASGITransport(self.host)
        elif self.socket is not None:
            transport = httpx.HTTPTransport(uds=self.socket, limits=_LIMITS, verify=False)
        return httpx.Client(transport=transport, **self._options())

    async def frames_async(self, path: str, params: dict[str, Any]) -> AsyncFrames:
        url = self._socket_url(path, params)
        if self.host is not None:
            return await AsyncLocalFrames.connect(self.host, url, self.headers)
        return await AsyncWireFrames.connect(url, self.headers, self.socket)

    def frames(self, path: str, params: dict[str, Any]) -> Frames:
        url = self._socket_url(path, params)
        if self.host is not None:
            return LocalFrames.connect(self.host, url, self.headers)
        return WireFrames.connect(url, self.headers, self.socket)

    def unreachable(self, error: Exception) -> ServerUnreachableError:
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return ServerUnreachableError(
                f"No Skerry server answers at {self.url}.",
                hint="Start one with `skerry serve`, or correct SKERRY_URL (unset, no server is needed).",
            )
        return ServerUnreachableError(f"The connection to {self.url} was lost: {error or type(error).__name__}.")

    def _options(self) -> dict[str, Any]:
        parts = urlsplit(self.url)
        return {
            "base_url": self.url,
            "headers": self.headers,
            "timeout": _TIMEOUT,
            "limits": _LIMITS,
            # Loading the certificates of the world takes longer than a command; plain HTTP has no use for them.
            "verify": parts.scheme == "https",
            "trust_env": parts.hostname not in _LOOPBACK,
            # The API sets none, and what an app inside sets must reach no other sandbox's.
            "cookies": CookieJar(DefaultCookiePolicy(allowed_domains=())),
        }

    def _socket_url(self, path: str, params: dict[str, Any]) -> str:
        scheme, rest = self.url.split("://", 1)
        query = urlencode(params)
        return f"{'wss' if scheme == 'https' else 'ws'}://{rest}{path}{'?' + query if query else ''}"


def resolve(url: str | None, api_key: str | None, home: str | Path | None, owner: str | None = None) -> Endpoint:
    """Find the server, starting one inside this process when there is no other. Blocks; call it off the event loop."""
    url = url or (None if home is not None else os.environ.get("SKERRY_URL")) or None
    api_key = api_key or os.environ.get("SKERRY_API_KEY") or None
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    if owner:
        headers["X-Skerry-Owner"] = owner
    if url is not None:
        return reach(url, headers)
    directory = home_directory(home)
    found = running(directory)
    if found is not None:
        return reach(found, headers)
    from skerry import embedded

    # The name is one that a server without API keys answers to.
    return Endpoint("http://localhost", headers, host=embedded.start(directory))


def reach(url: str, headers: dict[str, str]) -> Endpoint:
    """The endpoint of ``http://…``, ``https://…`` or ``unix:/path``."""
    if url.startswith("unix:"):
        return Endpoint("http://127.0.0.1", headers, socket=unquote(url.removeprefix("unix:").removeprefix("//")))
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidRequestError(f"{url!r} is not the URL of a server.", hint="Write it like http://127.0.0.1:8787.")
    return Endpoint(url.rstrip("/"), headers)


def home_directory(home: str | Path | None) -> Path:
    if home is not None:
        return Path(home).expanduser().resolve()
    from skerry.settings import Settings

    return Settings.from_env().home.expanduser().resolve()


def running(home: Path) -> str | None:
    """The URL of a live server on this home, as it wrote it down there."""
    try:
        note = json.loads((home / "server.json").read_text())
        url, pid = str(note["url"]), int(note["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return url if _alive(pid) and _listens(url) else None


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _listens(url: str) -> bool:
    """Process ids are used again, so a note of a dead server may name a living process."""
    try:
        if url.startswith("unix:"):
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(1.0)
                connection.connect(unquote(url.removeprefix("unix:").removeprefix("//")))
            return True
        parts = urlsplit(url)
        socket.create_connection((parts.hostname or "127.0.0.1", parts.port or 80), timeout=1.0).close()
    except OSError:
        return False
    return True
