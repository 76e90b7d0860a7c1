"""Terminals over WebSockets: bytes in binary frames, everything else as JSON in text frames; and the page for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response, WebSocket
from pydantic import Field, TypeAdapter, ValidationError
from starlette.websockets import WebSocketDisconnect, WebSocketState

from skerry.control.registry import Registry
from skerry.errors import SkerryError, TerminalNotFoundError
from skerry.models import Done, TerminalList, TerminalTicket, shown_id
from skerry.models import Request as Message
from skerry.runtime.viewer import Screen, Size, Viewer
from skerry.server import page
from skerry.server.answers import answer
from skerry.server.auth import chosen_protocol
from skerry.server.errors import as_skerry_error
from skerry.server.nouns import noun_router
from skerry.server.paths import SandboxId
from skerry.server.tickets import LIFETIME, RESUME, Tickets

if TYPE_CHECKING:
    from skerry.runtime.terminal import Terminal

GOING_AWAY = 1001
ANOTHER = "new"
KNOWN = 'Text frames are {"type": "resize", "cols", "rows"} and {"type": "close"}; input goes in binary frames.'


class Resize(Message):
    type: Literal["resize"]
    cols: int = Field(ge=1, le=1000)
    rows: int = Field(ge=1, le=1000)


class Close(Message):
    type: Literal["close"]


Control: TypeAdapter[Resize | Close] = TypeAdapter(Annotated[Resize | Close, Field(discriminator="type")])
Side = Annotated[int | None, Query(ge=1, le=1000)]
HTML: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/html": {}}, "description": "A page with the terminal in it, complete in itself."},
    501: {"content": {"text/html": {}}, "description": "Skerry was installed without what the page is made of."},
}


async def _outward(socket: WebSocket, viewer: Viewer) -> None:
    while True:
        shown = await viewer.next()
        if isinstance(shown, bytes):
            await socket.send_bytes(shown)
        elif isinstance(shown, Screen):
            if shown.behind:
                await socket.send_json({"type": "scrollback", "reason": "behind"})
            if shown.data:
                await socket.send_bytes(shown.data)
        elif isinstance(shown, Size):
            await socket.send_json({"type": "resize", "cols": shown.cols, "rows": shown.rows})
        elif shown.error is not None:
            raise shown.error
        else:
            return await socket.send_json({"type": "exit", "code": shown.code})


async def _inward(socket: WebSocket, terminal: Terminal, viewer: Viewer, rouse: Callable[[], None]) -> None:
    while True:
        message = await socket.receive()
        if message["type"] == "websocket.disconnect":
            return
        if (data := message.get("bytes")) is not None:
            rouse()
            await terminal.write(data, viewer)
            continue
        try:
            control = Control.validate_json(message["text"])
        except ValidationError:
            await socket.send_json({"type": "error", "code": "invalid_request", "message": KNOWN})
            continue
        if isinstance(control, Resize):
            terminal.resize(control.cols, control.rows)
        else:
            await terminal.close()


async def bridge(socket: WebSocket, terminal: Terminal, viewer: Viewer, rouse: Callable[[], None]) -> None:
    """Carry bytes both ways until the shell ends, the client leaves, or the server closes."""
    closing: asyncio.Event = socket.app.state.closing
    outward = asyncio.ensure_future(_outward(socket, viewer))
    inward = asyncio.ensure_future(_inward(socket, terminal, viewer, rouse))
    ending = asyncio.ensure_future(closing.wait())
    tasks: list[asyncio.Future[Any]] = [outward, inward, ending]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if outward.done():
            outward.result()
        elif inward.done():
            inward.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _described(terminal: Terminal) -> dict[str, Any]:
    return terminal.info().model_dump(include={"session", "shell", "cols", "rows", "viewers"})


async def _find(registry: Registry, id: str, terminal: str) -> Terminal:
    """A terminal that is there already: looking for it makes nothing, and wakes only a sandbox that is frozen."""
    if registry.look(id) is None:
        await registry.get(id)
        raise TerminalNotFoundError(
            f"There is no terminal {terminal!r}: sandbox {id!r} is not running.",
            hint="Open one without naming a terminal; that wakes the sandbox.",
        )
    async with registry.use(id) as runtime:
        return runtime.terminals.find(terminal)


def routes(registry: Registry) -> APIRouter:
    router = noun_router("/v1/sandboxes/{id}", "terminals")

    @router.websocket("/terminal")
    async def terminal(
        socket: WebSocket,
        id: SandboxId,
        session: str | None = None,
        terminal: str | None = None,
        cols: Side = None,
        rows: Side = None,
        shell: str | None = None,
        cwd: str | None = None,
    ) -> None:
        tickets: Tickets = socket.scope["tickets"]
        again: str | None = None
        await socket.accept(subprotocol=chosen_protocol(socket.scope))
        code = 1000
        try:
            if terminal and terminal != ANOTHER:
                opened = await _find(registry, id, terminal)
            else:
                how: dict[str, Any] = {"cols": cols or 80, "rows": rows or 24, "shell": shell, "cwd": cwd}
                async with registry.use(id) as runtime:
                    opening = runtime.terminals.open if terminal else runtime.terminals.of_session
                    opened = await opening(session or "default", **how)
            # Not held while it is looked at: a terminal counts as use of the sandbox only while bytes flow.
            about = opened.info()
            opened.resize(cols or about.cols, rows or about.rows)
            viewer = opened.attach()
            try:
                ready = {"type": "ready", "terminal": opened.id, **_described(opened)}
                if socket.scope["by_ticket"]:
                    again = ready["ticket"] = tickets.issue(id, float("inf"))
                await socket.send_json(ready)
                await bridge(socket, opened, viewer, lambda: registry.rouse(id))
            finally:
                opened.detach(viewer)
                if again is not None:
                    tickets.expire(again, RESUME)
        except WebSocketDisconnect:
            return
        except Exception as error:  # noqa: BLE001
            known: SkerryError = as_skerry_error(error, during="terminal")
            code = 4000 + known.status
            if socket.application_state is WebSocketState.CONNECTED:
                with suppress(WebSocketDisconnect):
                    await socket.send_json(
                        {"type": "error", "code": known.code, "message": known.message, "hint": known.hint}
                    )
        if WebSocketState.DISCONNECTED not in (socket.client_state, socket.application_state):
            with suppress(WebSocketDisconnect):  # it may leave at any moment
                await socket.close(GOING_AWAY if socket.app.state.closing.is_set() else code)

    @router.get("/terminal", response_class=Response, responses=HTML)
    async def terminal_page(
        request: Request,
        id: SandboxId,
        session: str | None = None,
        terminal: str | None = None,
        shell: str | None = None,
        cwd: str | None = None,
        ticket: Annotated[str | None, Query(description="Instead of a key; good once.")] = None,
    ) -> Response:
        # The page's script reads the query itself, and the guard has taken the ticket out of it.
        tickets: Tickets = request.scope["tickets"]
        return page.terminal(shown_id(id), tickets.issue(id))

    @router.post("/terminal/ticket", status_code=201, response_model=TerminalTicket)
    async def terminal_ticket(request: Request, id: SandboxId) -> Response:
        tickets: Tickets = request.scope["tickets"]
        return answer(TerminalTicket(ticket=tickets.issue(id), expires_in=LIFETIME), 201)

    @router.get("/terminals", response_model=TerminalList)
    async def list_terminals(id: SandboxId) -> Response:
        await registry.get(id)
        runtime = registry.look(id)
        return answer(TerminalList(terminals=[] if runtime is None else runtime.terminals.list()))

    @router.delete("/terminals/{tid}", response_model=Done)
    async def close_terminal(id: SandboxId, tid: str) -> Response:
        await (await _find(registry, id, tid)).close()
        return answer(Done(sandbox_id=id))

    return router
