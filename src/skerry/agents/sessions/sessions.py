"""All sessions of a server: made, found, listed, and driven while they have something to do."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import structlog

from skerry.agents.availability import provider_for
from skerry.agents.config import prepare, server_variables
from skerry.agents.known import CLAUDE_CODE, OPENCODE
from skerry.agents.sessions import life, tokens
from skerry.agents.sessions.behalf import on_behalf_of
from skerry.agents.sessions.forge import Forge, GitHub
from skerry.agents.sessions.journal import Bounds
from skerry.agents.sessions.life import Times
from skerry.agents.sessions.models import (
    AddParticipant,
    ArtifactInfo,
    ArtifactList,
    CreatePullRequest,
    CreateSession,
    EventInfo,
    EventList,
    MessageInfo,
    MessageList,
    ParticipantInfo,
    ParticipantList,
    PermissionReply,
    PromptQueued,
    PullRequest,
    Repository,
    RepositoryList,
    SandboxStatus,
    SendPrompt,
    SessionInfo,
    SessionList,
    SessionStatus,
    WsToken,
)
from skerry.agents.sessions.programs import AgentOf, command, directory_of
from skerry.agents.sessions.session import Session
from skerry.agents.sessions.spawner import Spawner
from skerry.control.actor import SANDBOX, actor, caller
from skerry.control.audit import Audit
from skerry.control.inquiry import inquiry
from skerry.control.registry import Registry
from skerry.control.session_rows import ArtifactRow, EventRow, MessageRow, ParticipantRow, SessionRow, SessionRows
from skerry.errors import (
    InvalidRequestError,
    SessionArchivedError,
    SessionNotFoundError,
    SessionSandboxGoneError,
    UnauthorizedError,
)
from skerry.models import now
from skerry.redaction import keep
from skerry.settings import Settings

log = structlog.get_logger(__name__)

PULSE = 1.0
TOKEN_LIFE = timedelta(hours=24)
HISTORY = 500
HISTORY_CHARACTERS = 4 * 2**20
"""Of events, and of prompts: it is one message, which whoever subscribes has to take whole."""
LARGEST_CONFIG = 110 * 2**10
FORGOTTEN = 60.0
"""Seconds after which a session that nobody asked for leaves the memory; it stays in the store."""


class Sessions:
    def __init__(
        self,
        registry: Registry,
        settings: Settings,
        *,
        times: Times | None = None,
        clock: Callable[[], float] = time.time,
        forge: Forge | None = None,
        agent: AgentOf | None = None,
    ) -> None:
        self.times = times or Times(inactivity=settings.session_inactivity)
        self.forge: Forge = forge or GitHub(settings)
        self.spawner = Spawner(registry, settings, self.forge, agent or command)
        self._registry = registry
        self._settings = settings
        self._clock = clock
        self._bounds = Bounds(settings.session_events, settings.session_event_bytes)
        self._live: dict[str, Session] = {}
        self._pulse: asyncio.Task[None] | None = None

    @property
    def rows(self) -> SessionRows:
        return self._registry.sessions

    @property
    def audit(self) -> Audit:
        return self._registry.audit

    async def open(self) -> None:
        for owner in await self.rows.owners(self._registry.node):
            await asyncio.get_running_loop().create_task(self.spawner.warm.sweep(), context=on_behalf_of(owner))
        unsettled = {status.value for status in life.COMING | life.THERE}
        for row in await self.rows.unsettled(self._registry.node, unsettled):
            await self._adopt(row).settle()
        self._pulse = asyncio.get_running_loop().create_task(self._beat())

    async def close(self) -> None:
        if self._pulse is not None:
            self._pulse.cancel()
            await asyncio.gather(self._pulse, return_exceptions=True)
        await asyncio.gather(*(session.close() for session in self._live.values()))
        await self.spawner.warm.close()
        await self.forge.close()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(PULSE)
            self.spawner.warm.expire()
            for session in list(self._live.values()):
                try:
                    session.pulse()
                except Exception as error:  # noqa: BLE001 - the others are to be looked at all the same
                    log.error("session_pulse_failed", session=session.id, error=type(error).__qualname__)
                if session.at_rest and time.monotonic() - session.used_at > FORGOTTEN:
                    del self._live[session.id]

    # -- finding -------------------------------------------------------------------------------------------------------

    def _adopt(self, row: SessionRow) -> Session:
        session = self._live.get(row.id)
        if session is None:
            session = Session(row, self.rows, self._registry, self.spawner, self.times, self._clock, self._bounds)
            self._live[row.id] = session
        return session

    async def find(self, id: str) -> Session:
        """Whosever it is."""
        session = self._live.get(id)
        if session is None:
            row = await self.rows.get(id)
            if row is None:
                raise SessionNotFoundError(f"There is no session {id[:80]!r}.")
            if row.node != self._registry.node:
                raise await self._registry.elsewhere(f"Session {id!r}", row.node)
            session = self._adopt(row)
        session.used_at = time.monotonic()
        return session

    async def mine(self, id: str) -> Session:
        """Of whoever asks."""
        session = await self.find(id)
        if session.row.owner != caller.get().owner:
            raise SessionNotFoundError(f"There is no session {id[:80]!r}.")
        return session

    async def let_in(self, id: str, sandbox: str, token: str) -> Session:
        """The session whose sandbox asks, if it is that sandbox and the session has not done with it."""
        session = await self.find(id)
        if not tokens.matches(token, session.row.sandbox_token):
            raise UnauthorizedError("That is not the token of the session's sandbox.")
        actor.set(SANDBOX)
        if (asked := inquiry.get()) is not None:
            asked.owner, asked.sandbox = session.row.owner, sandbox
        return _still_wanted(session, sandbox)

    # -- making and showing --------------------------------------------------------------------------------------------

    async def create(self, request: CreateSession) -> SessionInfo:
        who = caller.get()
        if (request.repo_owner is None) != (request.repo_name is None):
            raise InvalidRequestError("A repository has an owner and a name.", hint="Send repoOwner and repoName.")
        id = f"sess-{int(self._clock() * 1000):012x}{secrets.token_hex(4)}"
        if request.github_token is not None:
            keep(request.github_token.get_secret_value())
        config = request.config if request.model is None else request.config.model_copy(update={"model": request.model})
        has = server_variables(self._settings, self._registry.reception.closed)
        prepared = prepare(request.agent, config, directory=directory_of(request.repo_name), has=has)
        _check_size(prepared.setup.env)
        settings = request.model_dump(mode="json", by_alias=True, exclude_none=True, include={"env", "image", "egress"})
        settings |= {
            "agent": request.agent,
            "setup": {
                "env": dict(prepared.setup.env),
                "files": {path: content.decode() for path, content in prepared.setup.files.items()},
                "toolboxes": list(prepared.toolboxes),
                "asks": prepared.setup.asks,
            },
            "limits": request.limits.model_dump(mode="json", by_alias=True, exclude_unset=True),
            "gitUserName": request.git_user_name,
            "gitUserEmail": request.git_user_email,
            "provider": provider_for(self._registry, request.provider),
        }
        row = SessionRow(
            id=id,
            node=self._registry.node,
            owner=who.owner,
            title=request.title,
            repo_owner=request.repo_owner,
            repo_name=request.repo_name,
            branch=request.branch,
            model=config.model,
            settings=settings,
            sealed=self.spawner.seal(id, {**prepared.secrets, **request.secrets}, request.github_token),
        )
        self.spawner.check(row)
        creator = ParticipantRow(id=_id("part"), session_id=id, user=who.name, role="owner")
        await self.rows.insert(row, creator)
        return await self.info(row)

    async def info(self, row: SessionRow) -> SessionInfo:
        live = self._live.get(row.id)
        row = row if live is None else live.row
        return SessionInfo(
            id=row.id,
            title=row.title,
            repo_owner=row.repo_owner,
            repo_name=row.repo_name,
            branch=row.branch,
            agent=row.settings.get("agent", OPENCODE.name),
            model=row.model,
            provider=self.spawner.provider(row),
            status=SessionStatus(row.status),
            sandbox_id=row.sandbox_id,
            sandbox_status=SandboxStatus(row.sandbox_status),
            snapshot=row.snapshot,
            error=row.error,
            processing=await self.rows.processing(row.id) is not None,
            queued=await self.rows.waiting(row.id),
            created_at=row.created_at,
            updated_at=row.updated_at,
        )

    async def list_(self, status: SessionStatus | None, cursor: str | None, limit: int) -> SessionList:
        rows = await self.rows.list(caller.get().owner, None if status is None else status.value, cursor, limit + 1)
        more = len(rows) > limit
        shown = [await self.info(row) for row in rows[:limit]]
        return SessionList(sessions=shown, cursor=shown[-1].id if more else None, has_more=more)

    async def delete(self, id: str) -> None:
        session = await self.mine(id)
        await session.remove()
        self._live.pop(id, None)
        await self.rows.delete(id)

    async def archive(self, id: str) -> SessionInfo:
        session = await self.mine(id)
        await session.set_status(SessionStatus.ARCHIVED)
        session.put_away("The session was archived.")
        return await self.info(session.row)

    async def unarchive(self, id: str) -> SessionInfo:
        session = await self.mine(id)
        if session.row.status == SessionStatus.ARCHIVED:
            await session.set_status(SessionStatus.ACTIVE)
            session.kick()
        return await self.info(session.row)

    # -- prompts -------------------------------------------------------------------------------------------------------

    async def prompt(self, session: Session, request: SendPrompt, author: str | None = None) -> PromptQueued:
        if session.row.status == SessionStatus.ARCHIVED:
            raise SessionArchivedError("The session is archived.", hint="Unarchive it first.")
        if session.row.settings.get("agent") == CLAUDE_CODE.name:
            _check_attachments(request.attachments)
        message = MessageRow(
            id=_id("msg"),
            session_id=session.id,
            content=request.content,
            author=request.author or author or caller.get().name,
            model=request.model,
            source=request.source,
            attachments=request.attachments,
        )
        return PromptQueued(message_id=message.id, position=await session.prompt(message))

    async def answer(self, session: Session, permission: str, reply: PermissionReply, by: str | None = None) -> None:
        await session.answer(permission, reply, by or caller.get().name)

    async def messages(self, id: str, cursor: int, limit: int) -> MessageList:
        await self.mine(id)
        rows = await self.rows.messages(id, cursor, limit + 1)
        more = len(rows) > limit
        shown = rows[:limit]
        return MessageList(
            messages=[message_info(row) for row in shown], cursor=str(shown[-1].number) if more else None, has_more=more
        )

    async def events(self, id: str, cursor: int, limit: int, type: str | None, message: str | None) -> EventList:
        await self.mine(id)
        rows = await self.rows.events(id, after=cursor, limit=limit + 1, type=type, message=message)
        more = len(rows) > limit
        shown = rows[:limit]
        # Also on the last page: who asks again with it is told what came since.
        last = str(shown[-1].number) if shown else (str(cursor) if cursor else None)
        return EventList(events=[event_info(row) for row in shown], cursor=last, has_more=more)

    async def artifacts(self, id: str) -> ArtifactList:
        await self.mine(id)
        return ArtifactList(artifacts=[artifact_info(row) for row in await self.rows.artifacts(id)])

    # -- people --------------------------------------------------------------------------------------------------------

    async def participants(self, id: str) -> ParticipantList:
        await self.mine(id)
        return ParticipantList(participants=[participant_info(row) for row in await self.rows.participants(id)])

    async def join(self, id: str, request: AddParticipant) -> ParticipantInfo:
        await self.mine(id)
        sealed = None
        if request.github_token is not None:
            token = request.github_token.get_secret_value()
            keep(token)
            sealed = self._registry.vault.seal(token, f"participant of {id}")
        row = ParticipantRow(_id("part"), id, request.user, request.name, request.email, sealed=sealed)
        return participant_info(await self.rows.join(row))

    async def ws_token(self, id: str, user: str | None) -> WsToken:
        """For a client's WebSocket. The one before of the same participant is good no more."""
        session = await self.mine(id)
        participant = await self.rows.join(
            ParticipantRow(id=_id("part"), session_id=session.id, user=user or caller.get().name)
        )
        token, until = tokens.fresh(), now() + TOKEN_LIFE
        await self.rows.set_token(participant.id, tokens.digest(token), until)
        return WsToken(token=token, participant_id=participant.id, expires_at=until)

    async def by_ws_token(self, session: Session, token: str) -> ParticipantRow | None:
        return await self.rows.by_token(session.id, tokens.digest(token), now())

    async def replay(self, session: Session) -> dict[str, Any]:
        """What somebody who comes to watch has to know: the last that happened, and how it stands."""
        found = await self.rows.last_events(session.id, HISTORY + 1)
        events = _last([_wire(event_info(row)) for row in found[-HISTORY:]])
        messages = [_wire(message_info(row)) for row in await self.rows.last_messages(session.id, HISTORY)]
        return {
            "state": _wire(await self.info(session.row)),
            "history": {
                "events": events,
                "messages": _last(messages),
                "artifacts": [_wire(artifact_info(row)) for row in await self.rows.artifacts(session.id)],
                "hasMore": len(found) > len(events),
                "cursor": str(found[-1].number) if found else None,
            },
        }

    # -- repositories --------------------------------------------------------------------------------------------------

    async def repositories(self) -> RepositoryList:
        return RepositoryList(repos=await self.forge.repositories(self._settings.forge_token))

    async def repository(self, owner: str, name: str) -> Repository:
        token = self._settings.forge_token
        if token is None:
            raise InvalidRequestError("This server has no token for a forge.", hint="Set SKERRY_FORGE_TOKEN.")
        return await self.forge.repository(owner, name, token)

    async def pull_request(self, session: Session, request: CreatePullRequest) -> PullRequest:
        """Have the bridge push, then open it from here: the credential stays on this side."""
        row = session.row
        if row.repo_owner is None or row.repo_name is None:
            raise InvalidRequestError("The session has no repository.", hint="Make one with repoOwner and repoName.")
        token = await self._token(session)
        if token is None:
            raise InvalidRequestError(
                "There is no token with which a pull request could be opened.",
                hint="Give the session a githubToken, or the server SKERRY_FORGE_TOKEN.",
            )
        head = request.head_branch or f"skerry/{row.id}"
        base = request.base_branch or row.branch
        if base is None:
            base = (await self.forge.repository(row.repo_owner, row.repo_name, token)).default_branch
        sha = await session.push(head)
        async with session.opening:
            return await self._open(session, request, head, base, sha, token)

    async def _open(
        self, session: Session, request: CreatePullRequest, head: str, base: str, sha: str, token: str
    ) -> PullRequest:
        row = session.row
        assert row.repo_owner is not None
        assert row.repo_name is not None
        made = await self.forge.open_pull_request(
            row.repo_owner,
            row.repo_name,
            head=head,
            base=base,
            title=request.title,
            body=request.body,
            draft=request.draft,
            token=token,
        )
        about = {"number": made.number, "state": made.state, "head": head, "base": base, "sha": sha}
        known = [each for each in await self.rows.artifacts(row.id) if each.url == made.url]
        if not known:
            artifact = ArtifactRow(_id("art"), row.id, "pr", made.url, about)
            await self.rows.add_artifact(artifact)
            session.hub.tell({"type": "artifact_created", "artifact": _wire(artifact_info(artifact))})
        return made

    async def _token(self, session: Session) -> str | None:
        """The one of who asks, if they take part with one; else the session's, else the server's."""
        who = caller.get().name
        for participant in await self.rows.participants(session.id):
            if participant.user == who and participant.sealed is not None:
                return self._registry.vault.open(participant.sealed, f"participant of {session.id}")
        return self.spawner.token(session.row)

    async def of_sandbox(self, sandbox: str, token: str) -> Session:
        row = await self.rows.by_sandbox(sandbox)
        if row is None:
            raise SessionNotFoundError("No session has such a sandbox.")
        return await self.let_in(row.id, sandbox, token)


def _check_size(env: Mapping[str, str]) -> None:
    """The supervisor is told of it in one variable, and the kernel takes none of more than 128 KiB."""
    size = len(json.dumps(json.dumps(dict(env))))
    if size > LARGEST_CONFIG:
        raise InvalidRequestError(
            f"The agent's configuration is too large ({size >> 10} KiB, of {LARGEST_CONFIG >> 10}).",
            hint="Leave out models that are not asked for; what the agent is to know belongs into `agentsMd`.",
        )


def _check_attachments(attachments: list[dict[str, Any]]) -> None:
    for kind in {each.get("type") for each in attachments} & {"agent", "subtask"}:
        raise InvalidRequestError(
            f"Claude Code takes no attachments of type {kind!r}.",
            hint="It takes files and texts; say the rest in words.",
        )


def _still_wanted(session: Session, sandbox: str) -> Session:
    row = session.row
    if sandbox != row.sandbox_id or SandboxStatus(row.sandbox_status) in life.OVER:
        raise SessionSandboxGoneError("The session has done with this sandbox.")
    return session


def message_info(row: MessageRow) -> MessageInfo:
    return MessageInfo.model_validate(row, from_attributes=True)


def event_info(row: EventRow) -> EventInfo:
    return EventInfo.model_validate(row, from_attributes=True)


def artifact_info(row: ArtifactRow) -> ArtifactInfo:
    return ArtifactInfo.model_validate(row, from_attributes=True)


def participant_info(row: ParticipantRow) -> ParticipantInfo:
    return ParticipantInfo.model_validate(row, from_attributes=True)


def _wire(model: Any) -> Any:
    return model.model_dump(mode="json", by_alias=True)


def _last(shown: list[Any]) -> list[Any]:
    """As many of the last as are not too much together."""
    room = HISTORY_CHARACTERS
    for number, each in enumerate(reversed(shown)):
        room -= len(json.dumps(each))
        if room < 0:
            return shown[len(shown) - number :]
    return shown


def _id(kind: str) -> str:
    return f"{kind}-{int(time.time() * 1000):012x}{secrets.token_hex(5)}"
