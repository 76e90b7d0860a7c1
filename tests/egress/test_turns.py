"""A sandbox that moves all it can keeps nobody waiting."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator

import h11
import pytest

from skerry.egress.turns import Turns
from tests.egress.conftest import HERE, Make
from tests.providers.users import needs_root

POUR = """
import socket, sys, threading
listener = socket.create_server((sys.argv[1], 0))
print(listener.getsockname()[1], flush=True)
BLOCK = b"x" * 65536
def pour(connection):
    try:
        asked = connection.recv(65536)
        crumbs = b"/crumbs" in asked
        length = b"Content-Length: 99999999999" if b"/long" in asked else b"Transfer-Encoding: chunked"
        connection.sendall(b"HTTP/1.1 200 OK\\r\\n" + length + b"\\r\\n\\r\\n")
        block = BLOCK if b"Content" in length else b"10000\\r\\n" + BLOCK + b"\\r\\n"
        block = b"1\\r\\nx\\r\\n" * 9999 if crumbs else block
        while True:
            connection.sendall(block)
    except OSError:
        pass
while True:
    threading.Thread(target=pour, args=(listener.accept()[0],), daemon=True).start()
"""


@pytest.fixture(scope="module")
def torrent(world: object) -> Iterator[int]:
    """A server that sends faster than anybody can read."""
    with subprocess.Popen([sys.executable, "-I", "-c", POUR, HERE], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())
        process.kill()


@needs_root
@pytest.mark.parametrize("path", ["/long", "/chunked"])
@pytest.mark.parametrize("way", ["", "--proxytunnel"])
async def test_between_two_large_pieces_everybody_else_has_a_turn(
    make: Make, torrent: int, path: str, way: str
) -> None:
    box = await make("open", [f"{HERE}:{torrent}"])
    url = f"http://{HERE}:{torrent}{path}"
    await box.sh(f"for n in 1 2 3; do (curl -sS -m 30 {way} {url} -o /dev/null &) ; done")
    owner = box.registry._owners[box.id]
    assert owner.door is not None
    usage, most = owner.door.usage, 0
    async with asyncio.timeout(20):
        while usage.bytes_in < 1 << 20:
            await asyncio.sleep(0.05)
        enough = usage.bytes_in + (16 << 20)  # not so many turns: in many of them there is nothing to be moved
        while usage.bytes_in < enough:
            before = usage.bytes_in
            await asyncio.sleep(0)
            most = max(most, usage.bytes_in - before)
    assert most <= 3 << 20


@needs_root
async def test_a_body_in_crumbs_is_moved_in_turns_too(
    make: Make, torrent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    events, real = [0], h11.Connection.next_event

    def counted(connection: h11.Connection) -> object:
        events[0] += 1
        return real(connection)

    monkeypatch.setattr(h11.Connection, "next_event", counted)
    box = await make("open", [f"{HERE}:{torrent}"])
    await box.sh(f"(curl -sS -m 30 http://{HERE}:{torrent}/crumbs -o /dev/null &)")
    most = 0
    async with asyncio.timeout(20):
        while events[0] < 1000:
            await asyncio.sleep(0.05)
        enough = events[0] + 10_000
        while events[0] < enough:
            before = events[0]
            await asyncio.sleep(0)
            most = max(most, events[0] - before)
    assert most < 1000


async def test_one_sandbox_after_the_other_has_its_turn() -> None:
    turns, taken = Turns(), []

    async def take(sandbox: str) -> None:
        await turns.take(sandbox)
        taken.append(sandbox)

    greedy = [asyncio.create_task(take("greedy")) for _ in range(10)]
    await asyncio.sleep(0)
    modest = asyncio.create_task(take("modest"))
    gone = asyncio.create_task(take("gone"))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.gather(modest, gone, *greedy, return_exceptions=True)
    assert taken.index("modest") <= 3
    assert taken.count("greedy") == 10
    await asyncio.wait_for(turns.take("late"), 5)
