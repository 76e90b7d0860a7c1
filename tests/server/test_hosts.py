from __future__ import annotations

import socket
from typing import Any

import pytest
from pydantic import ValidationError
from starlette.types import Message, Receive, Scope, Send

from skerry.control.reception import Reception
from skerry.server.hosts import Hosts
from skerry.settings import Settings
from tests.server.exchange import Exchange

LOCAL = ["localhost:8787", "127.0.0.1", "127.9.9.9:1", "[::1]:8787", "8000-demo.localhost:1", "LOCALHOST.", "localhost"]
ELSEWHERE = ["evil.example", "evil.example:8787", "localhost.evil.example", "127.0.0.1.evil.example", "", "[::1].evil"]


async def inner(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"inside"})


def _reception(keyed: bool) -> Reception:
    return Reception(Settings(api_keys=("a-key",) if keyed else ()))


async def ask(headers: dict[str, str], *, keyed: bool = False, method: str = "GET", **settings: Any) -> Exchange:
    hosts = Hosts(inner, Settings(**settings), _reception(keyed))
    return await Exchange(hosts, method, "/v1/sandboxes", headers).body().start().end()


async def refused(headers: dict[str, str], **options: Any) -> bool:
    asked = await ask(headers, **options)
    if asked.status == 200:
        return False
    assert (asked.status, asked.error["code"]) == (403, "forbidden")
    assert asked.error["hint"]
    return True


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("host", LOCAL)
async def test_local_names_are_answered(host: str, keyed: bool) -> None:
    assert not await refused({"Host": host}, keyed=keyed)


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("host", ELSEWHERE)
async def test_a_rebound_name_is_refused(host: str, keyed: bool) -> None:
    assert await refused({"Host": host}, keyed=keyed)


@pytest.mark.parametrize("host", ["192.168.1.2", "192.168.1.2:8787", "[2001:db8::1]:8787", "0.0.0.0"])
async def test_an_address_is_a_name_that_nobody_can_rebind_but_is_not_only_this_machines(host: str) -> None:
    assert not await refused({"Host": host}, keyed=True)
    assert await refused({"Host": host}, keyed=False)


async def test_names_that_were_configured_are_known() -> None:
    named: dict[str, Any] = {
        "keyed": True,
        "host": "gate.example",
        "public_url": "https://skerry.example",
        "preview_domain": "apps.example:8443",
        "hosts": ("second.example", "*.third.example"),
    }
    known = ["gate.example", "skerry.example", "apps.example", "x.apps.example", "second.example", "a.third.example"]
    for host in [*known, f"{socket.gethostname()}:8787", "Second.Example.:1"]:
        assert not await refused({"Host": host}, **named), host
    for host in ("third.example", "xthird.example", "second.example.evil", "x.second.example", "xapps.example"):
        assert await refused({"Host": host}, **named), host
    assert not await refused({"Host": "whatever.example"}, keyed=True, hosts=("*",))
    assert not await refused({"Host": "own.test"}, hosts=("own.test",))


async def test_two_hosts_are_refused() -> None:
    exchange = Exchange(Hosts(inner, Settings(), _reception(False)), "GET", "/", {"Host": "localhost"})
    exchange._scope["headers"].append((b"host", b"localhost"))
    assert (await exchange.body().start().end()).status == 403


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("origin", ["https://evil.example", "http://localhost:3000", "null", "", "http://localhost"])
async def test_web_pages_of_other_origins_are_refused(origin: str, keyed: bool) -> None:
    assert await refused({"Host": "localhost:8787", "Origin": origin}, keyed=keyed)


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
async def test_without_keys_what_a_page_of_another_site_makes_is_refused_even_without_origin(site: str) -> None:
    headers = {"Host": "localhost:8787", "Sec-Fetch-Site": site}
    assert await refused(headers)
    # A link from elsewhere, to a terminal's page for instance.
    assert not await refused(headers, keyed=True)


async def test_a_page_of_the_server_itself_is_answered() -> None:
    same = {"Host": "localhost:8787", "Origin": "http://localhost:8787"}
    assert not await refused(same)
    assert not await refused(same, keyed=True)
    behind_tls = {"Host": "skerry.example", "Origin": "https://skerry.example"}
    assert not await refused(behind_tls, keyed=True, hosts=("skerry.example",))
    assert await refused({"Host": "localhost:8787", "Origin": "https://localhost:8787"})


async def test_a_proxy_that_puts_its_own_host_there_needs_the_public_url() -> None:
    headers = {"Host": "127.0.0.1:8787", "Origin": "https://skerry.example"}
    assert await refused(headers, keyed=True)
    assert not await refused(headers, keyed=True, public_url="https://skerry.example")


async def test_a_page_of_a_preview_is_no_page_of_the_server() -> None:
    for origin in ("http://3000-demo-token.localhost:8787", "http://preview.localhost:8787"):
        assert await refused({"Host": "localhost:8787", "Origin": origin}, keyed=True)
    origin = "https://3000-demo-token.apps.example"
    assert await refused({"Host": "skerry.example", "Origin": origin}, keyed=True, preview_domain="apps.example")


# -- CORS --------------------------------------------------------------------------------------------------------------


async def test_no_answer_lets_a_page_of_another_origin_read_it_unless_it_is_listed() -> None:
    page = {"Host": "localhost", "Origin": "https://App.example"}
    closed = await ask(page, keyed=True)
    assert "access-control-allow-origin" not in closed.headers
    opened = await ask(page, keyed=True, origins=("https://app.example",))
    assert (opened.status, opened.headers["access-control-allow-origin"]) == (200, "https://App.example")
    assert opened.headers["vary"] == "Origin"
    assert "access-control-allow-credentials" not in opened.headers
    program = await ask({"Host": "localhost"}, keyed=True, origins=("https://app.example",))
    assert "access-control-allow-origin" not in program.headers


async def test_a_browser_that_asks_first_is_told_what_a_listed_page_may_send() -> None:
    asks = {"Host": "localhost", "Origin": "https://app.example", "Access-Control-Request-Method": "DELETE"}
    answered = await ask(asks, method="OPTIONS", keyed=True, origins=("https://app.example",))
    assert answered.status == 204
    assert "DELETE" in answered.headers["access-control-allow-methods"]
    assert "authorization" in answered.headers["access-control-allow-headers"]
    assert await refused(asks, method="OPTIONS", keyed=True)


async def test_a_websocket_of_another_origin_is_closed_with_a_code_and_its_query_forgotten() -> None:
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"origin", b"https://evil.example")]
    scope = {"type": "websocket", "scheme": "ws", "path": "/", "query_string": b"ticket=s3cret", "headers": headers}
    await Hosts(inner, Settings(), _reception(True))(scope, receive, send)
    assert [message["type"] for message in sent] == ["websocket.accept", "websocket.close"]
    assert sent[1]["code"] == 4403
    assert b"s3cret" not in scope["query_string"]


@pytest.mark.parametrize(
    "wrong", [{"hosts": ("https://a.example",)}, {"hosts": ("a.example/x",)}, {"origins": ("a.example",)}]
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="write them like"):
        Settings(**wrong)


async def test_names_that_strangers_invent_are_not_remembered_without_end() -> None:
    hosts = Hosts(inner, Settings(), _reception(True))
    for number in range(1000):
        hosts._knows(b"%d.example" % number)
    assert len(hosts._known) <= 256
    assert hosts._knows(b"localhost")
