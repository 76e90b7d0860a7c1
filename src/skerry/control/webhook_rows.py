"""What the store knows of webhooks: where events go, and which are on their way there."""

from __future__ import annotations

import builtins
import json
import secrets
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, Executable, Exists, Row, delete, func, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from skerry.control.identity import mark_in, mark_of
from skerry.control.schema import deliveries, sandboxes, webhooks
from skerry.models import SandboxEvent, WebhookDelivery, WebhookInfo, now

Run = Callable[[Executable], Awaitable[Sequence[Row[Any]]]]

USER = "userId"
"""The label that says whom a sandbox is for."""
_NAMES = {
    "destroyed": "sandbox.deleted",
    "failed": "sandbox.error",
    "died": "sandbox.error",
    "synced": "workspace.synced",
    "sync_failed": "workspace.error",
    "session_created": "session.created",
    "session_message": "session.message",
}


def name_of(event: SandboxEvent) -> str:
    """What an event is called where it is sent."""
    if event.kind == "hibernated" and event.details.get("asked") == "stop":
        return "sandbox.stopped"
    return _NAMES.get(event.kind, f"sandbox.{event.kind}")


def wants(patterns: Collection[str], name: str) -> bool:
    group = name.partition(".")[0]
    return "*" in patterns or f"{group}.*" in patterns or name in patterns


def payload(id: str, name: str, timestamp: datetime, data: dict[str, Any]) -> str:
    """As ``WebhookEvent``, and byte for byte what is signed and sent."""
    body = {"id": id, "event": name, "timestamp": timestamp.isoformat().replace("+00:00", "Z"), "data": data}
    return json.dumps(body, separators=(",", ":"))


def delivery_id() -> str:
    return f"evt_{secrets.token_hex(12)}"


@dataclass(frozen=True, slots=True)
class WebhookRow:
    id: str
    url: str = field(repr=False)
    events: list[str]
    secret: str = field(repr=False)
    owner: str | None = None
    """Of whose sandboxes it is told; None for everybody's."""
    description: str = ""
    enabled: bool = True
    previous_secret: str | None = field(default=None, repr=False)
    previous_secret_until: datetime | None = None
    created_at: datetime = field(default_factory=now)

    def info(self, *, with_secret: bool = False) -> WebhookInfo:
        return WebhookInfo(
            id=self.id,
            url=self.url,
            events=self.events,
            description=self.description,
            enabled=self.enabled,
            created_at=self.created_at,
            owner=self.owner,
            secret=self.secret if with_secret else None,
            previous_secret_until=self.previous_secret_until if self.previous_secret else None,
        )

    def secrets(self, at: datetime) -> list[str]:
        """Those it is signed with."""
        before = self.previous_secret if self.previous_secret_until and self.previous_secret_until > at else None
        return [self.secret] if before is None else [self.secret, before]


@dataclass(frozen=True, slots=True)
class Due:
    """A delivery that is this server's to make."""

    id: str
    webhook_id: str
    event: str
    body: str = field(repr=False)
    attempts: int
    queued_at: datetime


class WebhookRows:
    def __init__(self, read: Run, write: Run) -> None:
        self._read = read
        self._write = write

    # -- webhooks ------------------------------------------------------------------------------------------------------

    async def insert(self, row: WebhookRow) -> None:
        await self._write(insert(webhooks).values({each.name: getattr(row, each.name) for each in fields(row)}))

    async def get(self, id: str) -> WebhookRow | None:
        rows = await self._read(select(webhooks).where(webhooks.c.id == id))
        return WebhookRow(**rows[0]._mapping) if rows else None

    async def list(self) -> builtins.list[WebhookRow]:
        """Oldest first."""
        rows = await self._read(select(webhooks).order_by(webhooks.c.created_at, webhooks.c.id))
        return [WebhookRow(**row._mapping) for row in rows]

    async def update(self, id: str, **changes: Any) -> WebhookRow | None:
        rows = await self._write(update(webhooks).where(webhooks.c.id == id).values(changes).returning(*webhooks.c))
        return WebhookRow(**rows[0]._mapping) if rows else None

    async def delete(self, id: str) -> bool:
        return bool(await self._write(delete(webhooks).where(webhooks.c.id == id).returning(webhooks.c.id)))

    def enabled(self) -> Exists:
        """Whether there is any, as a part of a statement."""
        return select(webhooks.c.id).where(webhooks.c.enabled).exists()

    # -- deliveries ----------------------------------------------------------------------------------------------------

    async def enqueue(self, connection: AsyncConnection, event: SandboxEvent) -> int:
        """In the transaction that records an event: send it to all who want it. How many do."""
        name = name_of(event)
        mark = mark_in(event.sandbox_id)
        known = select(webhooks.c.id, webhooks.c.events, webhooks.c.owner).where(webhooks.c.enabled)
        wanting = [
            row.id
            for row in await connection.execute(known)
            if wants(row.events, name) and (row.owner is None or mark_of(row.owner) == mark)
        ]
        if wanting:
            data = event.model_dump(mode="json", by_alias=True, exclude={"id"}) | {"eventId": event.id}
            labels = select(sandboxes.c.labels).where(sandboxes.c.id == event.sandbox_id)
            if (user := (await connection.scalar(labels) or {}).get(USER)) is not None:
                data["userId"] = user
            if name == "sandbox.error":
                data["error"] = event.message
            if mark:  # its owner knows it without
                data = json.loads(json.dumps(data).replace(mark, ""))
            values = [_queued(id, name, event.at, data, event.sandbox_id) for id in wanting]
            await connection.execute(insert(deliveries), values)
        return len(wanting)

    async def add(self, webhook: str, name: str, data: dict[str, Any], *, leased_by: str, lease: float) -> Due:
        """One that belongs to no event, for the server that asked to make at once."""
        leased = {"leased_by": leased_by, "leased_until": now() + timedelta(seconds=lease)}
        values = _queued(webhook, name, now(), data, None) | leased
        rows = await self._write(insert(deliveries).values(values).returning(*_DUE))
        return Due(**rows[0]._mapping)

    async def claim(
        self, leased_by: str, *, lease: float, limit: int, each: int, but: Collection[str], at: datetime
    ) -> builtins.list[Due]:
        """Take what is due, at most ``each`` of one webhook and the first in line of each sandbox; nobody else will."""
        mine = deliveries.alias("mine")
        place = func.row_number().over(partition_by=mine.c.webhook_id, order_by=mine.c.number)
        ready = (
            select(mine.c.number, place.label("place"))
            .join(webhooks, webhooks.c.id == mine.c.webhook_id)
            .where(
                mine.c.state == "pending",
                mine.c.next_at <= at,
                or_(mine.c.leased_until.is_(None), mine.c.leased_until < at),
                webhooks.c.enabled,
                mine.c.webhook_id.not_in(list(but)),
                ~_held_up(mine),
            )
            .subquery()
        )
        chosen = select(ready.c.number).where(ready.c.place <= each).order_by(ready.c.place).limit(limit)
        # Asked again in the update itself: another server may have chosen the same at the same moment, and even tried.
        free = or_(deliveries.c.leased_until.is_(None), deliveries.c.leased_until < at)
        due = (deliveries.c.state == "pending", deliveries.c.next_at <= at)
        statement = (
            update(deliveries)
            .where(deliveries.c.number.in_(chosen), *due, free)
            .values(leased_by=leased_by, leased_until=at + timedelta(seconds=lease))
            .returning(*_DUE)
        )
        return [Due(**row._mapping) for row in await self._write(statement)]

    async def settle(self, id: str, leased_by: str, **changes: Any) -> None:
        """What became of an attempt, unless the lease went to another meanwhile."""
        changes |= {"leased_by": None, "leased_until": None}
        mine = (deliveries.c.id == id, deliveries.c.leased_by == leased_by)
        await self._write(update(deliveries).where(*mine).values(changes))

    async def release(self, leased_by: str) -> None:
        """Leave what this server has taken to others."""
        mine = deliveries.c.leased_by == leased_by
        await self._write(update(deliveries).where(mine).values(leased_by=None, leased_until=None))

    async def next_due(self, but: Collection[str] = ()) -> datetime | None:
        """When something has to be tried, at the earliest; ``but`` names webhooks that are left out."""
        mine = deliveries.alias("mine")
        waiting = (
            select(func.min(func.coalesce(mine.c.leased_until, mine.c.next_at)).label("at"))
            .join(webhooks, webhooks.c.id == mine.c.webhook_id)
            .where(
                mine.c.state == "pending",
                webhooks.c.enabled,
                webhooks.c.id.not_in(list(but)),
                ~_held_up(mine),
            )
        )
        rows = await self._read(waiting)
        return rows[0].at if rows else None

    async def deliveries(
        self, webhook: str, state: str | None, before: int | None, limit: int
    ) -> builtins.list[tuple[int, WebhookDelivery]]:
        """The latest first, each with its number; ``before`` is the last number the caller has seen."""
        statement = select(*_SHOWN).where(deliveries.c.webhook_id == webhook)
        if state is not None:
            statement = statement.where(deliveries.c.state == state)
        if before is not None:
            statement = statement.where(deliveries.c.number < before)
        rows = await self._read(statement.order_by(deliveries.c.number.desc()).limit(limit))
        return [(row.number, WebhookDelivery(**row._mapping)) for row in rows]

    async def delivery(self, webhook: str, id: str) -> WebhookDelivery | None:
        mine = (deliveries.c.webhook_id == webhook, deliveries.c.id == id)
        rows = await self._read(select(*_SHOWN).where(*mine))
        return WebhookDelivery(**rows[0]._mapping) if rows else None

    async def requeue(self, webhook: str, id: str) -> bool:
        """Send it again, as if for the first time; one that waits already is tried now. Whether there is such a one."""
        mine = (deliveries.c.webhook_id == webhook, deliveries.c.id == id)
        fresh = {"state": "pending", "attempts": 0, "queued_at": now(), "next_at": now(), "delivered_at": None}
        return bool(await self._write(update(deliveries).where(*mine).values(fresh).returning(deliveries.c.id)))

    async def expire(self, before: datetime) -> None:
        """Forget what was delivered, or given up, before then."""
        done = deliveries.c.state != "pending"
        await self._write(delete(deliveries).where(done, deliveries.c.queued_at < before))


_DUE = [deliveries.c[name] for name in ("id", "webhook_id", "event", "body", "attempts", "queued_at")]
_SHOWN = [deliveries.c.number, *(deliveries.c[name] for name in WebhookDelivery.model_fields)]


def _held_up(mine: Any) -> ColumnElement[bool]:
    """Whether another of the same sandbox has to arrive first."""
    earlier = deliveries.alias("earlier")
    return (
        select(earlier.c.number)
        .where(
            earlier.c.webhook_id == mine.c.webhook_id,
            earlier.c.sandbox_id == mine.c.sandbox_id,
            earlier.c.state == "pending",
            earlier.c.number < mine.c.number,
        )
        .exists()
    )


def _queued(webhook: str, name: str, at: datetime, data: dict[str, Any], sandbox: str | None) -> dict[str, Any]:
    id = delivery_id()
    return {
        "id": id,
        "webhook_id": webhook,
        "sandbox_id": sandbox,
        "event": name,
        "body": payload(id, name, at, data),
        "state": "pending",
        "attempts": 0,
        "created_at": now(),
        "queued_at": now(),
        "next_at": now(),
    }
