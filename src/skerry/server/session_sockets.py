"""The WebSocket of a session: one side for those who watch, with a token of their own; one for its sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any
from urllib.parse import parse_qsl, urlencode

import structlog
from fastapi import WebSocket
from pydantic import TypeAdapter, ValidationError
from starlette.requests import HTTPConnection
from starlette.websockets import WebSocketDisconnect, WebSocketState

from skerry.agents.sessions.hub import Client
from skerry.agents.sessions.models import (
    ClientAnswer,
    ClientPrompt,
    ClientStop,
    Ping,
    Presence,
    Said,
    SendPrompt,
    Subscribe,
    Typing,
)
from skerry.agents.sessions.session import Session
from skerry.agents.sessions.sessions import Sessions
from skerry.control.inquiry import inquiry
from skerry.errors import SkerryError
from skerry.models import now
from skerry.server.errors import as_skerry_error, error_response

log = structlog.get_logger(__name__)

INVALID_TOKEN = 4001
TOO_LATE = 4008
GOING_AWAY = 1001
TRY_AGAIN = 1013
WARM_EVERY = 5.0
SEND_PATIENCE = 30.0

_said: TypeAdapter[Any] = TypeAdapter(Said)
_ON_RECORD: dict[type, str] = {
    ClientPrompt: "prompt_session",
    ClientStop: "stop_session",
    ClientAnswer: "answer_session_permission",
}


def credentials(connection: HTTPConnection) -> tuple[str, str]:
    """The sandbox that asks and its token: from headers, or, for those who cannot set any, from the query, out of
    which they are taken so that nobody logs them."""
    scope = connection.scope
    query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True, errors="surrogateescape")
    given = dict(query)
    rest = [(name, value) for name, value in query if name not in ("token", "sandboxId")]
    scope["query_string"] = urlencode(rest, errors="surrogateescape").encode()
    scheme, _, token = connection.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        token = given.get("token", "")
    return connection.headers.get("x-sandbox-id") or given.get("sandboxId", ""), token


async def serve(sessions: Sessions, socket: WebSocket, id: str) -> None:
    if socket.query_params.get("type") == "sandbox":
        return await _sandbox(sessions, socket, id)
    credentials(socket)
    await _client(sessions, socket, id)


# -- sandboxes ---------------------------------------------------------------------------------------------------------


class _Line:
    def __init__(self, socket: WebSocket) -> None:
        self._socket = socket
        self._sending = asyncio.Lock()

    async def send(self, message: dict[str, Any]) -> None:
        """Raises ConnectionResetError if it cannot be said, or is not taken."""
        try:
            async with asyncio.timeout(SEND_PATIENCE), self._sending:
                if self._socket.application_state is not WebSocketState.CONNECTED:
                    raise ConnectionResetError
                await self._socket.send_text(json.dumps(message))
        except (WebSocketDisconnect, RuntimeError, OSError, TimeoutError):
            raise ConnectionResetError from None

    async def close(self, code: int) -> None:
        async with self._sending:
            if self._socket.application_state is WebSocketState.CONNECTED:
                with contextlib.suppress(RuntimeError, WebSocketDisconnect):
                    await self._socket.close(code)


async def _sandbox(sessions: Sessions, socket: WebSocket, id: str) -> None:
    sandbox, token = credentials(socket)
    try:
        session = await sessions.let_in(id, sandbox, token)
    except SkerryError as error:
        # With its status: a bridge tells by it whether to come again.
        return await socket.send_denial_response(error_response(error))
    await socket.accept()
    await session.aside(_converse(session, socket, sandbox))


async def _converse(session: Session, socket: WebSocket, sandbox: str) -> None:
    line = _Line(socket)
    await session.attach(line, sandbox)
    try:
        while True:
            try:
                message = json.loads(await _text(socket))
            except (ValueError, RecursionError):
                continue  # nothing that a bridge says
            if isinstance(message, dict):
                await session.hear(line, message)
    except (WebSocketDisconnect, RuntimeError, ConnectionError):
        pass  # it left, or we closed it
    except SkerryError as error:
        # Not acknowledged, so it will be said again.
        log.warning("session_event_refused", session=session.id, code=error.code, message=error.message)
        await line.close(TRY_AGAIN)
    finally:
        session.detach(line)


# -- those who watch ---------------------------------------------------------------------------------------------------


async def _client(sessions: Sessions, socket: WebSocket, id: str) -> None:
    await socket.accept()
    try:
        code = await _subscribed(sessions, socket, id)
    except (WebSocketDisconnect, ConnectionError, RuntimeError):
        return
    except Exception as error:  # noqa: BLE001
        code = 4000 + as_skerry_error(error, during="session").status
    if socket.application_state is WebSocketState.CONNECTED:
        with contextlib.suppress(RuntimeError, WebSocketDisconnect):
            await socket.close(code)


async def _subscribed(sessions: Sessions, socket: WebSocket, id: str) -> int:
    """The code to close with."""
    try:
        async with asyncio.timeout(sessions.times.subscribe):
            first = _understood(await _text(socket))
    except TimeoutError:
        return TOO_LATE
    if not isinstance(first, Subscribe):
        return INVALID_TOKEN
    try:
        session = await sessions.find(id)
    except SkerryError:
        return INVALID_TOKEN  # whether there is such a session is for those to know who have a token
    participant = await sessions.by_ws_token(session, first.token)
    if participant is None:
        return INVALID_TOKEN
    client = Client(participant, first.client_id)
    session.hub.join(client)  # before the history is read: what happens meanwhile waits
    try:
        replay = await sessions.replay(session)
        hello = {"sessionId": id, "participantId": participant.id, "clientId": client.id}
        await socket.send_json({"type": "subscribed", **hello, **replay})
        session.hub.announce(client)
        seen = int(replay["history"]["cursor"] or 0)
        return await _watch(sessions, session, socket, client, seen)
    finally:
        session.hub.leave(client)


async def _watch(sessions: Sessions, session: Session, socket: WebSocket, client: Client, seen: int) -> int:
    closing: asyncio.Event = socket.app.state.closing
    outward = asyncio.ensure_future(_outward(socket, client, seen))
    inward = asyncio.ensure_future(_inward(sessions, session, socket, client))
    ending = asyncio.ensure_future(closing.wait())
    behind = asyncio.ensure_future(client.behind.wait())
    tasks: list[asyncio.Future[Any]] = [outward, inward, ending, behind]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for each in (inward, outward):
            if each.done():
                each.result()
        return GOING_AWAY if ending.done() else TRY_AGAIN if behind.done() else 1000
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _outward(socket: WebSocket, client: Client, seen: int) -> None:
    while True:
        message, text = await client.next()
        if message["type"] == "sandbox_event" and message["event"]["number"] <= seen:
            continue  # it is in the history already
        await socket.send_text(text)


async def _inward(sessions: Sessions, session: Session, socket: WebSocket, client: Client) -> None:
    warmed = 0.0
    while True:
        said = _understood(await _text(socket))
        code: str | None = None
        try:
            if isinstance(said, ClientPrompt):
                wanted = SendPrompt(
                    content=said.content, model=said.model, attachments=said.attachments, source="websocket"
                )
                await sessions.prompt(session, wanted, client.participant.user)
            elif isinstance(said, ClientStop):
                await session.stop()
            elif isinstance(said, ClientAnswer):
                await sessions.answer(session, said.permission_id, said.reply, client.participant.user)
            elif isinstance(said, Typing):
                if asyncio.get_running_loop().time() - warmed >= WARM_EVERY:
                    warmed = asyncio.get_running_loop().time()
                    session.warm()
            elif isinstance(said, Presence):
                session.hub.present(client, said.status, said.cursor)
            elif isinstance(said, Ping):
                client.say({"type": "pong", "timestamp": now().isoformat()})
            else:
                message = f"That is not understood: {said}"
                client.say({"type": "error", "code": "invalid_request", "message": message})
        except SkerryError as error:
            code = error.code
            client.say({"type": "error", "code": error.code, "message": error.message})
        operation = _ON_RECORD.get(type(said))
        if operation is not None:
            _put_on_record(sessions, session, client, operation, code)


def _put_on_record(sessions: Sessions, session: Session, client: Client, operation: str, code: str | None) -> None:
    """As the request that would have asked for the same."""
    asked = inquiry.get()
    sessions.audit.note(
        {
            "actor": "session client",
            "key": None,
            "owner": session.row.owner,
            "user": client.participant.user,
            "client": "" if asked is None else asked.client,
            "agent": "" if asked is None else asked.agent,
            "request_id": "" if asked is None else asked.request_id,
            "operation": operation,
            "method": "WEBSOCKET",
            "sandbox_id": session.row.sandbox_id,
            "outcome": "ok" if code is None else "failed",
            "status": None,
            "code": code,
            "took": None,
            "command": None,
            "details": {"session": session.id},
        }
    )


async def _text(socket: WebSocket) -> str:
    message = await socket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message.get("code", 1000))
    return message.get("text") or ""


def _understood(text: str) -> Any:
    """What it is, or why it is nothing."""
    try:
        return _said.validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"][1:]))
        return f"{place}: {first['msg']}." if place else f"{first['msg']}."
