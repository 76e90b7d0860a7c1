"""Who gets to see a preview, by which address, and what they do not get to see."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from secrets import token_hex
from urllib.parse import urlsplit

import httpx
import pytest

from tests.server.conftest import ServerProcess
from tests.server.preview.conftest import Answer, Site

PAGE = b"<h1>hello</h1>"
BROWSER = ("Accept: text/html,*/*;q=0.8", "Sec-Fetch-Site: none", "Sec-Fetch-Mode: navigate")


def cookies(*answers: Answer) -> str:
    """The Cookie header of a browser that got these answers."""
    pairs = [value.partition(";")[0] for answer in answers for value in answer.all("set-cookie")]
    return "Cookie: " + "; ".join(dict.fromkeys(pairs))


# -- by host name ------------------------------------------------------------------------------------------------------


async def test_whatever_is_wrong_with_an_address_the_answer_is_the_same(site: Site) -> None:
    await site.expose(3001)
    wrong = [
        f"3000-{site.id}-tok_2",
        f"3000-{site.id}-",
        f"3000-{site.id}",
        f"3002-{site.id}-tok_1",
        f"3000-{token_hex(4)}-tok_1",
        f"03000-{site.id}-tok_1",
        f"99999-{site.id}-tok_1",
        f"3000-{site.id}-tok_1-",
        "3000--tok_1",
        "3000-",
    ]
    answers = {}
    for label in wrong:
        answer = await site.ask("/page", "X-Request-Id: same", host=f"{label}.localhost:{site.server_port}")
        answers[label] = (answer.status, answer.body)
    assert len(set(answers.values())) == 1, answers
    status, body = answers[wrong[0]]
    assert (status, json.loads(body)) == (
        404,
        {"error": "Access denied: Invalid token or port not exposed", "code": "INVALID_TOKEN"},
    )
    page = await site.ask("/page", *BROWSER, host=f"{wrong[0]}.localhost")
    assert (page.status, page.get("content-type"), page.get("cache-control")) == (
        404,
        "text/html; charset=utf-8",
        "no-store",
    )
    assert site.id.encode() not in page.body


async def test_host_names_are_the_same_in_capitals_and_with_a_final_dot(site: Site) -> None:
    label = f"3000-{site.id}-tok_1"
    for host in (f"{label.upper()}.LocalHost", f"{label}.localhost.", f"{label}.localhost.:{site.server_port}"):
        assert (await site.ask("/page", host=host)).body == PAGE, host


async def test_a_preview_lives_only_under_domains_that_are_ours(site: Site) -> None:
    label = f"3000-{site.id}-tok_1"
    for host in (f"{label}.example.com", f"{label}.localhost.example.com", f"{label}.notlocalhost", label):
        answer = await site.ask("/page", host=host)
        assert answer.body != PAGE, host
        assert answer.status in (403, 404), host
    await site.expose(3000, hostname="previews.example.com")
    assert (await site.ask("/page", host=f"{label}.previews.example.com:444")).body == PAGE
    assert (await site.ask("/page", host=f"3000-{site.id}-no.previews.example.com")).status == 404
    await site.expose(3000)


async def test_the_api_is_not_to_be_had_at_a_previews_address(site: Site) -> None:
    answer = await site.ask("/v1/sandboxes")
    assert (answer.status, answer.body) == (404, b"There is nothing here.")
    assert (await site.ask("/health")).body == b"There is nothing here."


async def test_a_page_of_a_preview_cannot_call_the_api(site: Site) -> None:
    origin = f"Origin: http://{site.host}"
    for fields in ((origin,), (origin, "Content-Type: application/json")):
        answer = await site.ask("/v1/sandboxes", *fields, host=f"localhost:{site.server_port}")
        assert answer.status == 403
        assert answer.get("access-control-allow-origin") is None


async def test_an_unexposed_port_is_gone_at_once(site: Site) -> None:
    await site.serve("127.0.0.1", 3010)
    await site.expose(3010)
    host = f"3010-{site.id}-tok_1.localhost"
    assert (await site.ask("/page", host=host)).body == PAGE
    assert (await site.http.delete(f"{site.box}/ports/3010")).status_code == 200
    assert (await site.ask("/page", host=host)).status == 404


# -- cookies -----------------------------------------------------------------------------------------------------------


async def test_cookies_are_the_apps_own_but_never_for_a_wider_domain(site: Site) -> None:
    assert (await site.ask("/cookies")).all("set-cookie") == [
        "a=1; Path=/; HttpOnly",
        "b=2; Secure",
        "c=3; Path=/x",
        "domain=yes; Path=/",
    ]


async def test_cookies_and_keys_of_ours_do_not_reach_the_app(site: Site) -> None:
    sent = "Cookie: a=1; skerry-preview=x; skerry-link.a.1=secret; b=2"
    headers = dict((await site.ask("/echo", sent)).json()["headers"])
    assert headers["cookie"] == "a=1; b=2"
    assert "cookie" not in dict((await site.ask("/echo", "Cookie: skerry-preview=x")).json()["headers"])
    theirs = dict((await site.ask("/echo", "Authorization: Bearer app", "X-API-Key: app")).json()["headers"])
    assert (theirs["authorization"], theirs["x-api-key"]) == ("Bearer app", "app")


# -- by path -----------------------------------------------------------------------------------------------------------


async def test_a_program_reads_a_path_preview_with_its_token(site: Site) -> None:
    path, host = f"/preview/{site.id}/3000", f"127.0.0.1:{site.server_port}"
    arrived = (await site.ask(f"{path}/echo?a=1&token=tok_1&b=2", host=host)).json()
    headers = dict(arrived["headers"])
    assert arrived["target"] == "/echo?a=1&b=2"
    assert headers["x-forwarded-prefix"] == path
    assert "tok_1" not in headers["x-original-url"]
    for wrong in ("token=tok_2", "token=", ""):
        assert (await site.ask(f"{path}/page?{wrong}", host=host)).status == 404
    for nowhere in (f"/preview/{site.id}/3000x/", "/preview/", f"/preview/{site.id}/0/", "/preview/../v1/sandboxes"):
        answer = await site.ask(f"{nowhere}?token=tok_1", host=host)
        assert (answer.status, answer.json()["error"]["code"]) == (404, "preview_not_found"), nowhere


async def test_a_browser_is_sent_to_a_host_for_previews_and_gets_a_cookie_for_the_token(site: Site) -> None:
    local, own = f"127.0.0.1:{site.server_port}", f"preview.localhost:{site.server_port}"
    path = f"/preview/{site.id}/3000/page"
    moved = await site.ask(f"{path}?token=tok_1", *BROWSER, host=local)
    assert (moved.status, moved.get("location")) == (307, f"http://{own}{path}?token=tok_1")
    let_in = await site.ask(f"{path}?x=1&token=tok_1", *BROWSER, host=own)
    assert (let_in.status, let_in.get("location")) == (307, f"http://{own}{path}?x=1")
    assert all("HttpOnly; SameSite=Lax" in cookie for cookie in let_in.all("set-cookie"))
    assert (await site.ask(path, *BROWSER, cookies(let_in), host=own)).body == PAGE
    assert (await site.ask(path, *BROWSER, host=own)).status == 404
    assert (await site.ask("/v1/sandboxes", *BROWSER, cookies(let_in), host=own)).body == b"There is nothing here."
    assert (await site.ask("/v1/sandboxes", *BROWSER, host=own)).status == 404


async def test_absolute_links_of_a_path_preview_lead_back_to_it(site: Site) -> None:
    own, path = f"preview.localhost:{site.server_port}", f"/preview/{site.id}/3000/page"
    jar = cookies(await site.ask(f"{path}?token=tok_1", *BROWSER, host=own))
    for referer in ([f"Referer: http://{own}{path}"], [f"Referer: http://{own}/style.css"], []):
        assert (await site.ask("/page", jar, *referer, host=own)).body == PAGE
    arrived = (await site.ask("/echo?token=mine", jar, host=own)).json()
    assert arrived["target"] == "/echo?token=mine"


async def test_where_previews_share_a_host_with_the_api_links_never_reach_the_api(site: Site) -> None:
    jar = f"Cookie: skerry-preview={site.id}.3000; skerry-preview.{site.id}.3000=tok_1"
    host = f"127.0.0.1:{site.server_port}"
    led = f"Referer: http://{host}/preview/{site.id}/3000/page"
    assert (await site.ask("/page", jar, led, host=host)).body == PAGE
    for path in ("/health", "/v1/sandboxes", "/openapi.json"):
        assert (await site.ask(path, jar, host=host)).status == 200
        assert b"There is nothing here." not in (await site.ask(path, jar, host=host)).body
    assert (await site.ask("/", jar, host=host)).json()["error"]["code"] == "not_found"
    forged = jar.replace("=tok_1", "=tok_2")
    assert (await site.ask("/page", forged, led, host=host)).json()["error"]["code"] == "not_found"


async def test_apps_that_share_a_host_do_not_share_cookies(site: Site) -> None:
    own, path = f"preview.localhost:{site.server_port}", f"/preview/{site.id}/3000"
    jar = cookies(await site.ask(f"{path}/page?token=tok_1", *BROWSER, host=own))
    prefix = f"skerry-app.{site.id}.3000."
    given = (await site.ask(f"{path}/cookies", jar, host=own)).all("set-cookie")
    assert given[:3] == [f"{prefix}a=1; HttpOnly; Path=/", f"{prefix}b=2; Secure; Path=/", f"{prefix}c=3; Path=/"]
    assert all(cookie.startswith(prefix) for cookie in given)
    mixed = f"{jar}; {prefix}a=1; skerry-app.other.3000.a=theirs; a=anyones"
    headers = dict((await site.ask(f"{path}/echo", mixed, host=own)).json()["headers"])
    assert headers["cookie"] == "a=1"


async def test_an_app_does_not_speak_for_the_whole_host_it_shares(site: Site) -> None:
    own, path = f"preview.localhost:{site.server_port}", f"/preview/{site.id}/3000"
    jar = cookies(await site.ask(f"{path}/page?token=tok_1", *BROWSER, host=own))
    worker = await site.ask(f"{path}/worker", jar, "Service-Worker: script", host=own)
    assert (worker.status, worker.get("service-worker-allowed"), worker.get("clear-site-data")) == (200, None, None)
    assert (await site.ask("/worker", jar, "Service-Worker: script", host=own)).status == 403
    assert (await site.ask("/worker")).get("service-worker-allowed") == "/"


async def test_no_redirect_leads_to_another_host(site: Site) -> None:
    own = f"preview.localhost:{site.server_port}"
    for host, path in (
        (own, f"/preview/{site.id}/3000//evil.example/?token=tok_1"),
        (own, f"/preview/{site.id}/3000?token=tok_1"),
        (f"127.0.0.1:{site.server_port}", f"/preview/{site.id}/3000//evil.example/"),
        (f"{own}@evil.example", f"/preview/{site.id}/3000/?token=tok_1"),
    ):
        answer = await site.ask(path, *BROWSER, host=host)
        location = answer.get("location")
        assert location is None or urlsplit(location).netloc == own, host


# -- private ones ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
async def keyed(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    """The same on a server with an API key and a domain for previews."""
    home: Path = tmp_path_factory.mktemp("keyed")
    for folder in (home, home.parent, home.parent.parent):
        folder.chmod(0o711)
    server = ServerProcess(home, api_keys=["sesame"], preview_domain="previews.example.com")
    async with httpx.AsyncClient(base_url=server.url, timeout=60, headers={"X-API-Key": "sesame"}) as http:
        site = Site(server, http, "secret", 3000)
        site.host = "3000-secret-tok_1.previews.example.com"
        await site.serve("127.0.0.1", 3000)
        await site.expose(private=True)
        yield site
    assert server.stop() == 0


async def test_a_private_preview_wants_a_key_which_the_app_does_not_see(keyed: Site) -> None:
    refused = await keyed.ask("/page")
    assert (refused.status, refused.json()["error"]["code"]) == (401, "unauthorized")
    assert (await keyed.ask("/page", "X-API-Key: wrong")).status == 401
    for field in ("X-API-Key: sesame", "Authorization: Bearer sesame"):
        answer = await keyed.ask("/echo", field)
        assert answer.status == 200
        assert b"sesame" not in answer.body


async def test_a_signed_link_opens_a_private_preview_until_it_expires(keyed: Site) -> None:
    made = (await keyed.http.post(f"{keyed.box}/ports/3000/link", json={"expiresIn": 100})).json()
    link = urlsplit(made["url"]).query
    assert link.startswith("skerry_link=")
    moved = await keyed.ask(f"/page?a=1&{link}", *BROWSER)
    assert (moved.status, moved.get("location")) == (307, f"http://{keyed.host}/page?a=1")
    assert "Max-Age=" in moved.all("set-cookie")[0]
    assert (await keyed.ask("/page", cookies(moved))).body == PAGE
    arrived = (await keyed.ask(f"/echo?{link}&a=1")).json()
    assert (arrived["target"], "skerry_link" in str(arrived["headers"])) == ("/echo?a=1", False)
    expiry, _, signature = link.removeprefix("skerry_link=").partition(".")
    later = f"skerry_link={int(expiry) + 1000}.{signature}"
    assert (await keyed.ask(f"/page?{later}")).status == 401
    brief = (await keyed.http.post(f"{keyed.box}/ports/3000/link", json={"expiresIn": 0.001})).json()
    while time.time() < int(urlsplit(brief["url"]).query.partition("=")[2].partition(".")[0]):
        await asyncio.sleep(0.05)
    assert (await keyed.ask(f"/page?{urlsplit(brief['url']).query}")).status == 401


async def test_with_a_domain_for_previews_the_path_form_lives_there_too(keyed: Site) -> None:
    path = "/preview/secret/3000/page?token=tok_1"
    moved = await keyed.ask(path, *BROWSER, host="skerry.example.com")
    assert (moved.status, moved.get("location")) == (307, f"https://preview.previews.example.com{path}")
    assert (await keyed.ask(path, "X-API-Key: sesame", host="preview.previews.example.com")).body == PAGE
    api = await keyed.ask("/v1/sandboxes", "X-API-Key: sesame", host="preview.previews.example.com")
    assert api.status == 404


async def test_a_proxy_in_front_may_say_that_it_speaks_https(keyed: Site) -> None:
    answer = await keyed.ask("/echo", "X-API-Key: sesame", "X-Forwarded-Proto: https", "X-Forwarded-For: 203.0.113.9")
    headers = dict(answer.json()["headers"])
    assert (headers["x-forwarded-proto"], headers["x-forwarded-port"]) == ("https", "443")
    assert headers["x-forwarded-for"] == "203.0.113.9"
    assert headers["x-original-url"] == f"https://{keyed.host}/echo"
