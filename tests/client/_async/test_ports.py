"""Exposed ports through the SDK. The sync tests are generated from these."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from skerry import (
    AsyncSandbox,
    InvalidHostnameError,
    InvalidPortError,
    InvalidRequestError,
    InvalidTokenError,
    PortNotExposedError,
    PortNotListeningError,
    SandboxNotFoundError,
    State,
)


@pytest.fixture
async def sandbox(home: Path) -> AsyncIterator[AsyncSandbox]:
    async with AsyncSandbox(f"ports-{secrets.token_hex(4)}", home=home, ephemeral=True) as sandbox:
        yield sandbox


async def test_a_port_is_exposed_listed_and_closed(sandbox: AsyncSandbox) -> None:
    exposed = await sandbox.expose_port(3000, "dev-server", hostname="preview.example.com")
    assert exposed.url == f"https://3000-{sandbox.id}-{exposed.token}.preview.example.com/"
    assert (exposed.port, exposed.name, exposed.private, exposed.wake_on_request) == (3000, "dev-server", False, False)
    assert await sandbox.get_exposed_ports() == [exposed]
    assert await sandbox.is_port_exposed(3000)
    assert not await sandbox.is_port_exposed(3001)
    assert (await sandbox.info()).state is State.CREATED
    await sandbox.unexpose_port(3000)
    assert not await sandbox.is_port_exposed(3000)
    with pytest.raises(PortNotExposedError):
        await sandbox.unexpose_port(3000)


async def test_an_address_stays_until_another_token_is_asked_for(sandbox: AsyncSandbox) -> None:
    first = await sandbox.expose_port(80, hostname="a.example.com")
    again = await sandbox.expose_port(80, private=True, wake_on_request=True)
    assert again.url == first.url
    assert (again.private, again.wake_on_request, again.exposed_at) == (True, True, first.exposed_at)
    other = await sandbox.expose_port(80, token="chosen")
    assert other.url == f"https://80-{sandbox.id}-chosen.a.example.com/"


async def test_without_a_server_there_is_a_path_and_the_reason(sandbox: AsyncSandbox) -> None:
    exposed = await sandbox.expose_port(80)
    assert exposed.url is None
    assert exposed.path_url == f"/preview/{sandbox.id}/80/?token={exposed.token}"
    assert "skerry serve" in (exposed.note or "")


async def test_a_link_says_when_it_ends(sandbox: AsyncSandbox) -> None:
    exposed = await sandbox.expose_port(80, hostname="a.example.com", private=True)
    for seconds in (60, timedelta(minutes=1)):
        link = await sandbox.create_preview_link(80, expires_in=seconds)
        assert link.url is not None
        assert link.url.startswith(f"{exposed.url}?skerry_link=")
        left = (link.expires_at - datetime.now(UTC)).total_seconds()
        assert 30 < left <= 62
    with pytest.raises(PortNotExposedError):
        await sandbox.create_preview_link(81)


async def test_what_cannot_be_exposed_is_a_typed_error(sandbox: AsyncSandbox) -> None:
    with pytest.raises(InvalidPortError):
        await sandbox.expose_port(0)
    with pytest.raises(InvalidTokenError):
        await sandbox.expose_port(80, token="Not-This")
    with pytest.raises(InvalidHostnameError):
        await sandbox.expose_port(80, hostname="http://x")


async def test_looking_at_ports_makes_no_sandbox(home: Path) -> None:
    async with AsyncSandbox(f"ports-{secrets.token_hex(4)}", home=home) as sandbox:
        assert not await sandbox.is_port_exposed(80)
        assert await sandbox.get_exposed_ports() == []
        with pytest.raises(SandboxNotFoundError):
            await sandbox.unexpose_port(80)
        with pytest.raises(SandboxNotFoundError):
            await sandbox.info()


# -- requests to a server inside ---------------------------------------------------------------------------------------

ECHO = """
import http.server, json
class Echo(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        size = 0
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            while count := int(self.rfile.readline(), 16):
                size += len(self.rfile.read(count + 2)) - 2
            self.rfile.readline()
        else:
            size = len(self.rfile.read(int(self.headers.get("Content-Length", 0))))
        said = [self.command, self.path, size, dict(self.headers)]
        data = json.dumps(said).encode() if "large" not in self.path else bytes(4 << 20)
        self.send_response(418 if "teapot" in self.path else 200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Set-Cookie", "crumb=1; Path=/")
        self.end_headers()
        self.wfile.write(data)
    do_PATCH = do_GET
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer(("127.0.0.1", 3000), Echo).serve_forever()
"""


@pytest.fixture
async def echo(sandbox: AsyncSandbox) -> AsyncSandbox:
    await sandbox.write_file("/tmp/echo.py", ECHO)
    process = await sandbox.start_process("exec /usr/bin/python3 -I /tmp/echo.py")
    await process.wait_for_port(3000, timeout=20)
    return sandbox


async def test_a_server_inside_is_asked_though_it_is_not_exposed(echo: AsyncSandbox) -> None:
    answer = await echo.fetch(3000, "/a b?c=d#e", method="PATCH", headers={"X-Mine": "1"}, content="text")
    method, path, size, headers = answer.json()
    assert (method, path, size) == ("PATCH", "/a%20b?c=d", 4)
    assert (headers["host"], headers["x-mine"]) == ("localhost:3000", "1")
    assert (await echo.fetch(3000, "/teapot")).status_code == 418
    assert not await echo.is_port_exposed(3000)
    with pytest.raises(PortNotListeningError):
        await echo.fetch(3001)


async def test_bodies_of_any_size_go_piece_by_piece(echo: AsyncSandbox) -> None:
    pieces = [bytes(1 << 18)] * 16
    async with echo.fetch_stream(3000, method="PATCH", content=iter(pieces)) as answer:
        assert json.loads(await answer.aread())[2] == 4 << 20
    async with echo.fetch_stream(3000, "/large") as answer:
        sizes = [len(piece) async for piece in answer.aiter_bytes()]
    assert sum(sizes) == 4 << 20
    assert len(sizes) > 1


async def test_cookies_of_a_server_inside_are_not_kept(echo: AsyncSandbox) -> None:
    assert (await echo.fetch(3000)).headers["set-cookie"] == "crumb=1; Path=/"
    assert "cookie" not in (await echo.fetch(3000)).json()[3]


async def test_no_path_leads_out_of_the_sandbox(echo: AsyncSandbox) -> None:
    for path in ("/../../../../../../health", "/x/%2e%2E/../../health", "/./health"):
        assert (await echo.fetch(3000, path)).json()[1] == "/health"
    assert (await echo.fetch(3000, "/a/b/..")).json()[1] == "/a/"
    for path in ("health", ""):
        with pytest.raises(InvalidRequestError):
            await echo.fetch(3000, path)
    for headers in ({"Host": "elsewhere"}, {"X-Mine": "1\r\nX-Other: 2"}):
        with pytest.raises(InvalidRequestError):
            await echo.fetch(3000, headers=headers)
