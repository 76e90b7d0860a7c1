"""Large bodies that the kernel moves by itself: they are as whole, and end as clearly, as those that Python reads."""

from __future__ import annotations

import asyncio
import struct
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path

import httpx
import pytest

from skerry.server.preview.wire import LARGE
from tests.server.conftest import ServerProcess
from tests.server.preview.conftest import Line, Site
from tests.server.preview.test_flow import still
from tests.server.preview.test_websockets import descriptors, settled

SIZES = [LARGE - 1, LARGE, LARGE + 600_001, 40_000_003]


def pattern(size: int) -> bytes:
    """What the app gives for `/pattern`."""
    return b"".join(struct.pack(">Q", number) for number in range(0, size, 8))[:size]


def expected(size: int) -> str:
    return sha256(pattern(size)).hexdigest()


@pytest.mark.parametrize("size", SIZES)
async def test_a_large_body_arrives_as_it_was_and_the_connection_goes_on(site: Site, size: int) -> None:
    line = await site.line()
    connections = int((await site.ask("/connections")).body)
    for _ in range(2):
        await line.send(f"GET /pattern?{size} HTTP/1.1\r\nHost: {site.host}\r\n\r\n" * 2)
        for _ in range(2):
            answer = await line.answer()
            assert (answer.status, answer.whole, len(answer.body)) == (200, True, size)
            assert sha256(answer.body).hexdigest() == expected(size)
    await line.send(f"GET /page HTTP/1.1\r\nHost: {site.host}\r\n\r\n")
    assert (await line.answer()).body == b"<h1>hello</h1>"
    assert int((await site.ask("/connections")).body) <= connections + 1, "the connection to the app was not kept"


async def test_it_goes_by_the_kernel_where_it_can_and_as_usual_where_it_cannot() -> None:
    count = """
import os
real = os.splice
def splice(*arguments, **options):
    open("/proc/self/comm", "w").write("spliced")
    return real(*arguments, **options)
os.splice = splice
"""
    refuse = """
import os
def splice(*arguments, **options):
    raise OSError(22, "Invalid argument")
os.splice = splice
"""
    for first, name in ((count, "spliced"), (refuse, "python")):
        async with served(first) as site:
            assert sha256((await site.ask(f"/pattern?{SIZES[-1]}")).body).hexdigest() == expected(SIZES[-1])
            comm = f"/proc/{site.server.process.pid}/comm"
            with open(comm) as file:
                assert file.read().startswith(name)
            assert (await site.ask("/page")).status == 200


async def test_a_large_body_that_breaks_off_is_seen_to_break_off(site: Site) -> None:
    before = await descriptors(site)
    answer = await site.ask("/cut?40000000")
    assert (answer.status, answer.whole) == (200, False)
    assert len(answer.body) == 20 << 20
    assert answer.body == pattern(20 << 20)
    await settled(site, before)


async def test_who_leaves_a_large_body_or_stops_reading_it_leaves_nothing_behind(site: Site) -> None:
    await site.ask("/page")
    before = await descriptors(site)
    lines = [await site.line() for _ in range(20)]
    for number, line in enumerate(lines):
        await line.send(f"GET /zeros?{1 << 30} HTTP/1.1\r\nHost: {site.host}\r\n\r\n")
        await line.head()
        if number % 2:
            line.writer.transport.pause_reading()  # type: ignore[attr-defined]
        else:
            await line.reader.readexactly(3 << 20)
    await site.ask("/page")
    for line in lines:
        line.writer.transport.abort()
    await settled(site, before)
    assert (await site.ask("/page")).status == 200


async def test_a_body_that_nobody_reads_ends_with_its_sandbox_and_with_the_server() -> None:
    async with served() as site:
        before = await descriptors(site)
        line = await stalled(site)
        assert (await site.http.post(f"{site.box}/stop")).status_code == 200
        line.writer.transport.resume_reading()  # type: ignore[attr-defined]
        assert len(await line.over()) < 1 << 30
        line.close()
        await settled(site, before)
        await site.serve("127.0.0.1", 3000)
        await stalled(site)
        loop = asyncio.get_running_loop()
        began = loop.time()
        assert await asyncio.to_thread(site.server.stop) == 0
        assert loop.time() - began < 8  # it gives requests in progress ten seconds


async def stalled(site: Site) -> Line:
    """A large body that is under way to somebody who does not read it."""
    line = await site.line()
    await line.send(f"GET /zeros?{1 << 30} HTTP/1.1\r\nHost: {site.host}\r\n\r\n")
    await line.head()
    line.writer.transport.pause_reading()  # type: ignore[attr-defined]
    await still(site)
    return line


@asynccontextmanager
async def served(first: str = "") -> AsyncIterator[Site]:
    """A server of its own with the awkward one in a sandbox."""
    with tempfile.TemporaryDirectory(prefix="skerry-wire-") as home:
        Path(home).chmod(0o711)
        server = ServerProcess(Path(home), first=first)
        try:
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
                site = Site(server, http, "wire", 3000)
                await site.serve("127.0.0.1", 3000)
                await site.expose()
                yield site
                for line in site.lines:
                    line.close()
        finally:
            await asyncio.to_thread(server.stop)
