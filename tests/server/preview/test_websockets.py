"""WebSockets through a preview: the browser and the app talk as if nothing were between them."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import pytest
import websockets
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed, InvalidStatus

from tests.server.preview.conftest import Site

KEY = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="
UPGRADE = ("Connection: keep-alive, Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", KEY)


async def dial(site: Site, path: str = "/ws", host: str = "", **options: Any) -> ClientConnection:
    uri = f"ws://{host or site.host}{path}"
    return await websockets.connect(uri, host="127.0.0.1", port=site.server_port, max_size=None, **options)


async def test_texts_bytes_and_pings_go_both_ways(site: Site) -> None:
    async with await dial(site) as socket:
        for message in ("hello", "héllo ✓", b"\x00\xff", os.urandom(3_000_000), ""):
            await socket.send(message)
            assert await socket.recv() == message
        async with asyncio.timeout(20):
            await (await socket.ping(b"are you there"))


async def test_the_app_chooses_the_subprotocol(site: Site) -> None:
    async with await dial(site, subprotocols=["graphql-ws", "other"]) as socket:
        assert socket.subprotocol == "graphql-ws"


async def test_close_codes_come_through_from_either_side(site: Site) -> None:
    async with await dial(site) as socket:
        await socket.send("close 4321")
        with pytest.raises(ConnectionClosed) as closed:
            await socket.recv()
        assert closed.value.rcvd is not None
        assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (4321, "because")
    socket = await dial(site)
    await socket.close(4777, "enough")
    assert (socket.close_code, socket.close_reason) == (4777, "enough")


async def test_what_is_said_along_with_the_handshake_is_not_lost(site: Site) -> None:
    async with await dial(site, "/ws?greet") as socket:
        fields = {name.lower(): value for name, value in json.loads(await socket.recv())}
    assert fields["host"] == fields["x-forwarded-host"] == site.host
    assert (fields["x-sandbox-name"], fields["x-forwarded-for"]) == (site.id, "127.0.0.1")


async def test_headers_of_the_handshake_are_cleaned_as_any(site: Site) -> None:
    sent = {"Cookie": "a=1; skerry-preview=x", "X-Forwarded-Host": "evil"}
    async with await dial(site, "/ws?greet", additional_headers=sent) as socket:
        fields = {name.lower(): value for name, value in json.loads(await socket.recv())}
        assert socket.response is not None
        assert socket.response.headers["Set-Cookie"] == "ws=1"
    assert (fields["cookie"], fields["x-forwarded-host"]) == ("a=1", site.host)


async def test_a_refusal_of_the_app_is_passed_on_and_ends_the_connection(site: Site) -> None:
    with pytest.raises(InvalidStatus) as refused:
        await dial(site, "/ws-refused")
    response = refused.value.response
    assert (response.status_code, response.body) == (403, b"no sockets today")
    assert response.headers["X-Why"] == "closed"
    assert response.headers["Set-Cookie"] == "no=1"
    line = await site.line()
    head = "\r\n".join(["GET /ws-refused HTTP/1.1", f"Host: {site.host}", *UPGRADE, "", ""])
    smuggled = f"GET /echo HTTP/1.1\r\nHost: {site.host}\r\nCookie: skerry-preview=secret\r\n\r\n"
    await line.send(head)
    refusal = await line.answer()
    assert (refusal.status, refusal.get("connection")) == (403, "close")
    await line.send(smuggled)
    assert b"secret" not in await line.over()


async def test_an_app_that_does_not_know_websockets(site: Site) -> None:
    with pytest.raises(InvalidStatus) as refused:
        await dial(site, "/page")
    assert (refused.value.response.status_code, refused.value.response.body) == (200, b"<h1>hello</h1>")
    with pytest.raises(InvalidStatus) as refused:
        await dial(site, "/raw?U1NI")
    assert refused.value.response.status_code == 502


async def test_wrong_addresses_get_404_and_free_ports_502(site: Site) -> None:
    await site.expose(4999)
    for label, status in ((f"3000-{site.id}-wrong", 404), (f"3000-{site.id}", 404), (f"4999-{site.id}-tok_1", 502)):
        with pytest.raises(InvalidStatus) as refused:
            await dial(site, host=f"{label}.localhost")
        assert refused.value.response.status_code == status, label


async def test_a_handshake_with_a_body_is_refused(site: Site) -> None:
    line = await site.line()
    await line.send("\r\n".join(["GET /ws HTTP/1.1", f"Host: {site.host}", *UPGRADE, "Content-Length: 5", "", "hello"]))
    assert (await line.answer()).status == 400


async def test_path_previews_have_websockets_too(site: Site) -> None:
    host = f"127.0.0.1:{site.server_port}"
    async with await dial(site, f"/preview/{site.id}/3000/ws?token=tok_1", host=host) as socket:
        await socket.send("hi")
        assert await socket.recv() == "hi"
    jar = {"Cookie": f"skerry-preview={site.id}.3000; skerry-preview.{site.id}.3000=tok_1"}
    async with await dial(site, "/ws", host=f"preview.localhost:{site.server_port}", additional_headers=jar) as socket:
        await socket.send("hi")
        assert await socket.recv() == "hi"


async def test_websockets_of_the_api_are_not_touched(site: Site) -> None:
    jar = {"Cookie": f"skerry-preview={site.id}.3000; skerry-preview.{site.id}.3000=wrong"}
    for headers in ({}, jar):
        path = f"{site.box}/terminal"
        async with await dial(site, path, host=f"127.0.0.1:{site.server_port}", additional_headers=headers) as socket:
            assert json.loads(await socket.recv())["type"] == "ready"


async def test_an_end_that_drops_drops_the_other(site: Site) -> None:
    async with await dial(site) as socket:
        await socket.send("drop")
        with pytest.raises(ConnectionClosed):
            await socket.recv()
    count = await descriptors(site)
    socket = await dial(site)
    socket.transport.abort()
    await settled(site, count)


async def test_two_hundred_at_once_and_nothing_is_left(site: Site) -> None:
    await site.ask("/page")
    before = await descriptors(site)
    sockets = await asyncio.gather(*(dial(site) for _ in range(200)))
    for number, socket in enumerate(sockets):
        await socket.send(str(number))
    assert [await socket.recv() for socket in sockets] == [str(number) for number in range(200)]
    assert await descriptors(site) >= before + 390  # a few idle ones of before may have gone
    for socket in sockets[:100]:
        socket.transport.abort()
    await asyncio.gather(*(socket.close() for socket in sockets[100:]))
    await settled(site, before)


async def descriptors(site: Site) -> int:
    return len(os.listdir(f"/proc/{site.server.process.pid}/fd"))


async def settled(site: Site, most: int) -> None:
    """Wait until the server has no more descriptors than before, but for one of our own keep-alive connections."""
    async with asyncio.timeout(20):
        while await descriptors(site) > most + 1:
            await asyncio.sleep(0.05)
