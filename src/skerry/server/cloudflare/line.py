"""A WebSocket on which both sides send JSON, one message after the other."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect


class Line:
    def __init__(self, socket: WebSocket) -> None:
        self._socket = socket
        self.turn = asyncio.Lock()
        """Held by whoever writes: what is counted by both sides is written in the order in which it is counted."""

    async def messages(self) -> AsyncIterator[str]:
        """What comes in, until the other side has left."""
        with suppress(WebSocketDisconnect):
            while (message := await self._socket.receive())["type"] != "websocket.disconnect":
                yield message.get("text") or (message.get("bytes") or b"").decode(errors="replace")

    async def send(self, message: Any) -> None:
        async with self.turn:
            await self.write(message)

    async def write(self, message: Any) -> None:
        with suppress(RuntimeError):  # it is closed; whoever reads will notice
            await self._socket.send_text(json.dumps(message, ensure_ascii=True, separators=(",", ":"), default=str))

    async def close(self) -> None:
        with suppress(WebSocketDisconnect, RuntimeError):
            await self._socket.close()
