"""Small ASGI applications that show what a transport does."""

from __future__ import annotations

import asyncio
from typing import Any


class Echo:
    """POST echoes the body piece by piece as it comes; GET /endless streams until the client leaves."""

    def __init__(self) -> None:
        self.sent = 0
        self.left = asyncio.Event()
        self.seen: list[bytes] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket":
            return await self._socket(receive, send)
        if scope["path"] == "/broken":
            raise RuntimeError("it broke")
        if scope["path"] == "/refuse":
            await send({"type": "http.response.start", "status": 413, "headers": []})
            return await send({"type": "http.response.body", "body": b"no"})
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-path", scope["raw_path"])]})
        if scope["path"] == "/endless":
            return await self._endless(receive, send)
        while True:
            message = await receive()
            self.seen.append(message["body"])
            await send({"type": "http.response.body", "body": message["body"], "more_body": message["more_body"]})
            if not message["more_body"]:
                return

    async def _endless(self, receive: Any, send: Any) -> None:
        async def notice() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self.left.set()

        watcher = asyncio.ensure_future(notice())
        while not self.left.is_set():
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            self.sent += 65536
            await asyncio.sleep(0)
        await watcher

    async def _socket(self, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] == "websocket.receive":
            if message.get("text") == "bye":
                return await send({"type": "websocket.close", "code": 1000})
            await send({"type": "websocket.send", **{k: v for k, v in message.items() if k in ("text", "bytes")}})
        self.left.set()
