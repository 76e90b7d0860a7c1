from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.server.conftest import ServerProcess

ORIGIN = Path(__file__).with_name("origin.py").read_text()
TOKEN = "tok_1"


@dataclass(frozen=True)
class Answer:
    """A response as it came over the wire."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes
    whole: bool
    """Whether it ended as it said it would."""

    def all(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key.lower() == name]

    def get(self, name: str) -> str | None:
        return next(iter(self.all(name)), None)

    def json(self) -> Any:
        return json.loads(self.body)


class Line:
    """A plain connection to the server, for what clients are too polite to say."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes | str) -> None:
        self.writer.write(data.encode("latin-1") if isinstance(data, str) else data)
        await self.writer.drain()

    async def head(self) -> tuple[int, list[tuple[str, str]]]:
        raw = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        line, *fields = raw.split("\r\n")[:-2]
        pairs = [field.partition(": ") for field in fields]
        return int(line.split()[1]), [(name, value) for name, _, value in pairs]

    async def answer(self, *, bodiless: bool = False) -> Answer:
        async with asyncio.timeout(20):
            status, headers = await self.head()
            known = {name.lower(): value for name, value in headers}
            body, whole = b"", True
            try:
                if bodiless or status in (204, 304):
                    pass
                elif "chunked" in known.get("transfer-encoding", ""):
                    while size := int(await self.reader.readuntil(b"\r\n"), 16):
                        body += (await self.reader.readexactly(size + 2))[:-2]
                    await self.reader.readexactly(2)
                else:
                    body = await self.reader.readexactly(int(known["content-length"]))
            except asyncio.IncompleteReadError as error:
                body, whole = body + error.partial, False
            return Answer(status, headers, body, whole)

    async def over(self) -> bytes:
        """What comes until the server closes the connection."""
        async with asyncio.timeout(20):
            try:
                return await self.reader.read()
            except ConnectionResetError:
                return b""

    def close(self) -> None:
        self.writer.close()


class Site:
    """The awkward server in a sandbox, and its preview."""

    def __init__(self, server: ServerProcess, http: httpx.AsyncClient, id: str, port: int) -> None:
        parts = urlsplit(server.url)
        assert parts.hostname
        assert parts.port
        self.server, self.http, self.id, self.port = server, http, id, port
        self.server_port = parts.port
        self.host = f"{port}-{id}-{TOKEN}.localhost:{parts.port}"
        self.box = f"/v1/sandboxes/{id}"
        self.lines: list[Line] = []

    async def line(self) -> Line:
        line = Line(*await asyncio.open_connection("127.0.0.1", self.server_port, limit=1 << 22))
        self.lines.append(line)
        return line

    async def ask(self, target: str, *fields: str, method: str = "GET", body: bytes = b"", host: str = "") -> Answer:
        line = await self.line()
        length = [f"Content-Length: {len(body)}"] if body else []
        head = [f"{method} {target} HTTP/1.1", f"Host: {host or self.host}", *fields, *length, "", ""]
        await line.send("\r\n".join(head).encode("latin-1") + body)
        found = await line.answer(bodiless=method == "HEAD")
        line.close()
        return found

    async def expose(self, port: int | None = None, token: str = TOKEN, **fields: Any) -> Any:
        wanted = {"port": port or self.port, "token": token, **fields}
        made = await self.http.post(f"{self.box}/ports", json=wanted)
        assert made.status_code == 201, made.text
        return made.json()

    async def run(self, command: str) -> str:
        done = await self.http.post(f"{self.box}/exec", json={"command": command, "session": None, "timeout": 60_000})
        assert done.status_code == 200, done.text
        return str(done.json()["stdout"])

    async def serve(self, host: str, port: int) -> None:
        """Start another of it."""
        await self.http.put(f"{self.box}/files", params={"path": "/tmp/origin.py"}, content=ORIGIN)
        command = f"exec /usr/bin/python3 -I /tmp/origin.py {host} {port}"
        started = await self.http.post(f"{self.box}/processes", json={"command": command})
        assert started.status_code == 201, started.text
        ready = await self.http.post(f"{self.box}/ports/{port}/wait", json={"timeout": 20_000})
        assert ready.status_code == 200, ready.text


@pytest.fixture(scope="session")
async def awkward(server: ServerProcess, http: httpx.AsyncClient) -> AsyncIterator[Site]:
    site = Site(server, http, f"site-{token_hex(3)}", 3000)
    await site.serve("127.0.0.1", 3000)
    await site.expose()
    yield site
    await http.delete(site.box)


@pytest.fixture
async def site(awkward: Site) -> AsyncIterator[Site]:
    yield awkward
    for line in awkward.lines:
        line.close()
    awkward.lines.clear()
