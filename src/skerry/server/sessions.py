"""Coding sessions: their routes, and the WebSockets of those who watch and of the sandboxes that work."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response, WebSocket

from skerry.agents.sessions.models import (
    AddParticipant,
    AnswerPermission,
    ArtifactList,
    AskWsToken,
    CreatePullRequest,
    CreateSession,
    EventList,
    MessageList,
    ParticipantInfo,
    ParticipantList,
    PromptQueued,
    PullRequest,
    Repository,
    RepositoryList,
    RepoWord,
    SandboxError,
    SendPrompt,
    SessionInfo,
    SessionList,
    SessionStatus,
    WsToken,
)
from skerry.agents.sessions.sessions import Sessions
from skerry.models import Done
from skerry.server import session_sockets
from skerry.server.answers import answer
from skerry.server.nouns import noun_router
from skerry.server.paths import LARGEST

Limit = Annotated[int, Query(ge=1, le=100)]
Cursor = Annotated[int, Query(ge=0, le=LARGEST)]


def routes(sessions: Sessions) -> APIRouter:
    router = noun_router("", "sessions")

    @router.post("/sessions", status_code=201, response_model=SessionInfo)
    async def create_agent_session(body: CreateSession | None = None) -> Response:
        return answer(await sessions.create(body or CreateSession()), 201)

    @router.get("/sessions", response_model=SessionList)
    async def list_agent_sessions(
        status: SessionStatus | None = None, cursor: str | None = None, limit: Limit = 50
    ) -> Response:
        return answer(await sessions.list_(status, cursor, limit))

    @router.get("/sessions/{session}", response_model=SessionInfo)
    async def get_agent_session(session: str) -> Response:
        return answer(await sessions.info((await sessions.mine(session)).row))

    @router.delete("/sessions/{session}", response_model=Done)
    async def delete_agent_session(session: str) -> Response:
        await sessions.delete(session)
        return answer(Done())

    @router.post("/sessions/{session}/prompt", status_code=202, response_model=PromptQueued)
    async def prompt_session(session: str, body: SendPrompt) -> Response:
        return answer(await sessions.prompt(await sessions.mine(session), body), 202)

    @router.post("/sessions/{session}/stop", response_model=Done)
    async def stop_session(session: str) -> Response:
        await (await sessions.mine(session)).stop()
        return answer(Done())

    @router.post("/sessions/{session}/permissions/{permission}", response_model=Done)
    async def answer_session_permission(session: str, permission: str, body: AnswerPermission) -> Response:
        await sessions.answer(await sessions.mine(session), permission, body.reply)
        return answer(Done())

    @router.get("/sessions/{session}/events", response_model=EventList)
    async def list_session_events(
        session: str,
        cursor: Cursor = 0,
        limit: Limit = 50,
        type: str | None = None,
        message_id: Annotated[str | None, Query(alias="messageId")] = None,
    ) -> Response:
        return answer(await sessions.events(session, cursor, limit, type, message_id))

    @router.get("/sessions/{session}/messages", response_model=MessageList)
    async def list_session_messages(session: str, cursor: Cursor = 0, limit: Limit = 50) -> Response:
        return answer(await sessions.messages(session, cursor, limit))

    @router.get("/sessions/{session}/artifacts", response_model=ArtifactList)
    async def list_session_artifacts(session: str) -> Response:
        return answer(await sessions.artifacts(session))

    @router.get("/sessions/{session}/participants", response_model=ParticipantList)
    async def list_session_participants(session: str) -> Response:
        return answer(await sessions.participants(session))

    @router.post("/sessions/{session}/participants", status_code=201, response_model=ParticipantInfo)
    async def add_session_participant(session: str, body: AddParticipant) -> Response:
        return answer(await sessions.join(session, body), 201)

    @router.post("/sessions/{session}/ws-token", status_code=201, response_model=WsToken)
    async def make_session_ws_token(session: str, body: AskWsToken | None = None) -> Response:
        return answer(await sessions.ws_token(session, None if body is None else body.user), 201)

    @router.post("/sessions/{session}/pr", status_code=201, response_model=PullRequest)
    async def create_session_pull_request(session: str, body: CreatePullRequest) -> Response:
        return answer(await sessions.pull_request(await sessions.mine(session), body), 201)

    @router.post("/sessions/{session}/archive", response_model=SessionInfo)
    async def archive_session(session: str) -> Response:
        return answer(await sessions.archive(session))

    @router.post("/sessions/{session}/unarchive", response_model=SessionInfo)
    async def unarchive_session(session: str) -> Response:
        return answer(await sessions.unarchive(session))

    _add_routes_of_sandboxes(router, sessions)

    @router.get("/repos", response_model=RepositoryList)
    async def list_repositories() -> Response:
        return answer(await sessions.repositories())

    @router.get("/repos/{owner}/{name}/metadata", response_model=Repository)
    async def get_repository(owner: RepoWord, name: RepoWord) -> Response:
        return answer(await sessions.repository(owner, name))

    return router


def inside_routes(sessions: Sessions) -> APIRouter:
    """All that a sandbox can reach of the server over its loopback, each with the sandbox's own token."""
    router = noun_router("", "sessions")

    _add_routes_of_sandboxes(router, sessions)
    return router


def _add_routes_of_sandboxes(router: APIRouter, sessions: Sessions) -> None:
    """What a sandbox asks for wherever it is, on this machine or not."""

    @router.websocket("/sessions/{session}/ws")
    async def session_socket(socket: WebSocket, session: str) -> None:
        await session_sockets.serve(sessions, socket, session)

    @router.post("/sandbox/{sandbox}/error", response_model=Done)
    async def report_session_sandbox_error(request: Request, sandbox: str, body: SandboxError) -> Response:
        _, token = session_sockets.credentials(request)
        await (await sessions.of_sandbox(sandbox, token)).failed(body.error)
        return answer(Done())

    @router.post("/sandbox/{sandbox}/pr", status_code=201, response_model=PullRequest)
    async def create_agents_pull_request(request: Request, sandbox: str, body: CreatePullRequest) -> Response:
        _, token = session_sockets.credentials(request)
        found = await sessions.of_sandbox(sandbox, token)
        return answer(await found.aside(sessions.pull_request(found, body)), 201)
