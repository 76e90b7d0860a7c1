# Generated from tests/client/_async/test_ports.py by scripts/generate_sync.py; change that file and run it again.
"""Exposed ports through the SDK. The sync tests are generated from these."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from skerry import (
    InvalidHostnameError,
    InvalidPortError,
    InvalidRequestError,
    InvalidTokenError,
    PortNotExposedError,
    PortNotListeningError,
    Sandbox,
    SandboxNotFoundError,
    State,
)


@pytest.fixture
def sandbox(home: Path) -> Iterator[Sandbox]:
    with Sandbox(f"ports-{secrets.token_hex(4)}", home=home, ephemeral=True) as sandbox:
        yield sandbox


def test_a_port_is_exposed_listed_and_closed(sandbox: Sandbox) -> None:
    exposed = sandbox.expose_port(3000, "dev-server", hostname="preview.example.com")
    assert exposed.url == f"https://3000-{sandbox.id}-{exposed.token}.preview.example.com/"
    assert (exposed.port, exposed.name, exposed.private, exposed.wake_on_request) == (3000, "dev-server", False, False)
    assert sandbox.get_exposed_ports() == [exposed]
    assert sandbox.is_port_exposed(3000)
    assert not sandbox.is_port_exposed(3001)
    assert (sandbox.info()).state is State.CREATED
    sandbox.unexpose_port(3000)
    assert not sandbox.is_port_exposed(3000)
    with pytest.raises(PortNotExposedError):
        sandbox.unexpose_port(3000)


def test_an_address_stays_until_another_token_is_asked_for(sandbox: Sandbox) -> None:
    first = sandbox.expose_port(80, hostname="a.example.com")
    again = sandbox.expose_port(80, private=True, wake_on_request=True)
    assert again.url == first.url
    assert (again.private, again.wake_on_request, again.exposed_at) == (True, True, first.exposed_at)
    other = sandbox.expose_port(80, token="chosen")
    assert other.url == f"https://80-{sandbox.id}-chosen.a.example.com/"


def test_without_a_server_there_is_a_path_and_the_reason(sandbox: Sandbox) -> None:
    exposed = sandbox.expose_port(80)
    assert exposed.url is None
    assert exposed.path_url == f"/preview/{sandbox.id}/80/?token={exposed.token}"
    assert "skerry serve" in (exposed.note or "")


def test_a_link_says_when_it_ends(sandbox: Sandbox) -> None:
    exposed = sandbox.expose_port(80, hostname="a.example.com", private=True)
    for seconds in (60, timedelta(minutes=1)):
        link = sandbox.create_preview_link(80, expires_in=seconds)
        assert link.url is not None
        assert link.url.startswith(f"{exposed.url}?skerry_link=")
        left = (link.expires_at - datetime.now(UTC)).total_seconds()
        assert 30 < left <= 62
    with pytest.raises(PortNotExposedError):
        sandbox.create_preview_link(81)


def test_what_cannot_be_exposed_is_a_typed_error(sandbox: Sandbox) -> None:
    with pytest.raises(InvalidPortError):
        sandbox.expose_port(0)
    with pytest.raises(InvalidTokenError):
        sandbox.expose_port(80, token="Not-This")
    with pytest.raises(InvalidHostnameError):
        sandbox.expose_port(80, hostname="http://x")


def test_looking_at_ports_makes_no_sandbox(home: Path) -> None:
    with Sandbox(f"ports-{secrets.token_hex(4)}", home=home) as sandbox:
        assert not sandbox.is_port_exposed(80)
        assert sandbox.get_exposed_ports() == []
        with pytest.raises(SandboxNotFoundError):
            sandbox.unexpose_port(80)
        with pytest.raises(SandboxNotFoundError):
            sandbox.info()


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
def echo(sandbox: Sandbox) -> Sandbox:
    sandbox.write_file("/tmp/echo.py", ECHO)
    process = sandbox.start_process("exec /usr/bin/python3 -I /tmp/echo.py")
    process.wait_for_port(3000, timeout=20)
    return sandbox


def test_a_server_inside_is_asked_though_it_is_not_exposed(echo: Sandbox) -> None:
    answer = echo.fetch(3000, "/a b?c=d#e", method="PATCH", headers={"X-Mine": "1"}, content="text")
    method, path, size, headers = answer.json()
    assert (method, path, size) == ("PATCH", "/a%20b?c=d", 4)
    assert (headers["host"], headers["x-mine"]) == ("localhost:3000", "1")
    assert (echo.fetch(3000, "/teapot")).status_code == 418
    assert not echo.is_port_exposed(3000)
    with pytest.raises(PortNotListeningError):
        echo.fetch(3001)


def test_bodies_of_any_size_go_piece_by_piece(echo: Sandbox) -> None:
    pieces = [bytes(1 << 18)] * 16
    with echo.fetch_stream(3000, method="PATCH", content=iter(pieces)) as answer:
        assert json.loads(answer.read())[2] == 4 << 20
    with echo.fetch_stream(3000, "/large") as answer:
        sizes = [len(piece) for piece in answer.iter_bytes()]
    assert sum(sizes) == 4 << 20
    assert len(sizes) > 1


def test_cookies_of_a_server_inside_are_not_kept(echo: Sandbox) -> None:
    assert (echo.fetch(3000)).headers["set-cookie"] == "crumb=1; Path=/"
    assert "cookie" not in (echo.fetch(3000)).json()[3]


def test_no_path_leads_out_of_the_sandbox(echo: Sandbox) -> None:
    for path in ("/../../../../../../health", "/x/%2e%2E/../../health", "/./health"):
        assert (echo.fetch(3000, path)).json()[1] == "/health"
    assert (echo.fetch(3000, "/a/b/..")).json()[1] == "/a/"
    for path in ("health", ""):
        with pytest.raises(InvalidRequestError):
            echo.fetch(3000, path)
    for headers in ({"Host": "elsewhere"}, {"X-Mine": "1\r\nX-Other: 2"}):
        with pytest.raises(InvalidRequestError):
            echo.fetch(3000, headers=headers)
