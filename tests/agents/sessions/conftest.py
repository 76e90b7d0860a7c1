from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
import websockets

from skerry.agents.sessions.life import Times
from skerry.agents.sessions.programs import AGENT_PORT, AgentCommand
from skerry.agents.sessions.session import Session
from skerry.agents.sessions.sessions import Sessions
from skerry.control.open import open_registry
from skerry.control.registry import Registry
from skerry.control.session_rows import SessionRow
from skerry.models import ExecRequest
from skerry.server.app import create_app
from skerry.settings import Settings

SLOW = "an agent that is slow to start"
SCRIPTED = """
from skerry.agents.sessions import programs
from tests.agents.sessions.conftest import scripted
programs.opencode = scripted
"""
"""For a server in a process of its own, before it starts: its sessions have the agent with a script."""
SCRIPT = Path(__file__).with_name("scripted.py").read_text()


def scripted(row: SessionRow, tools: Mapping[str, Any]) -> AgentCommand:
    """The agent with a script, instead of one with a model."""
    slow = ("after-the-bridge",) if row.title == SLOW else ()
    return AgentCommand(("/run/skerry/bin/python3", "-c", SCRIPT, str(AGENT_PORT), *slow))


class Desk:
    """A server with sessions, in this process, and what a person does with it."""

    def __init__(self, registry: Registry, sessions: Sessions, url: str) -> None:
        self.registry = registry
        self.sessions = sessions
        self.url = url
        self.ahead = 0.0
        """Seconds by which the sessions' clock is ahead."""
        self.http = httpx.AsyncClient(base_url=url, timeout=60)

    async def session(self, **fields: Any) -> str:
        answer = await self.http.post("/sessions", json=fields)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    async def prompt(self, id: str, content: str) -> str:
        answer = await self.http.post(f"/sessions/{id}/prompt", json={"content": content})
        assert answer.status_code == 202, answer.text
        return str(answer.json()["messageId"])

    async def info(self, id: str) -> dict[str, Any]:
        return (await self.http.get(f"/sessions/{id}")).json()  # type: ignore[no-any-return]

    async def events(self, id: str, **query: Any) -> list[dict[str, Any]]:
        """All of them, page by page."""
        found: list[dict[str, Any]] = []
        cursor = "0"
        while True:
            answer = await self.http.get(f"/sessions/{id}/events", params={"cursor": cursor, "limit": 100, **query})
            page = answer.json()
            found += page["events"]
            cursor = page["cursor"] or cursor
            if not page["hasMore"]:
                return found

    async def messages(self, id: str) -> dict[str, dict[str, Any]]:
        found = (await self.http.get(f"/sessions/{id}/messages", params={"limit": 100})).json()
        return {each["id"]: each for each in found["messages"]}

    async def until(self, what: Callable[[], Awaitable[Any]], seconds: float = 60) -> Any:
        async with asyncio.timeout(seconds):
            while not (found := await what()):
                await asyncio.sleep(0.05)
            return found

    async def done(self, id: str, message: str, seconds: float = 60) -> dict[str, Any]:
        async def finished() -> Any:
            found = (await self.messages(id))[message]
            return found if found["status"] in ("completed", "failed") else None

        return await self.until(finished, seconds)  # type: ignore[no-any-return]

    async def status(self, id: str, *wanted: str, seconds: float = 60) -> dict[str, Any]:
        async def reached() -> Any:
            found = await self.info(id)
            return found if found["sandboxStatus"] in wanted else None

        return await self.until(reached, seconds)  # type: ignore[no-any-return]

    async def event(self, id: str, type: str, **query: Any) -> dict[str, Any]:
        async def there() -> Any:
            return next(iter(await self.events(id, type=type, **query)), None)

        return await self.until(there)  # type: ignore[no-any-return]

    async def ask(self, id: str, content: str) -> dict[str, Any]:
        return await self.done(id, await self.prompt(id, content))

    def live(self, id: str) -> Session:
        return self.sessions._live[id]

    async def inside(self, id: str, command: str) -> str:
        sandbox = self.live(id).row.sandbox_id
        assert sandbox is not None
        async with self.registry.use(sandbox) as runtime:
            done = await runtime.exec(ExecRequest(command=command))
        return done.stdout

    async def kill(self, id: str, what: str) -> None:
        """End a program of the sandbox, as the kernel does when memory is short."""
        found = await self.inside(id, f"pgrep -f '{what}' | grep -v $$; true")
        pids = found.split()
        assert pids, f"no {what} runs"
        await self.inside(id, f"kill -9 {pids[0]}")

    def cut(self) -> None:
        """Every connection of every sandbox breaks."""
        for transport in list(self.sessions.spawner.inward.connections):  # type: ignore[union-attr]
            transport.abort()

    @staticmethod
    def access(text: str) -> dict[str, str]:
        return json.loads(text)  # type: ignore[no-any-return]

    @asynccontextmanager
    async def watch(self, id: str, **subscribe: Any) -> AsyncIterator[Watcher]:
        token = (await self.http.post(f"/sessions/{id}/ws-token")).json()["token"]
        async with websockets.connect(f"{self.url.replace('http', 'ws')}/sessions/{id}/ws") as socket:
            watcher = Watcher(socket)
            hello = {"type": "subscribe", "token": token, "clientId": "test", **subscribe}
            await watcher.say(**hello)
            yield watcher


async def put_away_and_brought_back(desk: Desk) -> str:
    """What is left of a file that was written before, whatever the provider."""
    id = await desk.session()
    assert (await desk.ask(id, "write /workspace/notes remember me; say done"))["status"] == "completed"
    first = await desk.status(id, "ready")
    await desk.http.post(f"/sessions/{id}/archive")
    await desk.status(id, "stopped")
    await desk.http.post(f"/sessions/{id}/unarchive")
    assert (await desk.ask(id, "tool once; say more"))["status"] == "completed"
    kinds = [event["type"] for event in await desk.events(id)]
    assert (kinds.count("execution_complete"), kinds.count("tool_call")) == (2, 4)
    again = await desk.status(id, "ready")
    assert again["sandboxId"] != first["sandboxId"]
    place = f"/v1/sandboxes/{again['sandboxId']}/files/content"
    read = await desk.http.get(place, params={"path": "/workspace/notes"})
    await desk.http.delete(f"/sessions/{id}")
    return read.text


class Watcher:
    def __init__(self, socket: Any) -> None:
        self.socket = socket
        self.seen: list[dict[str, Any]] = []

    async def say(self, **message: Any) -> None:
        await self.socket.send(json.dumps(message))

    async def next(self, *types: str, seconds: float = 60) -> dict[str, Any]:
        """The next of one of these types; the others are kept in ``seen``."""
        async with asyncio.timeout(seconds):
            while True:
                message = json.loads(await self.socket.recv())
                self.seen.append(message)
                if message["type"] in types:
                    return message  # type: ignore[no-any-return]


@asynccontextmanager
async def desk_of(home: Path, times: Times | None = None, **how: Any) -> AsyncIterator[Desk]:
    listener = socket.create_server((how.pop("host", "127.0.0.1"), how.pop("port", 0)))
    certificate: Path | None = how.pop("certificate", None)
    url = "{}://{}:{}".format("https" if certificate else "http", *listener.getsockname())
    wanted = how.pop("settings", {})
    if how.pop("public", False):
        wanted = {**wanted, "public_url": url}
    settings = Settings(home=home, pool_size=1 << 28, **wanted)
    registry = await open_registry(settings)
    try:
        desk: Desk

        def clock() -> float:
            return time.time() + desk.ahead

        sessions = Sessions(registry, settings, times=times, agent=how.pop("agent", scripted), clock=clock, **how)
        app = create_app(registry, settings, registry.audit, work=sessions)
        served = {"lifespan": "off", "log_config": None, "ws": "websockets-sansio", "ssl_certfile": certificate}
        server = uvicorn.Server(uvicorn.Config(app, **served))
        desk = Desk(registry, sessions, url)
        await sessions.open()
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        try:
            async with asyncio.timeout(20):
                while not server.started:
                    await asyncio.sleep(0.01)
            async with desk.http:
                yield desk
        finally:
            app.state.closing.set()
            server.should_exit = True
            await serving
            await sessions.close()
    finally:
        await registry.close()


@pytest.fixture(scope="module")
async def desk() -> AsyncIterator[Desk]:
    home = Path(tempfile.mkdtemp(prefix="skerry-sessions-"))
    os.chmod(home, 0o711)
    async with desk_of(home) as desk:
        yield desk
    shutil.rmtree(home)
