"""Everything at once, in no order: visitors who leave, sockets that drop, terminals and ports that come and go."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from tests.server.conftest import ServerProcess
from tests.server.preview.conftest import TOKEN, Site

SECONDS = 60 if os.environ.get("SKERRY_SOAK") else 6
AT_ONCE = 24
SEED = int(os.environ.get("SKERRY_SEED", "1"))
SLACK = 24 * 1024
"""Kilobytes that a server may grow by for other reasons."""
# What is asked of the server by a signal, because no route tells it.
COUNT = """
import asyncio, os, signal
signal.signal(signal.SIGUSR1, lambda *_: open(os.environ["TASKS"], "w").write(str(len(asyncio.all_tasks()))))
"""

Deed = Callable[["Storm"], Awaitable[None]]


class Storm:
    def __init__(self, sites: list[Site], chance: random.Random) -> None:
        self.sites, self.chance = sites, chance
        self.done: Counter[str] = Counter()

    @property
    def site(self) -> Site:
        return self.chance.choice(self.sites)

    async def rage(self, deeds: list[Deed], seconds: float) -> None:
        until = asyncio.get_running_loop().time() + seconds

        async def one() -> None:
            while asyncio.get_running_loop().time() < until:
                deed = self.chance.choice(deeds)
                async with asyncio.timeout(40):
                    await deed(self)
                self.done[deed.__name__] += 1

        await asyncio.gather(*(one() for _ in range(AT_ONCE)))


async def a_visitor(storm: Storm) -> None:
    site, size = storm.site, storm.chance.choice([0, 1, 70_000, 3_000_000])
    plain = [("/page", 200, 14), ("/nothing", 404, 22), ("/redirect", 302, 0), (f"/zeros?{size}", 200, size)]
    odd = [
        ("/chunked", 200, 13),
        ("/until-close", 200, 19),
        ("/204", 204, 0),
        ("/interim", 200, 5),
        ("/silence", 502, -1),
    ]
    path, status, length = storm.chance.choice(plain + odd)
    answer = await site.ask(path)
    assert (answer.status, answer.whole) == (status, True), path
    assert length < 0 or len(answer.body) == length, path


async def an_uploader(storm: Storm) -> None:
    body = bytes(storm.chance.choice([1, 5_000, 2_000_000]))
    answer = await storm.site.ask("/echo", method=storm.chance.choice(["POST", "PUT"]), body=body)
    assert answer.json()["size"] == len(body)


async def one_who_leaves(storm: Storm) -> None:
    site = storm.site
    line = await site.line()
    path = storm.chance.choice(["/zeros?1000000000", "/zeros-chunked?1000000000", "/page", "/events", "/hang"])
    await line.send(f"GET {path} HTTP/1.1\r\nHost: {site.host}\r\n\r\n"[: storm.chance.choice([20, 500])])
    await asyncio.sleep(storm.chance.random() * 0.05)
    with suppress(TimeoutError):
        async with asyncio.timeout(storm.chance.random() * 0.2):
            await line.reader.read(storm.chance.choice([1, 100_000]))
    line.writer.transport.abort()
    site.lines.remove(line)


async def an_uploader_who_leaves(storm: Storm) -> None:
    site = storm.site
    line = await site.line()
    await line.send(f"POST /echo HTTP/1.1\r\nHost: {site.host}\r\nContent-Length: 1000000\r\n\r\n" + "x" * 1000)
    await asyncio.sleep(storm.chance.random() * 0.05)
    line.writer.transport.abort()
    site.lines.remove(line)


async def a_websocket(storm: Storm) -> None:
    site = storm.site
    address = f"ws://{site.host}/ws"
    socket = await connect(address, host="127.0.0.1", port=site.server_port, max_size=None)
    for size in (1, 200, storm.chance.choice([10, 300_000])):
        await socket.send(bytes(size))
        assert await socket.recv() == bytes(size)
    match storm.chance.randrange(4):
        case 0:
            socket.transport.abort()
        case 1:
            await socket.send("drop")
            with pytest.raises(ConnectionClosed):
                await socket.recv()
        case 2:
            await socket.send("close 4001")
            with pytest.raises(ConnectionClosed) as closed:
                await socket.recv()
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 4001
        case _:
            await socket.close()


async def a_terminal(storm: Storm) -> None:
    """Opened, seen by several who come and go, and ended; a shared one perhaps by somebody else."""
    site, shared = storm.site, storm.chance.random() < 0.5
    base = f"ws://127.0.0.1:{site.server_port}{site.box}/terminal"
    async with connect(base + ("" if shared else "?terminal=new")) as first:
        ready = json.loads(await first.recv())
        if ready["type"] == "error":
            assert ready["code"] == "conflict", ready  # so many there are already
            return
        mark = token_hex(4)
        try:
            await first.send(f"echo {mark[:3]}''{mark[3:]}\n".encode())
            async with connect(f"{base}?terminal={ready['terminal']}&cols={storm.chance.randrange(20, 200)}") as second:
                assert json.loads(await second.recv())["type"] in ("ready", "error")
                if storm.chance.random() < 0.5:
                    second.transport.abort()
            seen = b""
            while mark.encode() not in seen:
                frame = await first.recv()
                seen += frame if isinstance(frame, bytes) else b""
            match storm.chance.randrange(3):
                case 0:
                    await first.send(b"exit\n")
                case 1:
                    await first.send(json.dumps({"type": "close"}))
                case _:
                    await site.http.delete(f"{site.box}/terminals/{ready['terminal']}")
        except ConnectionClosed:
            assert shared, "a terminal ended that nobody closed"


async def an_exposure(storm: Storm) -> None:
    """Another port that leads to nobody, and whose address is gone with it."""
    site, port, token = storm.site, storm.chance.randrange(20_000, 60_000), token_hex(4)
    await site.expose(port, token)
    host = f"{port}-{site.id}-{token}.localhost:{site.server_port}"
    assert (await site.ask("/", host=host)).status == 502
    with pytest.raises(InvalidStatus):
        await connect(f"ws://{host}/", host="127.0.0.1", port=site.server_port)
    assert (await site.http.delete(f"{site.box}/ports/{port}")).status_code == 200
    assert (await site.ask("/", host=host)).status == 404


async def a_program(storm: Storm) -> None:
    site, size = storm.site, storm.chance.choice([10, 2_000_000])
    async with site.http.stream("GET", f"{site.box}/ports/{site.port}/proxy/zeros?{size}") as answer:
        if storm.chance.random() < 0.5:
            assert len(await answer.aread()) == size


async def raw_tcp(storm: Storm) -> None:
    site = storm.site
    base = f"ws://127.0.0.1:{site.server_port}{site.box}/ports/{site.port}/tcp"
    async with connect(base) as socket:
        assert json.loads(await socket.recv())["type"] == "ready"
        await socket.send(b"GET /page HTTP/1.1\r\n\r\n")
        assert b"hello" in await socket.recv()
        if storm.chance.random() < 0.5:
            socket.transport.abort()


@pytest.fixture
async def sites(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[Site]]:
    with tempfile.TemporaryDirectory(prefix="skerry-storm-") as place:
        home = Path(place)
        home.chmod(0o711)
        monkeypatch.setenv("TASKS", str(home / "tasks"))
        with (home / "log").open("w") as log:
            server = ServerProcess(home, log=log, first=COUNT)
        try:
            limits = httpx.Limits(max_keepalive_connections=1)
            async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as http:
                found = [Site(server, http, name, 3000) for name in ("north", "south")]
                for site in found:
                    await site.serve("127.0.0.1", 3000)
                    await site.expose()
                yield found
        finally:
            assert await asyncio.to_thread(server.stop) == 0


class Traces:
    """What a server holds."""

    def __init__(self, server: ServerProcess) -> None:
        pid = server.process.pid
        found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
        assert found
        self.memory = int(found[1])
        self.descriptors = len(os.listdir(f"/proc/{pid}/fd"))
        tasks = server.home / "tasks"
        tasks.write_text("")
        os.kill(pid, signal.SIGUSR1)
        while not (said := tasks.read_text()):
            pass
        self.tasks = int(said)

    def __repr__(self) -> str:
        return f"{self.tasks} tasks, {self.descriptors} descriptors, {self.memory} KB"


async def processes(sites: list[Site]) -> list[list[str]]:
    """What runs in each sandbox, but for what asks."""
    found = [(await site.run("exec ps -e -o args=")).splitlines() for site in sites]
    return [sorted(line for line in lines if not line.startswith(("ps -e", "bash -c IFS="))) for lines in found]


@pytest.mark.timeout(240)
async def test_everything_at_once_ends_well_and_leaves_nothing(sites: list[Site]) -> None:
    server = sites[0].server
    deeds: list[Deed] = [a_visitor, an_uploader, one_who_leaves, an_uploader_who_leaves, a_websocket, a_terminal]
    deeds += [an_exposure, a_program, raw_tcp]
    storm = Storm(sites, random.Random(SEED))
    await storm.rage(deeds, SECONDS / 3)  # how much memory so many at once take is known only now
    await calm(sites)
    before, running = Traces(server), await processes(sites)
    await storm.rage(deeds, SECONDS)
    assert set(storm.done) == {deed.__name__ for deed in deeds}, storm.done
    await calm(sites)
    async with asyncio.timeout(40):
        while (left := Traces(server)).descriptors > before.descriptors + 2 or left.tasks > before.tasks + 2:
            await asyncio.sleep(0.2)
    assert await processes(sites) == running
    assert left.memory - before.memory < SLACK, (before, left)
    log = (server.home / "log").read_text()
    for trouble in ("unexpected_error", "Traceback", "never retrieved", "destroyed but"):
        assert trouble not in log, log[-4000:]


async def calm(sites: list[Site]) -> None:
    """End what was left open on purpose, and let idle connections go."""
    for site in sites:
        for line in site.lines:
            line.close()
        site.lines.clear()
        for terminal in (await site.http.get(f"{site.box}/terminals")).json()["terminals"]:
            await site.http.delete(f"{site.box}/terminals/{terminal['id']}")
        assert (await site.ask("/page")).body == b"<h1>hello</h1>"
        assert (await site.http.get(f"{site.box}/ports")).json()["ports"][0]["token"] == TOKEN
