"""A terminal over a WebSocket: bytes in binary frames, everything else as JSON in text frames."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Query, WebSocket
from pydantic import Field, ValidationError
from starlette.websockets import WebSocketDisconnect, WebSocketState

from skerry.control.registry import Registry
from skerry.errors import SkerryError
from skerry.models import Request
from skerry.server.errors import as_skerry_error
from skerry.server.nouns import noun_router
from skerry.server.paths import SandboxId

if TYPE_CHECKING:
    from skerry.runtime.terminal import Terminal

GOING_AWAY = 1001


class Resize(Request):
    type: Literal["resize"]
    cols: int = Field(ge=1, le=1000)
    rows: int = Field(ge=1, le=1000)


Side = Annotated[int, Query(ge=1, le=1000)]


async def _outward(socket: WebSocket, terminal: Terminal) -> None:
    while data := await terminal.read():
        await socket.send_bytes(data)
    await socket.send_json({"type": "exit", "code": await terminal.wait()})


async def _inward(socket: WebSocket, terminal: Terminal) -> None:
    while True:
        message = await socket.receive()
        if message["type"] == "websocket.disconnect":
            return
        if (data := message.get("bytes")) is not None:
            await terminal.write(data)
            continue
        try:
            resize = Resize.model_validate_json(message["text"])
            terminal.resize(resize.cols, resize.rows)
        except ValidationError:
            known = 'Text frames are {"type": "resize", "cols", "rows"}; input goes in binary frames.'
            await socket.send_json({"type": "error", "message": known})


async def _bridge(socket: WebSocket, terminal: Terminal) -> None:
    """Carry bytes both ways until the shell ends, the client leaves, or the server closes."""
    closing: asyncio.Event = socket.app.state.closing
    outward = asyncio.ensure_future(_outward(socket, terminal))
    inward = asyncio.ensure_future(_inward(socket, terminal))
    ending = asyncio.ensure_future(closing.wait())
    tasks: list[asyncio.Future[Any]] = [outward, inward, ending]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for side in (outward, inward):
            if side.done():
                side.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await terminal.close()


def routes(registry: Registry) -> APIRouter:
    router = noun_router("/v1/sandboxes/{id}", "terminal")

    @router.websocket("/terminal")
    async def terminal(
        socket: WebSocket,
        id: SandboxId,
        cols: Side = 80,
        rows: Side = 24,
        shell: str | None = None,
        cwd: str | None = None,
    ) -> None:
        await socket.accept()
        code = 1000
        try:
            async with registry.use(id) as runtime:
                opened = await runtime.terminal(cols=cols, rows=rows, shell=shell, cwd=cwd)
                await socket.send_json({"type": "ready"})
                await _bridge(socket, opened)
        except WebSocketDisconnect:
            return
        except Exception as error:  # noqa: BLE001
            known: SkerryError = as_skerry_error(error, during="terminal")
            code = 4000 + known.status
            await socket.send_json({"type": "error", "message": str(known), "code": known.code})
        if socket.client_state is WebSocketState.CONNECTED:
            await socket.close(GOING_AWAY if socket.app.state.closing.is_set() else code)

    return router
