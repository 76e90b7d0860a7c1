"""Webhooks: who wants to be told what happens, and what became of telling them."""

from __future__ import annotations

import builtins
import secrets
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from skerry.control.actor import caller
from skerry.control.courier import REPORTS, Courier, report_url
from skerry.control.metrics import Metrics
from skerry.control.reach import Reach, Targets, check_target
from skerry.control.webhook_rows import WebhookRow, WebhookRows
from skerry.errors import DeliveryNotFoundError, ForbiddenError, WebhookNotFoundError
from skerry.models import (
    CreateWebhook,
    DeliveryList,
    KeyScope,
    UpdateWebhook,
    WebhookDelivery,
    WebhookInfo,
    now,
)
from skerry.redaction import keep
from skerry.settings import Settings

BOTH = timedelta(days=1)
"""How long the secret before signs beside a new one."""
PING = "webhook.ping"
REPORTED = (
    *(f"sandbox.{what}" for what in ("created", "started", "stopped", "hibernated", "woken", "deleted", "error")),
    *("session.created", "session.message", "workspace.synced"),
)
"""What AgentPod knows of."""


class Webhooks:
    """Each is told of its owner's sandboxes, or of everybody's, which only admins may ask for."""

    def __init__(
        self, rows: WebhookRows, metrics: Metrics, settings: Settings, closed: Callable[[], bool] = lambda: False
    ) -> None:
        """``closed``: whether the server wants keys."""
        self._rows = rows
        self._chosen = settings.webhook_targets
        self._closed = closed
        self._days = settings.webhook_days
        self._report_url = report_url(settings)
        self.courier = Courier(rows, metrics, settings, Reach(self._targets))

    def _targets(self) -> Targets:
        # Without keys whoever can name an address is a user of this machine, and reaches its loopback anyway.
        return self._chosen or ("public" if self._closed() else "loopback")

    async def create(self, request: CreateWebhook) -> WebhookInfo:
        """With its secret, which is not shown again."""
        check_target(request.url, self._targets())
        who = caller.get()
        if request.everyone and who.scope is not KeyScope.ADMIN:
            raise ForbiddenError("Only an admin is told of everybody's sandboxes.")
        row = WebhookRow(
            id=f"wh_{secrets.token_hex(8)}",
            url=request.url,
            events=builtins.list(dict.fromkeys(request.events)),
            secret=_new_secret(),
            owner=None if request.everyone else who.owner,
            description=request.description,
            enabled=request.enabled,
        )
        await self._rows.insert(row)
        return row.info(with_secret=True)

    async def report(self) -> None:
        """See that an AgentPod is told, if the settings name one, and that none is if they do not."""
        url, row = self._report_url, await self._rows.get(REPORTS)
        if row is not None and row.url != url:
            await self._rows.delete(REPORTS)  # and what was on its way to another
        if url is not None and (row is None or row.url != url):
            said = "What AgentPod is told (SKERRY_REPORT_TO)."
            row = WebhookRow(id=REPORTS, url=url, events=[*REPORTED], secret=_new_secret(), description=said)
            await self._rows.insert(row)

    async def list(self) -> builtins.list[WebhookInfo]:
        return [row.info() for row in await self._rows.list() if _may_see(row)]

    async def get(self, id: str) -> WebhookInfo:
        return (await self._get(id)).info()

    async def update(self, id: str, request: UpdateWebhook) -> WebhookInfo:
        row = await self._get(id)
        changes: dict[str, Any] = {
            name: value
            for name in ("url", "events", "description", "enabled")
            if (value := getattr(request, name)) is not None
        }
        if request.url is not None:
            check_target(request.url, self._targets())
        if request.rotate_secret:
            changes |= {"secret": _new_secret(), "previous_secret": row.secret, "previous_secret_until": now() + BOTH}
        if not changes:
            return row.info()
        changed = await self._rows.update(id, **changes)
        if changed is None:
            raise _no_webhook(id)
        self.courier.nudge()
        return changed.info(with_secret=request.rotate_secret)

    async def delete(self, id: str) -> None:
        """And all that was on its way to it."""
        await self._get(id)
        if not await self._rows.delete(id):
            raise _no_webhook(id)

    async def deliveries(self, id: str, state: str | None, cursor: int | None, limit: int) -> DeliveryList:
        await self._get(id)
        found = await self._rows.deliveries(id, state, cursor, limit + 1)
        more, found = len(found) > limit, found[:limit]
        return DeliveryList(deliveries=[each for _, each in found], next_cursor=found[-1][0] if more else None)

    async def redeliver(self, id: str, delivery: str) -> WebhookDelivery:
        await self._get(id)
        if not await self._rows.requeue(id, delivery):
            raise _no_delivery(delivery)
        self.courier.nudge()
        return await self._delivery(id, delivery)

    async def ping(self, id: str) -> WebhookDelivery:
        """Send a test event now, once; what became of it."""
        await self._get(id)
        due = await self._rows.add(id, PING, {}, leased_by=self.courier.name, lease=self.courier.lease)
        await self.courier.deliver(due, once=True)
        return await self._delivery(id, due.id)

    async def expire(self) -> None:
        await self._rows.expire(now() - timedelta(days=self._days))

    async def _get(self, id: str) -> WebhookRow:
        row = await self._rows.get(id)
        if row is None or not _may_see(row):
            raise _no_webhook(id)
        return row

    async def _delivery(self, id: str, delivery: str) -> WebhookDelivery:
        found = await self._rows.delivery(id, delivery)
        if found is None:
            raise _no_delivery(delivery)
        return found


def _may_see(row: WebhookRow) -> bool:
    who = caller.get()
    return who.scope is KeyScope.ADMIN if row.owner is None else row.owner == who.owner


def _new_secret() -> str:
    secret = f"whsec_{secrets.token_urlsafe(32)}"
    keep(secret)
    return secret


def _no_webhook(id: str) -> WebhookNotFoundError:
    return WebhookNotFoundError("There is no such webhook.", hint="GET /v1/webhooks lists them.", details={"id": id})


def _no_delivery(id: str) -> DeliveryNotFoundError:
    return DeliveryNotFoundError(
        "There is no such delivery.", hint="Those that are done are forgotten after a while.", details={"id": id}
    )
