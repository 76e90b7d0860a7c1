"""Who may open a terminal from a browser: tickets, keys in the subprotocol, origins; and the page itself."""

from __future__ import annotations

import base64
import json
import logging
import re
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import websockets
from starlette.types import Receive, Scope, Send

from skerry.server import page, tickets
from skerry.server.auth import Guard
from skerry.server.tickets import Tickets
from skerry.settings import Settings
from tests.server.conftest import ServerProcess
from tests.server.exchange import Exchange

KEY = "s3cret/?key+>>"
BEARER = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    home = tmp_path_factory.mktemp("keyed")
    home.chmod(0o711)
    server = ServerProcess(home, api_keys=[KEY])
    yield server
    assert server.stop() == 0


def key_protocol(key: str) -> str:
    return "skerry.key." + base64.urlsafe_b64encode(key.encode()).decode().rstrip("=")


def ticket_of(server: ServerProcess, sandbox: str = "ticketed") -> str:
    made = httpx.post(f"{server.url}/v1/sandboxes/{sandbox}/terminal/ticket", headers=BEARER)
    assert (made.status_code, made.json()["expiresIn"]) == (201, 60)
    return str(made.json()["ticket"])


def address(server: ServerProcess, query: str = "", sandbox: str = "ticketed") -> str:
    return f"{server.url.replace('http', 'ws', 1)}/v1/sandboxes/{sandbox}/terminal{query}"


async def opening(url: str, **options: Any) -> tuple[dict[str, Any], int | None, str | None]:
    """What a connection is told first, the code it is closed with, and the protocol that was chosen."""
    async with websockets.connect(url, **options) as socket:
        try:
            frame = json.loads(await socket.recv())
        except websockets.ConnectionClosed:
            frame = {}
        return frame, socket.close_code, socket.subprotocol


async def test_a_ticket_opens_one_terminal_of_its_sandbox_once(keyed: ServerProcess) -> None:
    ticket = ticket_of(keyed)
    assert (await opening(address(keyed, f"?ticket={ticket}", "another")))[1] == 4401
    ticket = ticket_of(keyed)
    ready, code, _ = await opening(address(keyed, f"?cols=70&ticket={ticket}"))
    assert (ready["type"], ready["cols"], code) == ("ready", 70, None)
    assert (await opening(address(keyed, f"?ticket={ticket}")))[1] == 4401
    assert (await opening(address(keyed, "?ticket=")))[1] == 4401
    twice = f"?ticket={ticket_of(keyed)}&ticket={ticket_of(keyed)}"
    assert (await opening(address(keyed, twice)))[1] == 4401


async def test_who_came_with_a_ticket_may_come_back_and_who_has_a_key_needs_none(keyed: ServerProcess) -> None:
    ready, _, _ = await opening(address(keyed, f"?ticket={ticket_of(keyed)}"))
    again, _, _ = await opening(address(keyed, f"?terminal={ready['terminal']}&ticket={ready['ticket']}"))
    assert again["terminal"] == ready["terminal"]
    assert again["ticket"] != ready["ticket"]
    assert (await opening(address(keyed, f"?ticket={ready['ticket']}")))[1] == 4401
    by_key, _, _ = await opening(address(keyed), additional_headers={"X-API-Key": KEY})
    assert "ticket" not in by_key


def test_a_ticket_is_good_for_terminals_only(keyed: ServerProcess) -> None:
    ticket = ticket_of(keyed)
    base = f"{keyed.url}/v1/sandboxes/ticketed"
    for method, path in [("GET", ""), ("POST", "/terminal/ticket"), ("GET", "/terminals"), ("POST", "/terminal")]:
        assert httpx.request(method, f"{base}{path}?ticket={ticket}").status_code == 401, path
    assert httpx.get(f"{base}/terminal?ticket={ticket}").status_code == 200


async def test_a_browser_may_send_its_key_as_a_subprotocol(keyed: ServerProcess) -> None:
    offers = [websockets.Subprotocol(name) for name in ("skerry.terminal", key_protocol(KEY))]
    ready, _, chosen = await opening(address(keyed), subprotocols=offers)
    assert (ready["type"], chosen) == ("ready", "skerry.terminal")
    for wrong in (key_protocol("wrong"), "skerry.key.", "skerry.key.%%%", "skerry.key._"):
        offers = [websockets.Subprotocol("skerry.terminal"), websockets.Subprotocol(wrong)]
        _, code, chosen = await opening(address(keyed), subprotocols=offers)
        # Chosen even so: a browser is told a close code only on a connection that came about.
        assert (code, chosen) == (4401, "skerry.terminal")


async def test_a_key_in_the_query_is_no_key(keyed: ServerProcess) -> None:
    for name in ("token", "key", "api_key", "ticket", "access_token"):
        assert (await opening(address(keyed, f"?{name}=s3cret%2F%3Fkey%2B%3E%3E")))[1] == 4401


async def test_a_page_of_another_origin_opens_no_terminal(server: ServerProcess) -> None:
    evil = websockets.Origin("https://evil.example")
    _, code, _ = await opening(address(server, sandbox="shared"), origin=evil)
    assert code == 4403
    preview = websockets.Origin(server.url.replace("127.0.0.1", "3000-demo-token.localhost"))
    assert (await opening(address(server, sandbox="shared"), origin=preview))[1] == 4403


def test_a_page_of_another_origin_gets_no_ticket(server: ServerProcess) -> None:
    made = httpx.post(f"{server.url}/v1/sandboxes/shared/terminal/ticket", headers={"Origin": "https://evil.example"})
    assert made.status_code == 403


async def test_no_ticket_reaches_a_log(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[bytes] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["query_string"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body"})

    caplog.set_level(logging.DEBUG)
    guard = Guard(app, Settings(api_keys=("one",)))
    ticket = guard._tickets.issue("demo")
    target = f"/v1/sandboxes/demo/terminal?a=1%262&ticket={ticket}&b=%C3%A4&empty="
    assert (await Exchange(guard, "GET", target).body().start().end()).status == 200
    refused = Exchange(guard, "GET", target)
    assert (await refused.body().start().end()).status == 401
    assert seen == [b"a=1%262&b=%C3%A4&empty="]
    # uvicorn logs the scope's query when a connection is accepted, refused ones included.
    assert ticket not in str(refused._scope["query_string"])
    assert ticket not in caplog.text


def test_tickets_expire_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(tickets, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(tickets, "_MOST", 3)
    issued = Tickets()
    ticket, other, held = issued.issue("a"), issued.issue("a"), issued.issue("a", float("inf"))
    clock.now += 59
    assert issued.redeem(ticket, "a")
    clock.now += 2
    assert not issued.redeem(other, "a")
    issued.expire(held, 10)
    clock.now += 11
    assert not issued.redeem(held, "a")
    many = [issued.issue("a") for _ in range(5)]
    assert [issued.redeem(one, "a") is not None for one in many] == [False, False, True, True, True]


# -- the page ----------------------------------------------------------------------------------------------------------


async def test_the_page_is_complete_in_itself_and_may_load_nothing(keyed: ServerProcess) -> None:
    async with httpx.AsyncClient() as http:
        url = f"{keyed.url}/v1/sandboxes/ticketed/terminal"
        assert (await http.get(url)).status_code == 401
        answer = await http.get(f"{url}?ticket={ticket_of(keyed)}")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["referrer-policy"] == "no-referrer"
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe-eval" not in policy
    scripts = re.findall(r"<script>(.*?)</script>", answer.text, re.DOTALL)
    assert len(scripts) == 4
    for script in scripts:
        digest = base64.b64encode(sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    markup = re.sub(r"<(script|style)>.*?</\1>", "", answer.text, flags=re.DOTALL)
    assert not re.findall(r"(?:src|href)=\"(?!data:)", markup)
    inside = re.search(r'name="skerry-ticket" content="([^"]+)"', answer.text)
    assert inside is not None
    assert (await opening(address(keyed, f"?ticket={inside[1]}")))[0]["type"] == "ready"


def test_without_its_parts_the_page_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(page, "ASSETS", tmp_path / "nothing")
    answer = page.terminal("demo", "ticket")
    assert (answer.status_code, answer.media_type) == (501, "text/html")
    assert b"skerry shell demo" in answer.body


def test_a_name_that_cannot_be_one_gets_no_page(server: ServerProcess) -> None:
    answer = httpx.get(f"{server.url}/v1/sandboxes/%3Cscript%3E/terminal")
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/json"
