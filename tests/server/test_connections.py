"""Clients that are slow, many, or speak nonsense: they cost little, for a while, and nobody else anything."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import websockets

from skerry.errors import TooManyConnectionsError
from skerry.server.connections import Connections
from skerry.settings import Settings
from tests.server.conftest import ServerProcess
from tests.server.preview.conftest import Line, Site

KEY = "s3cret"
BOX = "/v1/sandboxes/patient"
HEAD = 2.0
"""Seconds that a head may take here."""


@pytest.fixture(scope="module")
def strict() -> Iterator[ServerProcess]:
    """A server that has little patience."""
    home = Path(tempfile.mkdtemp(prefix="skerry-strict-"))
    home.chmod(0o711)
    process = ServerProcess(home, api_keys=[KEY], head_timeout=HEAD, send_timeout=1.0, receive_timeout=2.0)
    yield process
    assert process.stop() == 0
    shutil.rmtree(home)


@pytest.fixture
async def client(strict: ServerProcess) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=strict.url, timeout=60, headers={"X-API-Key": KEY}) as client:
        yield client


async def line_to(server: ServerProcess) -> Line:
    return Line(*await asyncio.open_connection("127.0.0.1", httpx.URL(server.url).port))


def descriptors(server: ServerProcess) -> int:
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


async def at_most(server: ServerProcess, count: int) -> None:
    async with asyncio.timeout(30):
        while descriptors(server) > count:
            await asyncio.sleep(0.05)


async def at_least(server: ServerProcess, count: int) -> None:
    """The kernel takes its time to make room for many."""
    async with asyncio.timeout(HEAD):
        while descriptors(server) < count:
            await asyncio.sleep(0.01)


async def drip(line: Line, piece: bytes) -> None:
    """Send a little, again and again, until the server has had enough."""
    try:
        while not line.reader.at_eof():
            await line.send(piece)
            await asyncio.sleep(0.2)
    except ConnectionError:
        pass


# -- slow ones ---------------------------------------------------------------------------------------------------------


async def test_hundreds_of_slow_heads_keep_nobody_from_working_and_are_given_up(
    strict: ServerProcess, client: httpx.AsyncClient
) -> None:
    assert (await client.post(f"{BOX}/exec", json={"command": "true"})).status_code == 200
    before = descriptors(strict)
    lines = [await line_to(strict) for _ in range(400)]
    drips = [asyncio.create_task(drip(line, b"X-A: b\r\n")) for line in lines]
    for line in lines:
        await line.send(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
    await at_least(strict, before + 400)
    for number in range(10):
        done = await client.post(f"{BOX}/exec", json={"command": f"echo {number}"})
        assert done.json()["stdout"] == f"{number}\n"
    answers = await asyncio.gather(*(line.over() for line in lines))
    assert all(answer.startswith(b"HTTP/1.1 408 ") for answer in answers)
    assert b"request_timeout" in answers[0]
    await asyncio.gather(*drips)
    for line in lines:
        line.close()
    await at_most(strict, before + 2)


@pytest.mark.parametrize("said", [b"", b"\r\n", b"G", b"GET / HTTP/1.1\r\n"])
async def test_a_connection_on_which_no_head_comes_is_closed(strict: ServerProcess, said: bytes) -> None:
    line = await line_to(strict)
    dripping = asyncio.create_task(drip(line, said and b"\r\n" if said == b"\r\n" else said[:0]))
    await line.send(said)
    await line.over()
    await dripping
    line.close()


async def test_empty_lines_after_a_request_do_not_keep_a_connection(strict: ServerProcess) -> None:
    line = await line_to(strict)
    await line.send(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert (await line.answer()).status == 200
    dripping = asyncio.create_task(drip(line, b"\r\n"))
    await line.over()
    await dripping
    line.close()


async def test_a_connection_that_is_used_again_after_a_pause_is_still_there(strict: ServerProcess) -> None:
    line = await line_to(strict)
    for body in (b"", b"{}"):
        await line.send(b"POST /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        assert (await line.answer()).status == 401
        await asyncio.sleep(HEAD * 1.5)
    await line.send(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert (await line.answer()).status == 200
    line.close()


async def test_a_body_that_nobody_asked_for_is_not_waited_for(strict: ServerProcess) -> None:
    line = await line_to(strict)
    await line.send(f"PUT {BOX}/files?path=/tmp/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999\r\n\r\nbegin")
    assert (await line.answer()).status == 401
    dripping = asyncio.create_task(drip(line, b"x"))
    await line.over()
    await dripping
    line.close()


async def test_a_body_that_is_refused_but_comes_does_not_cost_the_connection(strict: ServerProcess) -> None:
    line = await line_to(strict)
    await line.send(f"PUT {BOX}/files?path=/tmp/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n12345")
    assert (await line.answer()).status == 401
    await line.send(b"67890")
    await asyncio.sleep(HEAD * 1.5)
    await line.send(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert (await line.answer()).status == 200
    line.close()


async def test_a_body_that_stops_coming_is_given_up(strict: ServerProcess) -> None:
    line = await line_to(strict)
    head = f"POST {BOX}/exec HTTP/1.1\r\nHost: localhost\r\nX-API-Key: {KEY}\r\nContent-Type: application/json\r\n"
    await line.send(head + 'Content-Length: 100\r\n\r\n{"command": ')
    assert (await line.answer()).status == 408
    await line.over()
    line.close()


async def test_who_does_not_take_an_answer_is_cut_off(strict: ServerProcess, client: httpx.AsyncClient) -> None:
    await client.post(f"{BOX}/exec", json={"command": "truncate -s 400M /tmp/large"})
    before = descriptors(strict)
    lines = [await line_to(strict) for _ in range(5)]
    for line in lines:
        line.writer.transport.pause_reading()  # type: ignore[attr-defined]
        target = f"{BOX}/files/content?path=/tmp/large"
        await line.send(f"GET {target} HTTP/1.1\r\nHost: localhost\r\nX-API-Key: {KEY}\r\n\r\n")
    await asyncio.sleep(0.3)
    assert descriptors(strict) >= before + 10
    await at_most(strict, before + 2)  # the FIFOs of the next command
    assert (await client.post(f"{BOX}/exec", json={"command": "rm /tmp/large"})).status_code == 200
    for line in lines:
        line.writer.transport.abort()


async def test_who_does_not_take_what_a_preview_shows_is_cut_off(
    strict: ServerProcess, client: httpx.AsyncClient
) -> None:
    site = Site(strict, client, "patient", 3000)
    await site.serve("127.0.0.1", 3000)
    await site.expose()
    await site.ask("/page")
    before = descriptors(strict)
    lines = [await site.line() for _ in range(5)]
    for line in lines:
        await line.send(f"GET /zeros?{1 << 30} HTTP/1.1\r\nHost: {site.host}\r\n\r\n")
        await line.head()
        line.writer.transport.pause_reading()  # type: ignore[attr-defined]
    assert descriptors(strict) > before
    await at_most(strict, before)
    assert (await site.ask("/page")).status == 200
    for line in site.lines:
        line.writer.transport.abort()


# -- many --------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def bounded(most: int) -> AsyncIterator[ServerProcess]:
    with tempfile.TemporaryDirectory(prefix="skerry-bounded-") as home:
        Path(home).chmod(0o711)
        server = ServerProcess(Path(home), max_connections=most)
        try:
            yield server
        finally:
            assert await asyncio.to_thread(server.stop) == 0


async def test_one_connection_too_many_is_told_so_and_a_place_that_is_left_is_taken() -> None:
    async with bounded(8) as server:
        lines = [await line_to(server) for _ in range(8)]
        for line in lines:
            await line.send(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await line.answer()).status == 200
        refused = await (await line_to(server)).answer()
        assert (refused.status, refused.json()["error"]["code"]) == (503, "too_many_connections")
        assert "SKERRY_MAX_CONNECTIONS" in refused.json()["error"]["hint"]
        lines.pop().close()
        async with asyncio.timeout(10):
            while (await asyncio.to_thread(_health, server)) != 200:
                await asyncio.sleep(0.05)
        for line in lines:
            line.close()


def _health(server: ServerProcess) -> int:
    try:
        return httpx.get(f"{server.url}/health").status_code
    except httpx.TransportError:
        return 0


async def test_websockets_count_and_give_their_places_back() -> None:
    async with bounded(6) as server:
        url = f"{server.url.replace('http', 'ws', 1)}/v1/sandboxes/demo/terminal"
        for _ in range(3):
            terminals = [await websockets.connect(url) for _ in range(6)]
            assert "ready" in str(await terminals[0].recv())
            assert await asyncio.to_thread(_health, server) == 503
            for terminal in terminals:
                await terminal.close()
            async with asyncio.timeout(10):
                while (await asyncio.to_thread(_health, server)) != 200:
                    await asyncio.sleep(0.05)


class Connection:
    """Of a transport only this is asked."""

    ended = False

    def is_closing(self) -> bool:
        return self.ended


def test_one_client_cannot_take_every_place() -> None:
    connections: Any = Connections(Settings(max_connections=10, max_connections_per_client=3))
    theirs = [Connection() for _ in range(3)]
    for one in theirs:
        connections.admit("198.51.100.1", one)
    with pytest.raises(TooManyConnectionsError, match="from this address"):
        connections.admit("198.51.100.1", Connection())
    connections.admit("198.51.100.2", Connection())
    theirs[0].ended = True
    connections.admit("198.51.100.1", Connection())
    connections.release("198.51.100.1", theirs[1])
    connections.release("198.51.100.1", theirs[1])
    connections.admit("198.51.100.1", Connection())
    with pytest.raises(TooManyConnectionsError):
        connections.admit("198.51.100.1", Connection())


def test_one_network_of_the_newer_addresses_is_one_client() -> None:
    connections: Any = Connections(Settings(max_connections=10, max_connections_per_client=2))
    connections.admit("2001:db8::1", Connection())
    connections.admit("2001:db8::2", Connection())
    with pytest.raises(TooManyConnectionsError):
        connections.admit("2001:db8::3", Connection())
    connections.admit("2001:db8:0:1::1", Connection())


def test_this_machine_may_be_a_proxy_for_many_but_the_sum_is_bounded() -> None:
    connections: Any = Connections(Settings(max_connections=5, max_connections_per_client=2))
    kept = [Connection() for _ in range(5)]
    for one in kept:
        connections.admit("127.0.0.1", one)
    with pytest.raises(TooManyConnectionsError, match="takes no more"):
        connections.admit("198.51.100.1", Connection())
    for one in kept:
        connections.release("127.0.0.1", one)
    connections.admit("198.51.100.1", Connection())
    assert connections._count == 1


# -- nonsense ----------------------------------------------------------------------------------------------------------

NONSENSE = [
    b"\x00" * 100,
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(200)),  # TLS
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(30),
    b"SSH-2.0-client\r\n",
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET  /  HTTP/1.1\r\n\r\n",
    b"GET /\x00 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET http://[::1 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /%ff%fe%00 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"CONNECT example.com:443 HTTP/1.1\r\nHost: example.com:443\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999999999999\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
    b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\n : x\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nA\x00B: x\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nA: x\rB: y\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\n\r\n" + bytes(50),
    b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n\xff\xff\xff",
    b"GET /v1/sandboxes/x/terminal HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: x\r\nSec-WebSocket-Version: 99\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 20_000 + b"\r\n",
]


@pytest.mark.parametrize("nonsense", NONSENSE)
async def test_nonsense_is_answered_with_an_error_or_nothing(
    strict: ServerProcess, client: httpx.AsyncClient, nonsense: bytes
) -> None:
    line = await line_to(strict)
    try:
        await line.send(nonsense)
        line.writer.write_eof()
    except ConnectionError:
        pass
    said = await line.over()
    assert not said or said.startswith((b"HTTP/1.1 4", b"HTTP/1.1 5", b"HTTP/1.1 101")), said[:100]
    assert b"Traceback" not in said
    assert not said.startswith(b"HTTP/1.1 500")
    line.close()
    assert (await client.get("/health")).status_code == 200


async def test_noise_on_many_connections_leaves_the_server_as_it_was(
    strict: ServerProcess, client: httpx.AsyncClient
) -> None:
    noise = random.Random(6)
    # All connections to the database that there can be are open before anything is counted.
    async with httpx.AsyncClient(base_url=strict.url, timeout=60, headers={"X-API-Key": KEY}) as crowd:
        asked = await asyncio.gather(*(crowd.get("/v1/sandboxes") for _ in range(16)))
        assert {answer.status_code for answer in asked} == {200}
    assert (await client.get("/health")).status_code == 200
    await asyncio.sleep(0.5)  # those of the crowd are closed
    before = descriptors(strict)
    whole = (
        f"POST {BOX}/exec HTTP/1.1\r\nHost: localhost\r\nX-API-Key: wrong\r\nContent-Length: 3\r\n\r\n{{}}\n".encode()
    )

    async def bother() -> None:
        line = await line_to(strict)
        said = bytearray(whole * 2)
        for _ in range(noise.randrange(1, 8)):
            said[noise.randrange(len(said))] = noise.randrange(256)
        try:
            await line.send(bytes(said[: noise.randrange(1, len(said))]))
            line.writer.write_eof()
        except ConnectionError:
            pass
        assert b"HTTP/1.1 500" not in await line.over()
        line.close()

    for _ in range(10):
        await asyncio.gather(*(bother() for _ in range(30)))
    await at_most(strict, before + 1)
    assert (await client.post(f"{BOX}/exec", json={"command": "echo fine"})).json()["stdout"] == "fine\n"


@pytest.mark.parametrize("place", ["terminal", "ports/3999/tcp", "ports/3999/listen"])
async def test_frames_that_are_none_end_only_their_websocket(
    strict: ServerProcess, client: httpx.AsyncClient, place: str
) -> None:
    noise = random.Random(place)
    for number in range(12):
        line = await line_to(strict)
        await line.send(
            f"GET {BOX}/{place} HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\nX-API-Key: {KEY}\r\n\r\n"
        )
        await line.head()
        frames = [
            b"\xf1\x80\x00\x00\x00\x00",  # reserved bits
            b"\x81\x05hello",  # not masked
            b"\x82\xff\x7f\xff\xff\xff\xff\xff\xff\xff\x00\x00\x00\x00",  # 2^63 bytes follow
            b"\x89\xfe\x01\x00\x00\x00\x00\x00" + bytes(256),  # a ping that is too long
            b"\x81\x82\x00\x00\x00\x00\xff\xfe",  # not UTF-8
            b"\x80\x80\x00\x00\x00\x00",  # goes on with nothing
        ]
        try:
            await line.send(frames[number] if number < len(frames) else noise.randbytes(300))
            line.writer.write_eof()
        except ConnectionError:
            pass
        await line.over()
        line.close()
    assert (await client.post(f"{BOX}/exec", json={"command": "echo fine"})).json()["stdout"] == "fine\n"
