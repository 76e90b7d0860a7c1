"""Requests through the API straight to a server inside, which is not exposed."""

from __future__ import annotations

import asyncio
import json
from base64 import urlsafe_b64encode
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from typing import Any

import httpx
import pytest

from skerry import AsyncSandbox
from tests.server.conftest import ServerProcess
from tests.server.preview.conftest import Site

PORT = 4000
MARK = "skerry-answered-by"


@pytest.fixture(scope="module")
async def inside(server: ServerProcess, http: httpx.AsyncClient) -> AsyncIterator[Site]:
    """The awkward server in a sandbox, with no port exposed."""
    site = Site(server, http, f"fetch-{token_hex(3)}", PORT)
    await site.serve("127.0.0.1", PORT)
    yield site
    for line in site.lines:
        line.close()
    await http.delete(site.box)


def at(site: Site, path: str = "/", port: int = PORT) -> str:
    return f"{site.box}/ports/{port}/proxy{path}"


def seen(answer: httpx.Response) -> dict[str, Any]:
    found = answer.json()
    return {**found, "headers": {name.lower(): value for name, value in found["headers"]}}


async def test_method_path_query_headers_and_body_arrive_as_they_were_sent(inside: Site) -> None:
    target = "/echo?a=%2F&token=kept&a=%20b"
    answer = await inside.http.request("PROPFIND", at(inside, target), content=b"hello", headers={"X-Mine": "1"})
    found = seen(answer)
    assert (answer.status_code, answer.headers[MARK]) == (200, "app")
    assert (found["method"], found["target"]) == ("PROPFIND", target)
    assert (found["size"], found["sha256"]) == (5, sha256(b"hello").hexdigest())
    assert (found["headers"]["host"], found["headers"]["x-mine"]) == (f"localhost:{PORT}", "1")
    assert (await inside.http.get(at(inside, ""))).status_code == 404, "without a path it is the app's root"


async def test_an_apps_own_failures_are_its_answers_and_ours_are_not(inside: Site) -> None:
    theirs = await inside.http.get(at(inside, "/redirect"))
    assert (theirs.status_code, theirs.headers[MARK]) == (302, "app")
    assert theirs.headers["location"].startswith("https://elsewhere.example/")
    for path, port, status, code in [
        ("/", 4001, 502, "port_not_listening"),
        ("/silence", PORT, 502, "preview_failed"),
        ("/", 0, 400, "invalid_port"),
        ("/", 65536, 400, "invalid_port"),
    ]:
        ours = await inside.http.get(at(inside, path, port))
        assert (ours.status_code, ours.json()["error"]["code"]) == (status, code)
        assert MARK not in ours.headers
    ours = await inside.http.get(f"/v1/sandboxes/www/ports/{PORT}/proxy/")
    assert (ours.status_code, ours.json()["error"]["code"]) == (400, "invalid_sandbox_id")


async def test_bodies_are_streamed_both_ways(inside: Site) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield bytes(1 << 18)

    answer = await inside.http.post(at(inside, "/echo"), content=pieces())
    assert (seen(answer)["size"], seen(answer)["headers"]["transfer-encoding"]) == (64 << 18, "chunked")
    async with inside.http.stream("GET", at(inside, "/events")) as events:
        parts = events.aiter_text()
        assert await anext(parts) == "data: first\n\n"
        await inside.http.get(at(inside, "/go"))
        assert await anext(parts) == "data: second\n\n"


async def test_a_gigabyte_that_nobody_reads_is_left_with_the_app(inside: Site) -> None:
    async with inside.http.stream("GET", at(inside, f"/zeros?{1 << 30}")) as answer:
        assert answer.headers["content-length"] == str(1 << 30)
        assert (await inside.http.get(at(inside, "/page"))).status_code == 200


async def test_no_browser_is_shown_an_app_at_the_apis_address(inside: Site) -> None:
    for fields in (
        {"Sec-Fetch-Site": "none", "Sec-Fetch-Dest": "document"},
        {"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Dest": "script"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Origin": "https://elsewhere.example"},
        {"Origin": f"http://3000-{inside.id}-tok.localhost"},
        {"Host": "rebound.example"},
    ):
        refused = await inside.http.get(at(inside, "/page"), headers=fields)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
    plain = await inside.http.get(at(inside, "/page"))
    assert plain.headers["content-security-policy"] == "sandbox"
    assert plain.headers["x-content-type-options"] == "nosniff"


async def test_an_app_cannot_say_that_its_answer_is_ours(inside: Site) -> None:
    # A head that a proxy would pass on as it is.
    raw = b"HTTP/1.1 200 OK\r\nSkerry-Answered-By: skerry\r\nContent-Length: 2\r\n\r\nhi"
    answer = await inside.http.get(at(inside, f"/raw?{urlsafe_b64encode(raw).decode()}"))
    assert answer.headers.get_list(MARK) == ["app"]


async def test_keys_open_it_and_stay_outside(tmp_path_factory: pytest.TempPathFactory) -> None:
    home: Path = tmp_path_factory.mktemp("keyed")
    for folder in (home, home.parent, home.parent.parent):
        folder.chmod(0o711)
    server = ServerProcess(home, api_keys=["s3cret-key"])
    try:
        key = {"X-API-Key": "s3cret-key"}
        async with httpx.AsyncClient(base_url=server.url, timeout=60, headers=key) as http:
            site = Site(server, http, "keyed", PORT)
            await site.serve("127.0.0.1", PORT)
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as stranger:
                refused = await stranger.get(at(site, "/echo"))
                assert (refused.status_code, MARK in refused.headers) == (401, False)
                preflight = await stranger.options(at(site, "/echo"), headers={"Origin": "https://elsewhere.example"})
                assert (preflight.status_code, "access-control-allow-origin" in preflight.headers) == (403, False)
            assert "s3cret" not in json.dumps(seen(await http.get(at(site, "/echo"))))
            async with AsyncSandbox("keyed", url=server.url, api_key="s3cret-key") as sandbox:
                theirs = {"Authorization": "Bearer the-app's", "X-API-Key": "the-app's-own"}
                found = seen(await sandbox.fetch(PORT, "/echo", headers=theirs))
                assert (found["headers"]["authorization"], found["headers"]["x-api-key"]) == tuple(theirs.values())
                assert "s3cret" not in json.dumps(found)
    finally:
        await asyncio.to_thread(server.stop)
