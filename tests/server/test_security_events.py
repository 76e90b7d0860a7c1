"""What was refused because it may be an attack is in the log, with a severity and without a secret."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from structlog.testing import capture_logs
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from skerry.server import allowance
from skerry.server.security import AT_ONCE, KINDS, REMEMBERED, Events, shown_host
from tests.server.conftest import ServerProcess
from tests.server.preview.conftest import Site

KEY = "the-servers-own-key"
GUESS = "guessed_t0ken"


@asynccontextmanager
async def watched(home: Path, **settings: object) -> AsyncIterator[tuple[Site, Path]]:
    """A server whose log is a file."""
    for folder in (home, home.parent, home.parent.parent):
        folder.chmod(0o711)
    path = home / "log"
    with path.open("w") as log:
        server = ServerProcess(home, log=log, **settings)
    try:
        async with httpx.AsyncClient(base_url=server.url, timeout=60, headers={"X-API-Key": KEY}) as http:
            yield Site(server, http, "demo", 3000), path
    finally:
        await asyncio.to_thread(server.stop)


def written(log: Path) -> list[dict[str, str]]:
    """The security events of a log."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", log.read_text())
    lines = [line for line in plain.splitlines() if " security " in line]
    return [dict(re.findall(r"(\w+)=(\S+)", line)) for line in lines]


async def test_every_refusal_is_logged_with_its_severity_and_without_the_secret(tmp_path: Path) -> None:
    async with watched(tmp_path, api_keys=[KEY], preview_domain="preview.example.com") as (site, log):
        said = []

        async def refused(status: int, kind: str, target: str, *fields: str, host: str = "127.0.0.1") -> None:
            assert (await site.ask(target, *fields, host=host)).status == status
            said.append(kind)

        exposed = await site.expose()
        link = (await site.http.post(f"{site.box}/ports/3000/link")).json()["url"].partition("skerry_link=")[2]
        key = f"X-API-Key: {KEY}"
        await refused(401, "api_key_missing", site.box)
        await refused(401, "api_key_wrong", site.box, f"Authorization: Bearer {GUESS}")
        await refused(401, "ticket_wrong", f"{site.box}/terminal?ticket={GUESS}")
        await refused(400, "sandbox_id_refused", "/v1/sandboxes/admin", key)
        await refused(404, "preview_unknown", "/", host=f"3001-demo-{GUESS}.localhost")
        await refused(404, "preview_token_wrong", "/", host=f"3000-demo-{GUESS}.preview.example.com")
        await refused(404, "preview_token_wrong", f"/preview/demo/3000/?token={GUESS}")
        await refused(403, "browser_refused", f"{site.box}/ports/3000/proxy/", key, "Sec-Fetch-Dest: document")
        await site.expose(private=True)
        await refused(401, "preview_private", "/", host=site.host)
        await refused(401, "preview_link_wrong", f"/?skerry_link={link[:-2]}xx", host=site.host)
        came_from = f"Referer: http://preview.localhost/preview/demo/3000/?x={GUESS}"
        token = exposed["token"]
        seen_before = f"skerry-preview=demo.3000; skerry-preview.demo.3000={token}; skerry-link.demo.3000={link}"
        cookies = f"Cookie: {seen_before}"
        worker = "Service-Worker: script"
        await refused(403, "service_worker_refused", "/sw.js", came_from, cookies, worker, host="preview.localhost")
        with pytest.raises(ConnectionClosed):
            async with connect(f"ws://127.0.0.1:{site.server_port}{site.box}/terminal?ticket={GUESS}") as socket:
                await socket.recv()
        said.append("ticket_wrong")
        line = await site.line()
        await line.send(f"GET / HTTP/1.1\r\nHost: {site.host}\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n")
        await line.over()
        line = await site.line()
        await line.send(f"GET / HTTP/1.1\r\nHost: {site.host}\r\nX-Long: {'x' * 70_000}\r\n\r\n")
        await line.over()
        said += ["request_malformed", "headers_too_large"]

        events = written(log)
        assert [event["kind"] for event in events] == said
        assert [event["severity"] for event in events] == [KINDS[kind] for kind in said]
        assert {event["client"] for event in events} == {"127.0.0.1"}
        assert [event["sandbox"] for event in events if event["kind"].startswith("preview")] == ["demo"] * 5
        for secret in (KEY, GUESS, token, link, link.partition(".")[2][:20]):
            assert secret not in log.read_text()


async def test_names_and_pages_of_others_are_logged_where_there_are_no_keys(tmp_path: Path) -> None:
    async with watched(tmp_path) as (site, log):
        assert (await site.ask(site.box, host="rebound.example:8787")).status == 403
        assert (await site.ask(site.box, "Origin: https://elsewhere.example", host="127.0.0.1")).status == 403
        assert (await site.ask(site.box, "Sec-Fetch-Site: cross-site", host="127.0.0.1")).status == 403
        assert (await site.ask(site.box, host=f"3000-demo-{GUESS}.elsewhere.example")).status == 403
        events = written(log)
        assert [event["kind"] for event in events] == [
            "host_refused",
            "origin_refused",
            "origin_refused",
            "host_refused",
        ]
        assert {event["severity"] for event in events} == {"high"}
        assert (events[0]["host"], events[0]["sandbox"]) == ("rebound.example:8787", "demo")
        assert GUESS not in log.read_text()


def test_who_asks_without_end_does_not_fill_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 100.0
    monkeypatch.setattr(allowance.time, "monotonic", lambda: clock)
    events = Events()
    with capture_logs() as log:
        for _ in range(1000):
            events.report("api_key_wrong", "10.0.0.1")
        events.report("api_key_wrong", "10.0.0.2")
        assert len(log) == AT_ONCE + 1
        clock += 61
        events.report("api_key_wrong", "10.0.0.1")
    assert log[-1]["withheld"] == 1000 - AT_ONCE
    assert "withheld" not in log[0]


def test_many_who_ask_do_not_fill_the_memory() -> None:
    events = Events()
    with capture_logs():
        for number in range(REMEMBERED + 100):
            events.report("preview_unknown", f"client-{number}")
    assert len(events._allowance) == REMEMBERED


def test_a_host_is_logged_without_token_and_without_what_a_terminal_obeys() -> None:
    assert shown_host("3000-demo-s3cret.preview.example.com:80") == "….preview.example.com:80"
    assert shown_host("[::1]:8787") == "[::1]:8787"
    assert shown_host("a\x1b[31mb") == shown_host("a b") == shown_host("x" * 300) == "unreadable"


def test_every_kind_is_explained() -> None:
    text = (Path(__file__).parents[2] / "docs/security.md").read_text()
    explained = dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", text, re.MULTILINE))
    assert explained == KINDS
