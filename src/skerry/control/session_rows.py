"""What the store knows of coding sessions: their prompts, what the agent did, what came of it, and who takes part.

Tokens are kept as SHA-256 digests, secrets only sealed.
"""

from __future__ import annotations

import builtins
import secrets
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Any, TypeVar

from sqlalchemy import Executable, Row, Table, Text, cast, delete, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from skerry.control.identity import LOCAL
from skerry.control.schema import (
    agent_sessions,
    session_artifacts,
    session_events,
    session_messages,
    session_participants,
)
from skerry.models import now

T = TypeVar("T")
Run = Callable[[Executable], Awaitable[Sequence[Row[Any]]]]
Together = Callable[[Callable[[AsyncConnection], Awaitable[Any]]], Awaitable[Any]]

UNDER_WAY = ("pending", "processing")
TRIMMED = "trimmed"
"""An event that stands for all before it, which are not kept any more."""


@dataclass(slots=True)
class SessionRow:
    id: str
    node: str
    owner: str = LOCAL
    title: str | None = None
    repo_owner: str | None = None
    repo_name: str | None = None
    branch: str | None = None
    model: str | None = None
    status: str = "created"
    settings: dict[str, Any] = field(default_factory=dict)
    """How its sandboxes are made, without what is secret."""
    sealed: str | None = field(default=None, repr=False)
    """What is secret of that."""
    sandbox_id: str | None = None
    sandbox_status: str = "pending"
    sandbox_token: str | None = field(default=None, repr=False)
    agent_session: str | None = None
    snapshot: str | None = None
    spawned_at: float | None = None
    heard_at: float | None = None
    active_at: float | None = None
    failures: int = 0
    failed_at: float | None = None
    error: str | None = None
    created_at: datetime = field(default_factory=now)
    updated_at: datetime = field(default_factory=now)


@dataclass(frozen=True, slots=True)
class MessageRow:
    id: str
    session_id: str
    content: str
    author: str | None = None
    model: str | None = None
    source: str = "api"
    attachments: list[dict[str, Any]] = field(default_factory=list)
    status: str = "pending"
    error: str | None = None
    created_at: datetime = field(default_factory=now)
    started_at: datetime | None = None
    completed_at: datetime | None = None
    number: int = 0


@dataclass(frozen=True, slots=True)
class EventRow:
    session_id: str
    id: str
    type: str
    message_id: str | None
    data: dict[str, Any]
    at: datetime = field(default_factory=now)
    number: int = 0


@dataclass(frozen=True, slots=True)
class ArtifactRow:
    id: str
    session_id: str
    type: str
    url: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    created_at: datetime = field(default_factory=now)


@dataclass(frozen=True, slots=True)
class ParticipantRow:
    id: str
    session_id: str
    user: str
    name: str | None = None
    email: str | None = None
    role: str = "member"
    sealed: str | None = field(default=None, repr=False)
    ws_token: str | None = field(default=None, repr=False)
    ws_token_until: datetime | None = None
    joined_at: datetime = field(default_factory=now)


class SessionRows:
    def __init__(
        self,
        read: Run,
        write: Run,
        together: Together,
        upsert: Callable[[Table], Any],
        storable: Callable[[dict[str, Any]], dict[str, Any]],
    ) -> None:
        self._read = read
        self._write = write
        self._together = together
        self._upsert = upsert
        self._storable = storable

    # -- sessions ------------------------------------------------------------------------------------------------------

    async def insert(self, row: SessionRow, creator: ParticipantRow) -> None:
        session, participant = self._values(row), self._values(creator)

        async def add(connection: AsyncConnection) -> None:
            await connection.execute(insert(agent_sessions).values(session))
            await connection.execute(insert(session_participants).values(participant))

        await self._together(add)

    async def get(self, id: str) -> SessionRow | None:
        self._storable({"session id": id})
        rows = await self._read(select(agent_sessions).where(agent_sessions.c.id == id))
        return SessionRow(**rows[0]._mapping) if rows else None

    async def by_sandbox(self, sandbox_id: str) -> SessionRow | None:
        self._storable({"sandbox id": sandbox_id})
        rows = await self._read(select(agent_sessions).where(agent_sessions.c.sandbox_id == sandbox_id))
        return SessionRow(**rows[0]._mapping) if rows else None

    async def list(self, owner: str, status: str | None, before: str | None, limit: int) -> builtins.list[SessionRow]:
        """The newest first, by id, which begins with the time; ``before`` is the last that was seen."""
        self._storable({"cursor": before})
        mine = select(agent_sessions).where(agent_sessions.c.owner == owner)
        if status is not None:
            mine = mine.where(agent_sessions.c.status == status)
        if before is not None:
            mine = mine.where(agent_sessions.c.id < before)
        rows = await self._read(mine.order_by(agent_sessions.c.id.desc()).limit(limit))
        return [SessionRow(**row._mapping) for row in rows]

    async def unsettled(self, node: str, statuses: Collection[str]) -> builtins.list[SessionRow]:
        """Those of this server with a sandbox in one of these states, or with prompts that wait."""
        waiting = select(session_messages.c.session_id).where(session_messages.c.status.in_(UNDER_WAY))
        live = agent_sessions.c.sandbox_status.in_(builtins.list(statuses)) | agent_sessions.c.id.in_(waiting)
        rows = await self._read(select(agent_sessions).where(agent_sessions.c.node == node, live))
        return [SessionRow(**row._mapping) for row in rows]

    async def owners(self, node: str) -> builtins.list[str]:
        """Whose sessions this server has."""
        rows = await self._read(select(agent_sessions.c.owner).where(agent_sessions.c.node == node).distinct())
        return [row.owner for row in rows]

    async def update(self, id: str, **changes: Any) -> None:
        values = self._storable(changes) | {"updated_at": now()}
        await self._write(update(agent_sessions).where(agent_sessions.c.id == id).values(values))

    async def delete(self, id: str) -> None:
        await self._write(delete(agent_sessions).where(agent_sessions.c.id == id))

    # -- prompts -------------------------------------------------------------------------------------------------------

    async def add_message(self, row: MessageRow) -> int:
        """How many are to be done before it, and it."""
        values = self._values(row, but=("number",))

        async def add(connection: AsyncConnection) -> int:
            await connection.execute(insert(session_messages).values(values))
            mine = (session_messages.c.session_id == row.session_id, session_messages.c.status.in_(UNDER_WAY))
            counted = select(func.count()).select_from(session_messages).where(*mine)
            return int((await connection.execute(counted)).scalar_one())

        return int(await self._together(add))

    async def processing(self, session: str) -> MessageRow | None:
        return await self._first(session, "processing")

    async def take_next(self, session: str) -> MessageRow | None:
        """The oldest that waits, which is being processed from now on; none while another is."""
        mine, status = session_messages.c.session_id == session, session_messages.c.status
        busy = select(session_messages.c.number).where(mine, status == "processing").exists()
        oldest = select(func.min(session_messages.c.number)).where(mine, status == "pending").scalar_subquery()
        statement = (
            update(session_messages)
            .where(session_messages.c.number == oldest, ~busy)
            .values(status="processing", started_at=now())
            .returning(*session_messages.c)
        )
        rows = await self._write(statement)
        return MessageRow(**rows[0]._mapping) if rows else None

    async def finish(self, id: str, status: str, error: str | None) -> None:
        changes = {"status": status, "error": error, "completed_at": now()}
        await self._write(update(session_messages).where(session_messages.c.id == id).values(self._storable(changes)))

    async def waiting(self, session: str) -> int:
        mine = (session_messages.c.session_id == session, session_messages.c.status == "pending")
        return int((await self._read(select(func.count()).select_from(session_messages).where(*mine)))[0][0])

    async def message(self, session: str, id: str) -> MessageRow | None:
        mine = (session_messages.c.session_id == session, session_messages.c.id == id)
        rows = await self._read(select(session_messages).where(*mine))
        return MessageRow(**rows[0]._mapping) if rows else None

    async def messages(self, session: str, after: int, limit: int) -> builtins.list[MessageRow]:
        """Oldest first."""
        mine = (session_messages.c.session_id == session, session_messages.c.number > after)
        rows = await self._read(select(session_messages).where(*mine).order_by(session_messages.c.number).limit(limit))
        return [MessageRow(**row._mapping) for row in rows]

    async def last_messages(self, session: str, limit: int) -> builtins.list[MessageRow]:
        """The last so many, oldest first."""
        mine = select(session_messages).where(session_messages.c.session_id == session)
        rows = await self._read(mine.order_by(session_messages.c.number.desc()).limit(limit))
        return [MessageRow(**row._mapping) for row in reversed(rows)]

    async def _first(self, session: str, status: str) -> MessageRow | None:
        mine = (session_messages.c.session_id == session, session_messages.c.status == status)
        rows = await self._read(select(session_messages).where(*mine).order_by(session_messages.c.number).limit(1))
        return MessageRow(**rows[0]._mapping) if rows else None

    # -- events --------------------------------------------------------------------------------------------------------

    async def add_event(self, row: EventRow) -> EventRow | None:
        """With its number; None if it was there already.

        An answer so far takes the place of the one before of which it is the continuation: of the same text, for
        others may begin with the same words.
        """
        values = self._values(row, but=("number",))
        added = self._upsert(session_events).values(values).on_conflict_do_nothing().returning(session_events.c.number)
        if row.type != "token":
            numbers = await self._write(added)
            return _numbered(row, numbers[0].number) if numbers else None
        before = (
            session_events.c.session_id == row.session_id,
            session_events.c.type == "token",
            session_events.c.message_id == row.message_id,
        )

        async def replace(connection: AsyncConnection) -> EventRow | None:
            found = select(session_events.c.id, session_events.c.number, session_events.c.data).where(*before)
            known = (await connection.execute(found)).all()
            said, text_id = str(row.data.get("content", "")), row.data.get("textId")
            same = [each for each in known if each.data.get("textId") == text_id]
            texts = {each.number: str(each.data.get("content", "")) for each in same}
            if any(each.id == row.id for each in known) or any(text.startswith(said) for text in texts.values()):
                return None
            less = [number for number, text in texts.items() if said.startswith(text)]
            await connection.execute(delete(session_events).where(session_events.c.number.in_(less)))
            number = (await connection.execute(added)).scalar_one_or_none()
            return None if number is None else _numbered(row, number)

        return await self._together(replace)  # type: ignore[no-any-return]

    async def events(
        self, session: str, *, after: int = 0, limit: int, type: str | None = None, message: str | None = None
    ) -> builtins.list[EventRow]:
        """Oldest first."""
        self._storable({"type": type, "messageId": message})
        mine = select(session_events).where(session_events.c.session_id == session, session_events.c.number > after)
        missing = session_events.c.type == TRIMMED  # which may have been of that type, or about that message
        if type is not None:
            mine = mine.where((session_events.c.type == type) | missing)
        if message is not None:
            mine = mine.where((session_events.c.message_id == message) | missing)
        return [EventRow(**r._mapping) for r in await self._read(mine.order_by(session_events.c.number).limit(limit))]

    async def last_events(self, session: str, limit: int) -> builtins.list[EventRow]:
        """The last so many, oldest first."""
        mine = select(session_events).where(session_events.c.session_id == session)
        rows = await self._read(mine.order_by(session_events.c.number.desc()).limit(limit))
        return [EventRow(**row._mapping) for row in reversed(rows)]

    async def weigh_events(self, session: str) -> tuple[int, int]:
        """How many there are, and how many characters."""
        size = func.coalesce(func.sum(func.length(cast(session_events.c.data, Text))), 0)
        mine = select(func.count(), size).where(session_events.c.session_id == session)
        found: Any = (await self._read(mine))[0]
        return int(found[0]), int(found[1])

    async def trim_events(self, session: str, most: int, most_bytes: int) -> tuple[int, int]:
        """Keep the last of them; what stands for the others says how many they were. How much there is then."""
        mine = session_events.c.session_id == session
        size = func.length(cast(session_events.c.data, Text)).label("size")

        async def trim(connection: AsyncConnection) -> None:
            newest = select(session_events.c.number, size).where(mine).order_by(session_events.c.number.desc())
            kept = bytes = 0
            last: int | None = None
            for row in await connection.execute(newest):
                kept, bytes = kept + 1, bytes + row.size
                if kept > most or bytes > most_bytes:
                    last = row.number
                    break
            if last is None:
                return
            goes = (mine, session_events.c.number <= last)
            before = select(session_events.c.data).where(*goes, session_events.c.type == TRIMMED)
            stood_for = sum(int(each.data["events"]) for each in await connection.execute(before))
            counted = select(func.count(), func.max(session_events.c.at)).where(*goes)
            gone, until = (await connection.execute(counted)).one()
            events = gone - (1 if stood_for else 0) + stood_for
            await connection.execute(delete(session_events).where(mine, session_events.c.number < last))
            id = f"{TRIMMED}-{secrets.token_hex(8)}"  # which no sandbox can have taken
            marker = {"id": id, "type": TRIMMED, "message_id": None, "data": {"events": events}, "at": until}
            await connection.execute(update(session_events).where(session_events.c.number == last).values(marker))

        await self._together(trim)
        return await self.weigh_events(session)

    # -- artifacts and participants ------------------------------------------------------------------------------------

    async def add_artifact(self, row: ArtifactRow) -> None:
        await self._write(insert(session_artifacts).values(self._values(row)))

    async def artifacts(self, session: str) -> builtins.list[ArtifactRow]:
        mine = session_artifacts.c.session_id == session
        order = (session_artifacts.c.created_at, session_artifacts.c.id)
        rows = await self._read(select(session_artifacts).where(mine).order_by(*order))
        return [ArtifactRow(**row._mapping) for row in rows]

    async def join(self, row: ParticipantRow) -> ParticipantRow:
        """Add them, or find them if they take part already; a new token or name takes the place of the old."""
        values = self._values(row)
        changes = {name: values[name] for name in ("name", "email", "sealed") if values[name] is not None}
        added = self._upsert(session_participants).values(values)
        keys = [session_participants.c.session_id, session_participants.c.user]
        changes = changes or {"user": values["user"]}
        done = added.on_conflict_do_update(index_elements=keys, set_=changes).returning(*session_participants.c)
        return ParticipantRow(**(await self._write(done))[0]._mapping)

    async def participants(self, session: str) -> builtins.list[ParticipantRow]:
        mine = session_participants.c.session_id == session
        order = (session_participants.c.joined_at, session_participants.c.id)
        rows = await self._read(select(session_participants).where(mine).order_by(*order))
        return [ParticipantRow(**row._mapping) for row in rows]

    async def participant(self, session: str, user: str) -> ParticipantRow | None:
        mine = (session_participants.c.session_id == session, session_participants.c.user == user)
        rows = await self._read(select(session_participants).where(*mine))
        return ParticipantRow(**rows[0]._mapping) if rows else None

    async def set_token(self, participant: str, digest: str, until: datetime) -> None:
        mine = session_participants.c.id == participant
        await self._write(update(session_participants).where(mine).values(ws_token=digest, ws_token_until=until))

    async def by_token(self, session: str, digest: str, at: datetime) -> ParticipantRow | None:
        mine = (
            session_participants.c.session_id == session,
            session_participants.c.ws_token == digest,
            session_participants.c.ws_token_until > at,
        )
        rows = await self._read(select(session_participants).where(*mine))
        return ParticipantRow(**rows[0]._mapping) if rows else None

    def _values(self, row: Any, but: Collection[str] = ()) -> dict[str, Any]:
        return self._storable({each.name: getattr(row, each.name) for each in fields(row) if each.name not in but})


def _numbered(row: EventRow, number: int) -> EventRow:
    return EventRow(row.session_id, row.id, row.type, row.message_id, row.data, row.at, number)
