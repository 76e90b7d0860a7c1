from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator

import httpx
import pytest
import websockets

from tests.server.conftest import ServerProcess
from tests.server.tenants import People, keyed, people

__all__ = ["keyed", "people"]

PASSWORD = "correct horse battery"


@pytest.fixture(scope="module", autouse=True)
def ada(keyed: ServerProcess) -> str:
    """A user that was made on the home, as the first one is."""
    line = [sys.executable, "-m", "skerry.cli.main", "--home", str(keyed.home), "users", "add", "ada@example.com"]
    subprocess.run([*line, "--owner", "ada"], input=f"{PASSWORD}\n", text=True, check=True)
    return "ada@example.com"


@pytest.fixture
async def browser(keyed: ServerProcess) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=keyed.url, timeout=60) as client:
        yield client


async def sign_in(browser: httpx.AsyncClient, email: str = "ada@example.com", password: str = PASSWORD) -> str:
    answer = await browser.post("/v1/auth/sign-in", json={"email": email, "password": password})
    assert answer.status_code == 200, answer.text
    word: str = answer.json()["csrf"]
    return word


async def test_a_session_opens_what_its_owner_has(people: People, browser: httpx.AsyncClient) -> None:
    word = await sign_in(browser)
    cookie = browser.cookies.jar
    assert [one.name for one in cookie] == ["skerry-session"]
    made = await browser.post("/v1/sandboxes", json={"id": "seen"}, headers={"X-Skerry-CSRF": word})
    assert made.status_code == 201
    program = await people.someone("ada")
    assert (await program.get("/v1/sandboxes/seen")).status_code == 200
    me = (await browser.get("/v1/auth/me")).json()
    assert (me["owner"], me["scope"], me["email"], me["csrf"]) == ("ada", "use", "ada@example.com", word)
    assert (await browser.get("/v1/owners")).status_code == 403
    key = await browser.post("/v1/keys", json={"name": "mine"}, headers={"X-Skerry-CSRF": word})
    assert (key.status_code, key.json()["owner"]) == (201, "ada")
    for more in ({"owner": "bea"}, {"scope": "admin"}):
        assert (await browser.post("/v1/keys", json=more, headers={"X-Skerry-CSRF": word})).status_code == 403
    theirs = await people.key(owner="bea")
    gone = await browser.delete(f"/v1/keys/{theirs['id']}", headers={"X-Skerry-CSRF": word})
    assert gone.json()["error"]["code"] == "key_not_found"


async def test_the_cookie_is_for_no_script_and_no_other_site(browser: httpx.AsyncClient) -> None:
    body = {"email": "ada@example.com", "password": PASSWORD}
    answer = await browser.post("/v1/auth/sign-in", json=body)
    attributes = {part.strip().lower() for part in answer.headers["set-cookie"].split(";")}
    assert {"httponly", "samesite=lax", "path=/"} <= attributes
    assert not {part for part in attributes if part.startswith("domain")}
    assert answer.headers["cache-control"] == "no-store"


async def test_behind_https_the_cookie_is_of_this_host_alone(tmp_path_factory: pytest.TempPathFactory) -> None:
    server = ServerProcess(
        tmp_path_factory.mktemp("https"), api_keys=["k"], pool_size=0, public_url="https://s.example"
    )
    try:
        async with httpx.AsyncClient(base_url=server.url, headers={"Authorization": "Bearer k"}) as admin:
            user = {"email": "a@b.c", "password": PASSWORD}
            assert (await admin.post("/v1/users", json=user)).status_code == 201
            cookie = (await admin.post("/v1/auth/sign-in", json=user)).headers["set-cookie"]
            assert cookie.startswith("__Host-skerry-session=")
            assert "Secure" in cookie
            # A page of a preview would share this origin.
            shared = await admin.post("/v1/auth/sign-in", json=user, headers={"Host": "s.example"})
            assert shared.status_code == 403
            assert "SKERRY_PREVIEW_DOMAIN" in shared.json()["error"]["hint"]
    finally:
        assert server.stop() == 0


async def test_what_a_page_of_another_site_sends_with_the_cookie_is_refused(browser: httpx.AsyncClient) -> None:
    word = await sign_in(browser)
    for headers in ({}, {"X-Skerry-CSRF": "guess"}, {"X-Skerry-CSRF": word, "Origin": "https://evil.example"}):
        refused = await browser.post("/v1/sandboxes", json={"id": "forged"}, headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
    assert (await browser.get("/v1/sandboxes/forged")).status_code == 404
    assert (await browser.get("/v1/sandboxes", headers={"Origin": "https://evil.example"})).status_code == 403
    forged = await browser.post(
        "/v1/auth/sign-in",
        json={"email": "ada@example.com", "password": PASSWORD},
        headers={"Origin": "https://evil.example"},
    )
    assert forged.status_code == 403


async def test_a_program_of_agentpod_signs_in_as_it_is_used_to(browser: httpx.AsyncClient) -> None:
    body = {"email": "ada@example.com", "password": PASSWORD}
    wrong = await browser.post("/api/auth/sign-in/email", json={**body, "password": "guess"})
    assert (wrong.status_code, wrong.headers.get("set-cookie")) == (401, None)
    assert (await browser.get("/api/auth/get-session")).status_code == 401
    answer = await browser.post("/api/auth/sign-in/email", json=body)
    person = {"id": "ada@example.com", "email": "ada@example.com", "name": "ada", "role": "user"}
    assert (answer.status_code, answer.json()["user"]) == (200, person)
    assert "httponly" in answer.headers["set-cookie"].lower()
    assert (await browser.get("/api/auth/get-session")).json()["user"] == person
    # What a browser sends for a page says so, whatever page it is.
    for page in (
        {"Sec-Fetch-Site": "same-origin"},
        {"Origin": str(browser.base_url)},
        {"Origin": "https://evil.example"},
    ):
        assert (await browser.post("/api/auth/sign-out", headers=page)).status_code == 403
    assert (await browser.post("/api/auth/sign-out")).json() == {"success": True}
    assert (await browser.get("/api/auth/get-session")).status_code == 401


async def test_a_websocket_with_the_cookie_needs_the_origin_of_the_server(
    browser: httpx.AsyncClient, keyed: ServerProcess
) -> None:
    await sign_in(browser)
    (session,) = browser.cookies.jar
    cookie = {"Cookie": f"{session.name}={session.value}"}
    url = f"{keyed.url.replace('http', 'ws', 1)}/v1/sandboxes/term/terminal"
    for origin in (None, "https://evil.example"):
        async with websockets.connect(url, additional_headers=cookie, origin=origin) as socket:
            with pytest.raises(websockets.ConnectionClosed):
                await socket.recv()
            assert socket.close_code == 4403
    async with websockets.connect(url, additional_headers=cookie, origin=keyed.url) as socket:  # type: ignore[arg-type]
        assert json.loads(await socket.recv())["type"] == "ready"


async def test_signing_out_ends_what_is_open_and_is_answered(browser: httpx.AsyncClient) -> None:
    word = await sign_in(browser)
    kept = dict(browser.cookies)
    async with browser.stream("POST", "/v1/sandboxes/s/exec/stream", json={"command": "sleep 1000"}) as refused:
        assert refused.status_code == 403
    header = {"X-Skerry-CSRF": word}
    command = {"command": "echo on; sleep 1000"}
    async with browser.stream("POST", "/v1/sandboxes/s/exec/stream", json=command, headers=header) as stream:
        lines = stream.aiter_lines()
        await anext(lines)
        assert (await browser.post("/v1/auth/sign-out", headers=header)).status_code == 200
        async with asyncio.timeout(5):
            with pytest.raises(httpx.RemoteProtocolError):
                async for _ in lines:
                    pass
    browser.cookies.update(kept)
    assert (await browser.get("/v1/auth/me")).status_code == 401


async def test_a_changed_password_ends_every_session(people: People, keyed: ServerProcess) -> None:
    user = {"email": "cleo@example.com", "password": PASSWORD, "owner": "cleo"}
    assert (await people.admin.post("/v1/users", json=user)).status_code == 201
    async with (
        httpx.AsyncClient(base_url=keyed.url) as one,
        httpx.AsyncClient(base_url=keyed.url) as other,
    ):
        word = await sign_in(one, "cleo@example.com")
        await sign_in(other, "cleo@example.com")
        body = {"old": PASSWORD, "new": "another good one"}
        changed = await one.post("/v1/auth/password", json=body, headers={"X-Skerry-CSRF": word})
        assert changed.status_code == 200
        assert (await other.get("/v1/auth/me")).status_code == 401
        await sign_in(other, "cleo@example.com", "another good one")
    assert (await people.admin.delete("/v1/users/cleo@example.com")).status_code == 200
    listed = (await people.admin.get("/v1/users")).json()["users"]
    assert "cleo@example.com" not in {one["email"] for one in listed}


async def test_a_wrong_password_is_refused_and_not_repeated(browser: httpx.AsyncClient) -> None:
    body = {"email": "ada@example.com", "password": "not-the-one-at-all"}
    refused = await browser.post("/v1/auth/sign-in", json=body)
    assert refused.status_code == 401
    assert "not-the-one" not in refused.text
    long = await browser.post("/v1/auth/sign-in", json={"email": "a@b.c", "password": "x" * 2000})
    assert long.status_code == 400
    assert "xxx" not in long.text
