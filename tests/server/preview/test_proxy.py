"""What an app behind a preview and its visitor see of each other."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import httpx
import pytest

from tests.server.preview.conftest import Site


async def seen(site: Site, *fields: str, target: str = "/echo", **request: Any) -> dict[str, list[str]]:
    """The headers that arrive inside, by lower-case name."""
    answer = await site.ask(target, *fields, **request)
    assert answer.status == 200, answer.body
    found: dict[str, list[str]] = {}
    for name, value in answer.json()["headers"]:
        found.setdefault(name.lower(), []).append(value)
    return found


# -- requests ----------------------------------------------------------------------------------------------------------


async def test_method_path_and_query_arrive_as_they_were_sent(site: Site) -> None:
    target = "/echo?a=%20b&c=d/../e&&x"
    for method in ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "PROPFIND"):
        arrived = (await site.ask(target, method=method)).json()
        assert (arrived["method"], arrived["target"], arrived["version"]) == (method, target, "HTTP/1.1")
    odd = await site.ask("/a%2Fb//c/./d/../%C3%A9;v=1")
    assert (odd.status, odd.body) == (404, b"There is nothing here.")


async def test_the_app_sees_the_host_it_was_called_by_and_who_called(site: Site) -> None:
    headers = await seen(site, target="/echo?q=1")
    assert headers["host"] == headers["x-forwarded-host"] == [site.host]
    assert headers["x-forwarded-for"] == ["127.0.0.1"]
    assert headers["x-forwarded-proto"] == ["http"]
    assert headers["x-forwarded-port"] == [str(site.server_port)]
    assert headers["x-original-url"] == [f"http://{site.host}/echo?q=1"]
    assert headers["x-sandbox-name"] == [site.id]


async def test_a_visitor_cannot_speak_for_the_proxy(site: Site) -> None:
    lies = ["X-Forwarded-Host: evil", "X-Sandbox-Name: other", "X-Original-URL: http://evil/", "Forwarded: for=evil"]
    headers = await seen(site, *lies, "X-Forwarded-Prefix: /evil", "X-Real-IP: evil")
    assert "evil" not in json.dumps(headers)
    assert headers["x-sandbox-name"] == [site.id]


async def test_headers_for_one_hop_stay_on_it_in_both_directions(site: Site) -> None:
    hop = ["Connection: keep-alive, X-Private", "X-Private: 1", "Keep-Alive: 5", "TE: trailers", "Proxy-Connection: x"]
    headers = await seen(site, *hop, "Proxy-Authorization: Basic eA==", "X-Public: 1", "X-Public: 2")
    assert headers["x-public"] == ["1", "2"]
    assert not headers.keys() & {
        "connection",
        "x-private",
        "keep-alive",
        "te",
        "proxy-connection",
        "proxy-authorization",
    }
    answer = await site.ask("/hop")
    assert answer.get("x-kept") == "1"
    assert answer.get("x-accel-buffering") == "no"
    assert not any(answer.all(name) for name in ("x-secret", "keep-alive", "proxy-authenticate", "x-accel-redirect"))


async def test_naming_the_host_or_the_length_as_a_header_for_one_hop_removes_neither(site: Site) -> None:
    answer = await site.ask(
        "/echo", "Connection: host, content-length, cookie", "Cookie: a=1", method="POST", body=b"12"
    )
    headers = {name.lower(): value for name, value in answer.json()["headers"]}
    assert (answer.json()["size"], headers["host"], headers["cookie"]) == (2, site.host, "a=1")


async def test_bodies_arrive_whole_whether_of_known_length_or_in_chunks(site: Site) -> None:
    data = bytes(range(256)) * 8192
    expected = hashlib.sha256(data).hexdigest()
    known = await site.ask("/echo", method="POST", body=data)
    assert (known.json()["size"], known.json()["sha256"]) == (len(data), expected)
    line = await site.line()
    await line.send(f"POST /echo HTTP/1.1\r\nHost: {site.host}\r\nTransfer-Encoding: chunked\r\n\r\n")
    for start in range(0, len(data), 100_000):
        piece = data[start : start + 100_000]
        await line.send(b"%x;ext=1\r\n%b\r\n" % (len(piece), piece))
    await line.send(b"0\r\nX-Late: trailer\r\n\r\n")
    arrived = (await line.answer()).json()
    assert (arrived["size"], arrived["sha256"]) == (len(data), expected)
    assert "x-late" not in json.dumps(arrived["headers"]).lower()
    await line.send(
        f"POST /echo HTTP/1.1\r\nHost: {site.host}\r\nTransfer-Encoding: chunked\r\n\r\n"
        "2\r\nhi\r\n0\r\nX-Late: trailer\r\n\r\n"
    )
    arrived = (await line.answer()).json()
    assert (arrived["size"], "x-late" in json.dumps(arrived["headers"]).lower()) == (2, False)


async def test_a_body_is_asked_for_only_when_the_app_wants_it(site: Site) -> None:
    line = await site.line()
    head = f"HTTP/1.1\r\nHost: {site.host}\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n"
    await line.send(f"POST /continue {head}")
    assert (await line.head())[0] == 100
    await line.send(b"hello")
    assert (await line.answer()).body == b"5 100-continue"
    await line.send(f"POST /refuse-body {head}")
    refused = await line.answer()
    assert (refused.status, refused.body, refused.get("connection")) == (417, b"not wanted", "close")
    assert await line.over() == b""


async def test_an_app_that_never_says_continue_gets_the_body_all_the_same(site: Site) -> None:
    line = await site.line()
    await line.send(f"POST /echo HTTP/1.1\r\nHost: {site.host}\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n")
    assert (await line.head())[0] == 100
    await line.send(b"hello")
    assert (await line.answer()).json()["size"] == 5


async def test_an_answer_may_come_before_the_upload_is_through(site: Site) -> None:
    for path in ("/early", "/early-close"):
        line = await site.line()
        await line.send(f"POST {path} HTTP/1.1\r\nHost: {site.host}\r\nContent-Length: 300000\r\n\r\n")
        await line.send(bytes(100_000))
        early = await line.answer()
        assert (early.status, early.body) == (413, b"too much")
        await line.send(bytes(200_000) + f"GET /page HTTP/1.1\r\nHost: {site.host}\r\n\r\n".encode())
        assert (await line.answer()).body == b"<h1>hello</h1>"


# -- responses ---------------------------------------------------------------------------------------------------------


async def test_headers_of_the_answer_come_through_each_as_often_as_sent(site: Site) -> None:
    page = await site.ask("/page")
    assert (page.status, page.body) == (200, b"<h1>hello</h1>")
    assert page.all("x-twice") == ["1", "2"]
    assert page.all("server") == ["awkward"]
    assert len(page.all("date")) == 1
    assert (await site.ask("/redirect")).get("location") == "https://elsewhere.example/?a=b#c"


async def test_answers_of_every_kind_of_length(site: Site) -> None:
    chunked = await site.ask("/chunked")
    assert (chunked.body, chunked.whole, chunked.get("transfer-encoding")) == (b"one two three", True, "chunked")
    assert (await site.ask("/until-close")).body == b"as long as it lasts"
    assert (await site.ask("/old")).body == b"old"
    assert (await site.ask("/zeros?0")).body == b""
    assert len((await site.ask("/zeros?3000000")).body) == 3_000_000
    assert len((await site.ask("/zeros-chunked?3014656")).body) == 3_014_656


async def test_answers_without_a_body_end_at_their_head(site: Site) -> None:
    line = await site.line()
    for method, path, status, length in (
        ("HEAD", "/head", 200, "1234"),
        ("GET", "/204", 204, None),
        ("GET", "/304", 304, None),
        ("HEAD", "/chunked", 200, None),
        ("GET", "/page", 200, "14"),
    ):
        await line.send(f"{method} {path} HTTP/1.1\r\nHost: {site.host}\r\n\r\n")
        answer = await line.answer(bodiless=method == "HEAD")
        assert (answer.status, answer.get("content-length")) == (status, length), path


async def test_ranges_are_the_apps_to_answer(site: Site) -> None:
    part = await site.ask("/range", "Range: bytes=10-19")
    assert (part.status, part.body, part.get("content-range")) == (206, bytes(range(10, 20)), "bytes 10-19/256")


async def test_interim_answers_are_skipped(site: Site) -> None:
    assert (await site.ask("/interim")).body == b"final"
    assert (await site.ask("/always-interim")).status == 502


async def test_events_arrive_when_they_happen(site: Site) -> None:
    async with httpx.AsyncClient(timeout=20) as client:
        url = f"http://127.0.0.1:{site.server_port}/events"
        async with client.stream("GET", url, headers={"Host": site.host}) as response:
            lines = response.aiter_lines()
            assert await anext(lines) == "data: first"
            await site.ask("/go")
            assert [line async for line in lines if line] == ["data: second"]


async def test_an_answer_that_breaks_off_is_seen_to_break_off(site: Site) -> None:
    for path in ("/short", "/short-chunks"):
        answer = await site.ask(path)
        assert (answer.status, answer.body, answer.whole) == (200, b"only this", False), path
    assert not (await site.ask("/reset-until-close")).whole


async def test_a_visitor_who_leaves_is_noticed_inside(site: Site) -> None:
    line = await site.line()
    await line.send(f"GET /hang HTTP/1.1\r\nHost: {site.host}\r\n\r\n")
    assert (await site.ask("/started")).body == b"yes"
    line.close()
    assert (await site.ask("/left")).body == b"yes"
    line = await site.line()
    await line.send(f"POST /hang HTTP/1.1\r\nHost: {site.host}\r\nContent-Length: 100\r\n\r\nsome")
    assert (await site.ask("/started")).body == b"yes"
    line.close()
    assert (await site.ask("/left")).body == b"yes"


# -- connections -------------------------------------------------------------------------------------------------------


async def test_connections_to_the_app_are_used_again(site: Site) -> None:
    before = int((await site.ask("/connections")).body)
    for _ in range(20):
        assert (await site.ask("/page")).status == 200
    assert int((await site.ask("/connections")).body) == before


async def test_a_kept_connection_that_the_app_closes_costs_the_visitor_nothing(site: Site) -> None:
    for again in ("GET", "HEAD", "POST"):
        assert (await site.ask("/bad-next")).status == 200
        answer = await site.ask("/head", method=again)
        assert answer.status == 200, again


async def test_what_an_app_says_unasked_is_never_taken_for_an_answer(site: Site) -> None:
    assert (await site.ask("/chatty")).body == b"answer"
    # A POST has a connection of its own; the chatty one is closed for what it said.
    assert (await site.ask("/hung-up", method="POST")).body == b"yes"
    assert (await site.ask("/page")).body == b"<h1>hello</h1>"


async def test_requests_one_after_the_other_on_one_line_are_answered_in_turn(site: Site) -> None:
    line = await site.line()
    await line.send("".join(f"GET /echo?{n} HTTP/1.1\r\nHost: {site.host}\r\n\r\n" for n in range(10)))
    assert [(await line.answer()).json()["target"] for _ in range(10)] == [f"/echo?{n}" for n in range(10)]


@pytest.mark.parametrize(("host", "port"), [("0.0.0.0", 1), ("::1", 65535), ("::", 8443)])
async def test_any_port_on_any_address_of_the_sandbox(site: Site, host: str, port: int) -> None:
    await site.serve(host, port)
    await site.expose(port)
    answer = await site.ask("/page", host=f"{port}-{site.id}-tok_1.localhost:{site.server_port}")
    assert answer.body == b"<h1>hello</h1>"


async def test_a_port_that_nobody_listens_on(site: Site) -> None:
    await site.expose(4999)
    host = f"4999-{site.id}-tok_1.localhost"
    program = await site.ask("/x", host=host)
    assert (program.status, program.json()["error"]["code"]) == (502, "port_not_listening")
    assert program.json()["error"]["message"].startswith("Service on port 4999 is not responding")
    assert program.get("retry-after") == "2"
    page = await site.ask("/x", "Accept: text/html,*/*", host=host)
    assert (page.status, page.get("content-type")) == (502, "text/html; charset=utf-8")
    assert b'http-equiv="refresh"' in page.body
    assert b"4999" in page.body
    assert b"src=" not in page.body
    assert b"href=" not in page.body
