"""A server that is killed in the middle of a prompt, and the one after it."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from skerry import AsyncClient
from skerry.agents.sessions.models import EventInfo
from tests import warm
from tests.agents.sessions.conftest import Desk

_SERVER = "from runpy import run_module; run_module('tests.agents.sessions.server', run_name='__main__')"


@pytest.fixture
def home() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="skerry-sessions-"))
    os.chmod(path, 0o711)
    yield path
    shutil.rmtree(path)


class Process:
    def __init__(self, home: Path, port: int) -> None:
        self.process = warm.Popen(_SERVER, str(home), str(port), stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        assert self.url.startswith("http")

    def end(self, kill: bool) -> None:
        if self.process.poll() is None:
            (self.process.kill if kill else self.process.terminate)()
        self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()


@asynccontextmanager
async def server(home: Path, *, kill: bool = False, port: int = 0) -> AsyncIterator[Desk]:
    process = Process(home, port)
    desk = Desk(None, None, process.url)  # type: ignore[arg-type]
    try:
        async with desk.http:
            yield desk
    finally:
        process.end(kill)


async def ask(url: str, session: str, content: str) -> list[EventInfo]:
    async with AsyncClient(url) as client, client.coding_session(session).ask(content) as news:
        return [each.event async for each in news if each.event is not None]


async def test_a_killed_server_loses_no_event_and_the_next_one_goes_on(home: Path) -> None:
    async with server(home, kill=True) as desk:
        id = await desk.session()
        first = await desk.prompt(id, "write /workspace/notes remember me")
        await desk.done(id, first)
        port = httpx.URL(desk.url).port or 0
        asking = asyncio.create_task(ask(desk.url, id, "tool one; say working; hang"))
        interrupted = (await desk.event(id, "token"))["messageId"]
        waiting = await desk.prompt(id, "say patience")
        before = await desk.events(id)
    async with server(home, port=port) as desk:
        failed = await desk.done(id, interrupted)
        assert failed["status"] == "failed"
        assert "server ended" in failed["error"]
        assert (await desk.done(id, waiting))["status"] == "completed"
        events = await desk.events(id)
        assert events[: len(before)] == before
        ended = [e["data"] for e in events if e["messageId"] == interrupted and e["type"] == "execution_complete"]
        assert [each["success"] for each in ended] == [False]
        ids = [event["id"] for event in events]
        assert len(ids) == len(set(ids))
        # Who watched was not told less, nor anything twice.
        told = [each for each in await asking if each.message_id == interrupted]
        kept = [each["id"] for each in events if each["messageId"] == interrupted]
        assert [each.id for each in told] == kept[: len(told)]
        assert told[-1].type == "execution_complete"
        sandbox = (await desk.info(id))["sandboxId"]
        read = await desk.http.get(f"/v1/sandboxes/{sandbox}/files/content", params={"path": "/workspace/notes"})
        assert "remember me" in read.text


async def test_a_server_that_stops_puts_its_sessions_away(home: Path) -> None:
    async with server(home) as desk:
        id = await desk.session()
        await desk.done(id, await desk.prompt(id, "write /workspace/notes remember me"))
    async with server(home) as desk:
        info = await desk.info(id)
        assert info["sandboxStatus"] == "stopped"
        assert info["snapshot"] is not None
        assert (await desk.done(id, await desk.prompt(id, "say again")))["status"] == "completed"
        sandbox = (await desk.info(id))["sandboxId"]
        read = await desk.http.get(f"/v1/sandboxes/{sandbox}/files/content", params={"path": "/workspace/notes"})
        assert "remember me" in read.text
