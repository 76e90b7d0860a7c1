# Generated from src/skerry/client/_async/ports.py by scripts/generate_sync.py; change that file and run it again.
"""Ports of a sandbox: those that are reachable from outside, and requests to any of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import httpx

from skerry.client._sync.connection import Link
from skerry.client.concurrency import Content, body
from skerry.client.values import Seconds, given, milliseconds
from skerry.client.wire import app_headers, app_path
from skerry.errors import PortNotExposedError, SandboxNotFoundError
from skerry.models import ExposedPort, ExposedPortList, PreviewLink


class Ports:
    _link: Link

    def expose_port(
        self,
        port: int,
        name: str | None = None,
        *,
        token: str | None = None,
        hostname: str | None = None,
        private: bool = False,
        wake_on_request: bool = False,
    ) -> ExposedPort:
        """Make a server inside reachable in a browser; ``url`` of the answer is where.

        A port that is exposed already keeps its address unless another ``token`` is given. A ``private`` one also
        wants the API key or a link of ``create_preview_link``. ``wake_on_request`` lets a visit wake the sandbox.
        ``hostname`` is a domain whose subdomains reach the server, if it is not the one the server is set to.
        """
        body = {"port": port, "private": private, "wakeOnRequest": wake_on_request}
        return self._link.post(ExposedPort, "/ports", body | given(name=name, token=token, hostname=hostname))

    def unexpose_port(self, port: int) -> None:
        """Close a port again; raises ``PortNotExposedError`` if it was not exposed."""
        self._link.request("DELETE", f"/ports/{port}", prepare=False)

    def get_exposed_ports(self) -> list[ExposedPort]:
        """Every exposed port, with its addresses."""
        try:
            return (self._link.get(ExposedPortList, "/ports", prepare=False)).ports
        except SandboxNotFoundError:
            return []

    def is_port_exposed(self, port: int) -> bool:
        """Whether the port is exposed, whether or not something listens on it."""
        try:
            self._link.request("GET", f"/ports/{port}", prepare=False)
        except (PortNotExposedError, SandboxNotFoundError):
            return False
        return True

    def create_preview_link(self, port: int, *, expires_in: Seconds = 3600) -> PreviewLink:
        """A link that opens a private preview for ``expires_in`` seconds, for someone who has no API key."""
        seconds = (milliseconds(expires_in) or 0) / 1000
        return self._link.post(PreviewLink, f"/ports/{port}/link", {"expiresIn": seconds}, prepare=False)

    def fetch(
        self,
        port: int,
        path: str = "/",
        *,
        method: str = "GET",
        headers: Mapping[str, str] | Sequence[tuple[str, str]] | None = None,
        content: Content | None = None,
    ) -> httpx.Response:
        """Ask a server inside, on a port that need not be exposed; its answer is whole, whatever its status.

        ``path`` may have a query. Raises ``PortNotListeningError`` when nobody listens there. The server sees
        ``Host: localhost:<port>``; redirects are not followed.
        """
        with self.fetch_stream(port, path, method=method, headers=headers, content=content) as response:
            response.read()
            return response

    @contextmanager
    def fetch_stream(
        self,
        port: int,
        path: str = "/",
        *,
        method: str = "GET",
        headers: Mapping[str, str] | Sequence[tuple[str, str]] | None = None,
        content: Content | None = None,
    ) -> Iterator[httpx.Response]:
        """The same with the answer's body left to be read as it comes: ``for data in response.iter_bytes()``.

        ``content`` may be an iterator or a file, and is sent as it comes, too.
        """
        whole = None if content is None else body(content)
        target = f"/ports/{port}/proxy{app_path(path)}"
        with self._link.exchange(method, target, content=whole, headers=app_headers(headers)) as response:
            yield response
