"""One request to an ASGI app, with every message in the test's hands."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.types import ASGIApp, Message


class Exchange:
    """Feed it request messages, look at what was sent, leave whenever you like."""

    def __init__(self, app: ASGIApp, method: str, target: str, headers: dict[str, str] | None = None) -> None:
        path, _, query = target.partition("?")
        given = {"host": "localhost"} | {name.lower(): value for name, value in (headers or {}).items()}
        raw = [(name.encode(), value.encode()) for name, value in given.items()]
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": raw,
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
            "state": {},
        }
        self._app = app
        self._inbox: asyncio.Queue[Message] = asyncio.Queue()
        self._changed = asyncio.Condition()
        self._open = asyncio.Event()
        self._open.set()
        self.sent: list[Message] = []
        self.task: asyncio.Task[None] | None = None

    def start(self) -> Exchange:
        self.task = asyncio.ensure_future(self._app(self._scope, self._inbox.get, self._send))
        return self

    async def _send(self, message: Message) -> None:
        await self._open.wait()
        async with self._changed:
            self.sent.append(message)
            self._changed.notify_all()

    def body(self, data: bytes = b"", *, more: bool = False) -> Exchange:
        self._inbox.put_nowait({"type": "http.request", "body": data, "more_body": more})
        return self

    def leave(self) -> None:
        self._inbox.put_nowait({"type": "http.disconnect"})

    def stop_reading(self) -> None:
        self._open.clear()

    def read_on(self) -> None:
        self._open.set()

    async def until(self, marker: bytes) -> bytes:
        """Everything received once ``marker`` is in it."""
        async with self._changed:
            await self._changed.wait_for(lambda: marker in self.content)
        return self.content

    async def started(self) -> int:
        async with self._changed:
            await self._changed.wait_for(lambda: bool(self.sent))
        return self.status

    async def end(self) -> Exchange:
        assert self.task is not None
        await self.task
        return self

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode().lower(): value.decode() for name, value in self.sent[0]["headers"]}

    @property
    def content(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    @property
    def complete(self) -> bool:
        return bool(self.sent) and not self.sent[-1].get("more_body", False)

    @property
    def error(self) -> dict[str, Any]:
        answer = json.loads(self.content)
        assert answer["ok"] is False
        assert set(answer["error"]) - {"requestId"} == {"code", "message", "hint", "details"}
        return dict(answer["error"])
