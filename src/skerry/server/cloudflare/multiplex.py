"""``/ws``: many requests over one WebSocket.

-> {"type": "request", "id", "method", "path", "body"?, "headers"?}      {"type": "cancel", "id"}
<- {"type": "response", "id", "status", "body"?, "done": true}
   {"type": "stream", "id", "data": "<json>"} … and then a response
   {"type": "error", "id"?, "code", "message", "status"}
"""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack, aclosing
from typing import Any, cast
from urllib.parse import parse_qsl, urlsplit

from starlette.websockets import WebSocket, WebSocketDisconnect

from skerry.errors import SkerryError
from skerry.server.cloudflare.box import Json, Stream, named
from skerry.server.cloudflare.calls import Calls
from skerry.server.cloudflare.faults import Fault, fault_of, invalid
from skerry.server.cloudflare.line import Line
from skerry.server.cloudflare.record import Record
from skerry.server.errors import as_skerry_error

AT_ONCE = 256
"""Requests in progress on one connection; what comes after waits, unread."""


class Multiplex:
    def __init__(self, calls: Calls, id: str, socket: WebSocket, record: Record) -> None:
        self._calls = calls
        self._record = record
        self._id = id
        self._socket = socket
        self._running: dict[str, asyncio.Task[None]] = {}
        self._room = asyncio.Semaphore(AT_ONCE)
        self._line = Line(socket)

    async def serve(self) -> None:
        await self._socket.accept()
        try:
            async for text in self._line.messages():
                await self._take(text)
        except WebSocketDisconnect:
            return
        finally:
            for task in self._running.values():
                task.cancel()
            await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def _take(self, text: str) -> None:
        try:
            asked = json.loads(text)
        except (ValueError, RecursionError):
            asked = None
        match asked:
            case {"type": "request", "id": str(number), "method": str(), "path": str()} if (
                number not in self._running and isinstance(asked.get("headers") or {}, dict)
            ):
                await self._room.acquire()
                task = asyncio.create_task(self._run(number, asked))
                self._running[number] = task
            case {"type": "cancel", "id": str(number)}:
                if number in self._running:
                    self._running[number].cancel()
            case _:
                await self._fail(None, invalid("The message is not one of this protocol."))

    async def _run(self, number: str, asked: Json) -> None:
        try:
            await self._answer(number, asked)
        except Fault as fault:
            await self._fail(number, fault)
        except SkerryError as error:
            await self._fail(number, fault_of(error))
        except WebSocketDisconnect:
            return
        except Exception as error:  # noqa: BLE001
            await self._fail(number, fault_of(as_skerry_error(error, during="multiplex")))
        finally:
            del self._running[number]
            self._room.release()

    async def _answer(self, number: str, asked: Json) -> None:
        place = urlsplit(asked["path"])
        headers = {str(name).lower(): value for name, value in dict(asked.get("headers") or {}).items()}
        body = named(asked.get("body") or {}, headers.get("x-session-id"))
        query = dict(parse_qsl(place.query))
        method = asked["method"].upper()
        async with AsyncExitStack() as stack:
            stack.enter_context(self._record.call(method, f"{method} {place.path}"))
            answer = await stack.enter_async_context(self._calls.call(self._id, method, place.path, body, query))
            if not isinstance(answer, Stream):
                await self._line.send({"type": "response", "id": number, "status": 200, "body": answer, "done": True})
                return
            async with aclosing(cast("Any", answer.events)) as events:
                async for event in events:
                    data = json.dumps(event, ensure_ascii=False, default=str)
                    await self._line.send({"type": "stream", "id": number, "event": event["type"], "data": data})
            await self._line.send({"type": "response", "id": number, "status": 200, "done": True})

    async def _fail(self, number: str | None, fault: Fault) -> None:
        """What a request met is its response, from which clients make the error they have for it; a message that is
        none of this protocol has no request to respond to."""
        facts: Json
        if number is not None:
            facts = {"type": "response", "id": number, "status": fault.status, "body": fault.to_wire(), "done": True}
        else:
            facts = {"type": "error", "code": fault.code, "message": fault.message, "status": fault.status}
            facts["context"] = fault.context
        await self._line.send(facts)
