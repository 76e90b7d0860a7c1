"""Somebody who receives webhooks: a plain HTTP server on sockets, which checks signatures by its own reckoning."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Behave = Callable[["Received"], "int | str | bytes | None"]


@dataclass
class Received:
    headers: dict[str, str]
    body: bytes
    json: dict[str, Any] = field(default_factory=dict)

    @property
    def event(self) -> str:
        return str(self.json["event"])

    @property
    def sandbox(self) -> str | None:
        found = self.json["data"].get("sandboxId")
        return None if found is None else str(found)

    def signed_with(self, secret: str) -> bool:
        """HMAC-SHA256 as RFC 2104 writes it out."""
        key = secret.encode()
        key = (hashlib.sha256(key).digest() if len(key) > 64 else key).ljust(64, b"\0")
        message = self.headers["x-skerry-timestamp"].encode() + b"." + self.body
        inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in key) + message).digest()
        outer = hashlib.sha256(bytes(byte ^ 0x5C for byte in key) + inner).hexdigest()
        return f"v1={outer}" in self.headers["x-skerry-signature"].split(",")


class Receiver:
    """Answers as ``behave`` says: with a status, with raw bytes, or (None) never."""

    def __init__(self, behave: Behave = lambda _: 200) -> None:
        self.behave = behave
        self.received: list[Received] = []
        self.connections = self.most = 0
        self._arrived = asyncio.Condition()
        self._server: asyncio.Server
        self._tasks: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Receiver:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def port(self) -> int:
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"

    @property
    def events(self) -> list[str]:
        return [each.event for each in self.received]

    async def wait_for(self, wanted: Callable[[Receiver], bool], seconds: float = 20) -> None:
        async with asyncio.timeout(seconds), self._arrived:
            await self._arrived.wait_for(lambda: wanted(self))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self.connections += 1
        self.most = max(self.most, self.connections)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:-2])}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            got = Received(headers, body, json.loads(body) if body else {})
            async with self._arrived:
                self.received.append(got)
                self._arrived.notify_all()
            answer = self.behave(got)
            if answer is None:
                await reader.read()  # until the other side has had enough
            elif isinstance(answer, bytes):
                writer.write(answer)
                await writer.drain()
            else:
                writer.write(f"HTTP/1.1 {answer} X\r\ncontent-length: 2\r\n\r\nok".encode())
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.connections -= 1
            writer.close()
