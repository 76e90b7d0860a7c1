"""Requests and answers whose length two programs could read differently never get through."""

from __future__ import annotations

from base64 import urlsafe_b64encode

import pytest

from tests.server.preview.conftest import Site

POST = "POST /echo HTTP/1.1\r\nHost: {host}\r\n"
SMUGGLED = "GET /smuggled HTTP/1.1\r\nHost: {host}\r\n\r\n"

AMBIGUOUS = {
    "length and chunks": "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks and length": "Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n",
    "two lengths": "Content-Length: 4\r\nContent-Length: 5\r\n\r\nabcde",
    "a list of lengths": "Content-Length: 4, 5\r\n\r\nabcde",
    "a signed length": "Content-Length: +4\r\n\r\nabcd",
    "a negative length": "Content-Length: -1\r\n\r\n",
    "a length in hexadecimal": "Content-Length: 0x4\r\n\r\nabcd",
    "an unknown coding": "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "a coding after chunks": "Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "a space before the colon": "Content-Length : 4\r\n\r\nabcd",
    "a folded header": "X-Y: 1\r\n Transfer-Encoding: chunked\r\n\r\n",
    "a chunk size that is none": "Transfer-Encoding: chunked\r\n\r\n-1\r\n\r\n",
    "a chunk size beyond all bounds": "Transfer-Encoding: chunked\r\n\r\n1ffffffffffffffff\r\n\r\n",
    "a bare line feed in a header": "X-Y: 1\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a null byte": "X-Y: a\0b\r\n\r\n",
    "a carriage return in a header": "X-Y: a\rContent-Length: 3\r\n\r\nabc",
}


@pytest.mark.parametrize("what", AMBIGUOUS)
async def test_an_ambiguous_request_is_refused_and_ends_the_connection(site: Site, what: str) -> None:
    line = await site.line()
    await line.send((POST + AMBIGUOUS[what] + SMUGGLED).format(host=site.host))
    said = await line.over()
    # Where the head itself is sound the refusal may come from either side of the first answer, but nothing follows.
    assert b"HTTP/1.1 400" in said, said
    assert b"smuggled" not in said
    assert b"There is nothing here." not in said


async def test_a_body_with_a_request_for_another_protocol_is_refused(site: Site) -> None:
    line = await site.line()
    await line.send(
        f"POST /echo HTTP/1.1\r\nHost: {site.host}\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 4\r\n\r\n"
    )
    assert (await line.answer()).status == 400


async def test_a_target_that_is_no_path_is_refused(site: Site) -> None:
    for line_of in ("CONNECT 127.0.0.1:22", "CONNECT /echo", "GET echo", "GET http://evil.example"):
        line = await site.line()
        await line.send(f"{line_of} HTTP/1.1\r\nHost: {site.host}\r\nConnection: close\r\n\r\n")
        said = await line.over()
        assert said.startswith((b"HTTP/1.1 400", b"HTTP/1.1 405")), (line_of, said)
    answer = await site.ask("http://evil.example/echo")
    assert answer.json()["target"] == "/echo"


async def test_two_hosts_reach_no_preview(site: Site) -> None:
    answer = await site.ask("/page", f"Host: {site.host}", host="127.0.0.1")
    assert answer.body != b"<h1>hello</h1>"
    assert answer.status in (400, 403, 404)


async def test_a_head_without_end_is_refused(site: Site) -> None:
    line = await site.line()
    await line.send(f"GET /page HTTP/1.1\r\nHost: {site.host}\r\nX-Long: ")
    await line.send("x" * 300_000)
    answer = await line.answer()
    assert (answer.status, answer.json()["error"]["code"]) == (431, "headers_too_large")
    whole = await site.ask("/page", *(f"X-{n}: {'x' * 1000}" for n in range(70)))
    assert whole.status == 431
    path = await site.ask("/" + "x" * 70_000)
    assert path.status == 431
    assert (await site.ask("/page", f"X-Long: {'x' * 50_000}")).status == 200


ANSWERS = {
    "no HTTP": b"SSH-2.0-OpenSSH_9.9\r\n",
    "nothing": b"",
    "half a head": b"HTTP/1.1 200 OK\r\nContent-",
    "length and chunks": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
    "two equal lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
    "a length that is none": b"HTTP/1.1 200 OK\r\nContent-Length: 1e3\r\n\r\n",
    "an unknown coding": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "chunks in HTTP/1.0": b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a status that is none": b"HTTP/1.1 999 OK\r\nContent-Length: 0\r\n\r\n",
    "another protocol unasked": b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n",
    "a control character": b"HTTP/1.1 200 OK\r\nX-Y: a\x01b\r\nContent-Length: 0\r\n\r\n",
    "another version": b"HTTP/3.7 200 OK\r\nContent-Length: 0\r\n\r\n",
}


@pytest.mark.parametrize("what", ANSWERS)
async def test_an_answer_that_is_none_becomes_502(site: Site, what: str) -> None:
    answer = await site.ask(f"/raw?{urlsafe_b64encode(ANSWERS[what]).decode()}")
    assert (answer.status, answer.json()["error"]["code"]) == (502, "preview_failed")
    assert (await site.ask("/page")).body == b"<h1>hello</h1>"


async def test_an_answer_whose_head_never_ends_becomes_502(site: Site) -> None:
    answer = await site.ask("/endless-head")
    assert (answer.status, answer.json()["error"]["code"]) == (502, "preview_failed")


async def test_more_than_the_announced_length_goes_to_nobody(site: Site) -> None:
    extra = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabcHTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nstolen"
    line = await site.line()
    await line.send(f"GET /raw?{urlsafe_b64encode(extra).decode()} HTTP/1.1\r\nHost: {site.host}\r\n\r\n")
    assert (await line.answer()).body == b"abc"
    for _ in range(5):
        await line.send(f"GET /page HTTP/1.1\r\nHost: {site.host}\r\n\r\n")
        assert (await line.answer()).body == b"<h1>hello</h1>"
