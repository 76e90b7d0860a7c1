"""Bytes wait where they are made: neither a slow visitor nor a slow app makes the server hold them."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from skerry.control.presence import Presence
from skerry.server.preview.flows import Flow
from tests.server.conftest import ServerProcess
from tests.server.preview.conftest import Site
from tests.server.preview.test_websockets import UPGRADE, dial

GIGABYTE = 2**30
SLACK = 24 * 1024
"""Kilobytes that a process may grow by for other reasons."""


def memory(site: Site) -> int:
    """The server's resident memory in kilobytes."""
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{site.server.process.pid}/status").read_text())
    assert found
    return int(found[1])


async def test_a_gigabyte_comes_through_in_little_memory(site: Site) -> None:
    before, highest, size = memory(site), 0, 0
    line = await site.line()
    await line.send(f"GET /zeros?{GIGABYTE} HTTP/1.1\r\nHost: {site.host}\r\n\r\n")
    assert dict(await _head(line))["content-length"] == str(GIGABYTE)
    while size < GIGABYTE:
        data = await line.reader.read(1 << 20)
        assert data
        size += len(data)
        if size % (64 << 20) < len(data):
            highest = max(highest, memory(site))
    assert size == GIGABYTE
    assert highest - before < SLACK


async def test_a_large_upload_goes_through_in_little_memory(site: Site) -> None:
    before, highest, size = memory(site), 0, 256 << 20
    line = await site.line()
    await line.send(f"POST /echo HTTP/1.1\r\nHost: {site.host}\r\nContent-Length: {size}\r\n\r\n")
    block = bytes(1 << 20)
    for _ in range(size >> 20):
        await line.send(block)
        highest = max(highest, memory(site))
    assert (await line.answer()).json()["size"] == size
    assert highest - before < SLACK


async def test_a_visitor_who_does_not_read_stops_the_app(site: Site) -> None:
    before = memory(site)
    for path in (f"/zeros?{GIGABYTE}", f"/zeros-chunked?{GIGABYTE}"):
        line = await site.line()
        await line.send(f"GET {path} HTTP/1.1\r\nHost: {site.host}\r\n\r\n")
        await line.head()
        line.writer.transport.pause_reading()  # type: ignore[attr-defined]
    await still(site)
    assert memory(site) - before < SLACK
    assert (await site.ask("/page")).status == 200


async def test_an_app_that_does_not_read_stops_the_visitor(site: Site) -> None:
    before = memory(site)
    line = await site.line()
    size = 64 << 20
    await line.send(f"POST /slow-reader HTTP/1.1\r\nHost: {site.host}\r\nContent-Length: {size}\r\n\r\n")
    sending = asyncio.ensure_future(line.send(bytes(size)))
    assert (await site.ask("/started")).body == b"yes"
    await still(site)
    assert not sending.done()
    assert memory(site) - before < SLACK
    await site.ask("/go")
    await sending
    assert (await line.answer()).body == str(size).encode()


async def test_a_websocket_that_is_not_read_stops_the_app(site: Site) -> None:
    before = memory(site)
    line = await site.line()
    await line.send("\r\n".join(["GET /ws HTTP/1.1", f"Host: {site.host}", *UPGRADE, "", ""]))
    assert (await line.head())[0] == 101
    line.writer.transport.pause_reading()  # type: ignore[attr-defined]
    command = b"send 4096"  # of 64 KB each
    await line.send(bytes([0x81, 0x80 | len(command)]) + bytes(4) + command)
    await still(site)
    assert memory(site) - before < SLACK
    line.writer.transport.resume_reading()  # type: ignore[attr-defined]
    async with asyncio.timeout(20):
        for _ in range(64):
            await line.reader.readexactly(65536 * 64)


async def _head(line: object) -> list[tuple[str, str]]:
    status, headers = await line.head()  # type: ignore[attr-defined]
    assert status == 200
    return [(name.lower(), value) for name, value in headers]


async def still(site: Site) -> None:
    """Wait until the server has nothing to do any more: its processor time stands still."""
    last = -1
    while (now := _ticks(site)) != last:
        last = now
        await asyncio.sleep(0.3)


def _ticks(site: Site) -> int:
    fields = Path(f"/proc/{site.server.process.pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


# -- sleep -------------------------------------------------------------------------------------------------------------


@pytest.fixture
async def sleepy(server: ServerProcess, http: httpx.AsyncClient) -> AsyncIterator[Site]:
    """A sandbox that sleeps after a second in which nobody used it."""
    site = Site(server, http, f"sleepy-{os.urandom(3).hex()}", 3000)
    await http.post("/v1/sandboxes", json={"id": site.id, "sleepAfter": "1s"})
    await site.serve("127.0.0.1", 3000)
    await site.expose()
    yield site
    for line in site.lines:
        line.close()
    await http.delete(site.box)


async def state(site: Site) -> str:
    return str((await site.http.get(site.box)).json()["state"])


async def asleep(site: Site) -> None:
    async with asyncio.timeout(30):
        while await state(site) != "hibernated":
            await asyncio.sleep(0.1)


async def test_a_sandbox_that_sleeps_says_so_unless_its_preview_wakes_it(sleepy: Site) -> None:
    assert (await sleepy.ask("/page")).status == 200
    await sleepy.http.post(f"{sleepy.box}/stop")
    answer = await sleepy.ask("/page")
    said = {"error": "Preview URL is stale because the sandbox runtime is not active", "code": "STALE_PREVIEW_URL"}
    assert (answer.status, answer.json()) == (410, said)
    assert b"sleeps" in (await sleepy.ask("/page", "Accept: text/html")).body
    assert await state(sleepy) == "hibernated"
    await sleepy.expose(wakeOnRequest=True)
    woken = await sleepy.ask("/page")
    assert (woken.status, woken.json()["error"]["code"]) == (502, "port_not_listening")
    assert await state(sleepy) == "active"
    await sleepy.serve("127.0.0.1", 3000)
    assert (await sleepy.ask("/page")).status == 200


async def test_what_flows_keeps_a_sandbox_awake_and_what_is_over_does_not(sleepy: Site) -> None:
    async with await dial(sleepy) as socket:
        for _ in range(15):
            await socket.send("still here")
            assert await socket.recv() == "still here"
            await asyncio.sleep(0.2)
        assert await state(sleepy) == "active"
    await asleep(sleepy)


async def test_a_connection_on_which_nothing_moves_lets_the_sandbox_sleep() -> None:
    # A minute is long for a test.
    quickly = "from skerry.control.registry import Registry; Registry.attend.__wrapped__.__defaults__ = (1.0, True)"
    with tempfile.TemporaryDirectory(prefix="skerry-silent-") as place:
        Path(place).chmod(0o711)
        server = ServerProcess(Path(place), first=quickly)
        try:
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
                site = Site(server, http, "silent", 3000)
                await http.post("/v1/sandboxes", json={"id": site.id, "sleepAfter": "1s"})
                await site.serve("127.0.0.1", 3000)
                await site.expose()
                async with await dial(site) as socket:
                    events = await site.line()
                    await events.send(f"GET /events HTTP/1.1\r\nHost: {site.host}\r\n\r\n")
                    assert (await events.head())[0] == 200
                    await asleep(site)
                    await socket.wait_closed()
                    events.close()
        finally:
            assert await asyncio.to_thread(server.stop) == 0


async def test_every_piece_that_moves_counts_as_use() -> None:
    stirred: list[str] = []

    class Witness(Presence):
        def stir(self, inward: bool) -> None:
            stirred.append("moved")

    flow = Flow(Witness(lambda: None, 60, None), lambda: None)
    await asyncio.sleep(0.01)
    assert flow.silent_for() >= 0.01
    flow.stir()
    assert (stirred, flow.silent_for() < 0.01) == (["moved"], True)


async def test_kept_connections_do_not_keep_a_sandbox_awake(sleepy: Site) -> None:
    line = await sleepy.line()
    await line.send(f"GET /page HTTP/1.1\r\nHost: {sleepy.host}\r\n\r\n")
    assert (await line.answer()).status == 200
    await asleep(sleepy)
    await line.send(f"GET /page HTTP/1.1\r\nHost: {sleepy.host}\r\n\r\n")
    assert (await line.answer()).status == 410


# -- the end -----------------------------------------------------------------------------------------------------------


async def test_a_server_that_closes_does_not_wait_for_what_never_ends(tmp_path_factory: pytest.TempPathFactory) -> None:
    home = tmp_path_factory.mktemp("closing")
    for folder in (home, home.parent, home.parent.parent):
        folder.chmod(0o711)
    server = ServerProcess(home)
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        site = Site(server, http, "endless", 3000)
        await site.serve("127.0.0.1", 3000)
        await site.expose()
        for _ in range(20):  # a task that one of them left behind would be waited for, too
            (await dial(site)).transport.abort()
        events, hanging = await site.line(), await site.line()
        await events.send(f"GET /events HTTP/1.1\r\nHost: {site.host}\r\n\r\n")
        assert (await events.head())[0] == 200
        await hanging.send(f"GET /hang HTTP/1.1\r\nHost: {site.host}\r\n\r\n")
        socket = await dial(site)
        loop = asyncio.get_running_loop()
        began = loop.time()
        assert await asyncio.to_thread(server.stop) == 0
        assert loop.time() - began < 8  # it gives requests in progress ten seconds
        await socket.wait_closed()
        for line in site.lines:
            line.close()


# -- load --------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("wrk") is None, reason="needs wrk")
async def test_many_visitors_at_once_all_get_their_answers(site: Site) -> None:
    url = f"http://127.0.0.1:{site.server_port}/page"
    wrk = ["wrk", "-t1", "-c64", "-d2s", "-H", f"Host: {site.host}", url]
    done = await asyncio.create_subprocess_exec(*wrk, stdout=asyncio.subprocess.PIPE)
    said = (await done.communicate())[0].decode()
    assert re.search(r"[1-9]\d* requests in", said), said
    assert "Non-2xx" not in said
    assert "Socket errors" not in said
