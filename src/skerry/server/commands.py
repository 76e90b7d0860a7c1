"""Commands and the sessions they run in."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Request, Response

from skerry.control.inquiry import asked_to_run
from skerry.control.registry import Registry
from skerry.errors import MissingCommandError
from skerry.models import (
    CreateSession,
    Done,
    ExecAnswer,
    ExecEvent,
    ExecOutcome,
    ExecRequest,
    ExecResult,
    SessionInfo,
    SessionList,
    StartProcess,
    shown_id,
)
from skerry.server.answers import answer
from skerry.server.disconnect import until_disconnect
from skerry.server.nouns import noun_router
from skerry.server.paths import SandboxId
from skerry.server.sse import EventStream, documented

Prefer = Annotated[str | None, Header(description="`return=minimal` leaves out ok, sandboxId and result.")]


def require_command(body: ExecRequest | StartProcess) -> None:
    if not body.command.strip():
        raise MissingCommandError("The request has no command.", hint="Send it as `command`.")
    asked_to_run(body.command if body.args is None else " ".join([body.command, *body.args]))


def _with_outcome(result: ExecResult, id: str) -> str:
    """An ExecAnswer, put together from JSON: this is the busiest route, and the output may be large."""
    whole = result.model_dump_json(by_alias=True)
    outcome = result.model_dump_json(by_alias=True, include=set(ExecOutcome.model_fields))
    return f'{whole[:-1]},"ok":true,"sandboxId":"{shown_id(id)}","result":{outcome}}}'


def routes(registry: Registry) -> APIRouter:
    router = noun_router("/v1/sandboxes/{id}", "commands")

    @router.post("/exec", response_model=ExecAnswer)
    async def execute(id: SandboxId, body: ExecRequest, request: Request, prefer: Prefer = None) -> Response:
        require_command(body)
        async with registry.use(id) as runtime:
            result = await until_disconnect(request.receive, runtime.exec(body))
        minimal = prefer is not None and "return=minimal" in prefer.replace(" ", "").lower()
        if minimal:
            return answer(result)
        return Response(_with_outcome(result, id), media_type="application/json")

    @router.post("/exec/stream", responses=documented(ExecEvent), response_class=Response)
    async def execute_stream(id: SandboxId, body: ExecRequest) -> Response:
        require_command(body)
        return EventStream(
            registry.use(id),
            lambda runtime: runtime.exec_stream(body),
            lambda error: ExecEvent(type="error", error=str(error)),
        )

    @router.post("/sessions", status_code=201, response_model=SessionInfo)
    async def create_session(id: SandboxId, body: CreateSession | None = None) -> Response:
        wanted = body or CreateSession()
        async with registry.use(id) as runtime:
            known = {session.id for session in runtime.sessions.list()}
            made = await runtime.sessions.create(wanted)
            if made.id not in known:
                registry.history.record(id, "session_created", f"Session {made.id!r} was made.")
            return answer(made, 200 if wanted.id in known else 201)

    @router.get("/sessions", response_model=SessionList)
    async def list_sessions(id: SandboxId) -> Response:
        async with registry.use(id) as runtime:
            return answer(SessionList(sessions=runtime.sessions.list()))

    @router.get("/sessions/{sid}", response_model=SessionInfo)
    async def get_session(id: SandboxId, sid: str) -> Response:
        async with registry.use(id) as runtime:
            return answer(runtime.sessions.get(sid))

    @router.delete("/sessions/{sid}", response_model=Done)
    async def delete_session(id: SandboxId, sid: str) -> Response:
        async with registry.use(id) as runtime:
            await runtime.sessions.delete(sid)
        return answer(Done(sandbox_id=id))

    return router
