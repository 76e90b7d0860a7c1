"""What a server has on record, and whom it tells: its audit log and its webhooks."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from datetime import datetime
from typing import Any
from urllib.parse import quote

from skerry.client._async.connection import AsyncConnection, AsyncStream
from skerry.client.values import given
from skerry.models import (
    AuditEntry,
    AuditPage,
    AuditVerification,
    DeliveryList,
    DeliveryState,
    Outcome,
    WebhookDelivery,
    WebhookInfo,
    WebhookList,
)

_HOOKS = "/v1/webhooks"


class AsyncRecord:
    connection: AsyncConnection

    async def list_audit(
        self,
        *,
        since: datetime | None = None,
        until: datetime | None = None,
        sandbox: str | None = None,
        actor: str | None = None,
        owner: str | None = None,
        operation: str | None = None,
        outcome: Outcome | None = None,
        limit: int | None = None,
        cursor: int | None = None,
    ) -> AuditPage:
        """One page of the audit log, the latest entry first; ``next_cursor`` asks for those before."""
        params = _wanted(since, until, sandbox, actor, owner, operation, outcome) | given(limit=limit, cursor=cursor)
        response = await self.connection.request("GET", "/v1/audit", params=params)
        return AuditPage.model_validate_json(response.content)

    def export_audit(
        self,
        *,
        since: datetime | None = None,
        until: datetime | None = None,
        sandbox: str | None = None,
        actor: str | None = None,
        owner: str | None = None,
        operation: str | None = None,
        outcome: Outcome | None = None,
    ) -> AsyncStream[AuditEntry]:
        """Every entry of the audit log that fits, each server's oldest first."""
        return AsyncStream(self._entries(_wanted(since, until, sandbox, actor, owner, operation, outcome)))

    async def _entries(self, params: dict[str, Any]) -> AsyncGenerator[AuditEntry, None]:
        async with self.connection.stream("GET", "/v1/audit/export", params=params) as response:
            async for line in response.aiter_lines():
                if line:
                    yield AuditEntry.model_validate_json(line)

    async def verify_audit(self) -> AuditVerification:
        """Whether the audit log is what was written: nothing changed, missing or in another order."""
        response = await self.connection.request("GET", "/v1/audit/verify")
        return AuditVerification.model_validate_json(response.content)

    async def create_webhook(
        self,
        url: str,
        events: Sequence[str] = ("*",),
        *,
        description: str = "",
        enabled: bool = True,
        everyone: bool | None = None,
    ) -> WebhookInfo:
        """Have events sent to an address. The answer holds the secret they are signed with, which is shown once.

        ``everyone``: of everybody's sandboxes, for admins.
        """
        body = {"url": url, "events": list(events), "description": description, "enabled": enabled}
        body |= given(everyone=everyone)
        response = await self.connection.request("POST", _HOOKS, json=body)
        return WebhookInfo.model_validate_json(response.content)

    async def webhooks(self) -> list[WebhookInfo]:
        response = await self.connection.request("GET", _HOOKS)
        return WebhookList.model_validate_json(response.content).webhooks

    async def get_webhook(self, webhook: str) -> WebhookInfo:
        response = await self.connection.request("GET", _hook(webhook))
        return WebhookInfo.model_validate_json(response.content)

    async def update_webhook(
        self,
        webhook: str,
        *,
        url: str | None = None,
        events: Sequence[str] | None = None,
        description: str | None = None,
        enabled: bool | None = None,
        rotate_secret: bool | None = None,
    ) -> WebhookInfo:
        """Change a webhook. ``rotate_secret`` gives it a new secret; for a day both sign."""
        body = given(
            url=url,
            events=None if events is None else list(events),
            description=description,
            enabled=enabled,
            rotateSecret=rotate_secret,
        )
        response = await self.connection.request("PATCH", _hook(webhook), json=body)
        return WebhookInfo.model_validate_json(response.content)

    async def delete_webhook(self, webhook: str) -> None:
        """And all that was on its way to it."""
        await self.connection.request("DELETE", _hook(webhook))

    async def ping_webhook(self, webhook: str) -> WebhookDelivery:
        """Send a test event now, once; what became of it."""
        response = await self.connection.request("POST", f"{_hook(webhook)}/ping")
        return WebhookDelivery.model_validate_json(response.content)

    async def webhook_deliveries(
        self, webhook: str, *, state: DeliveryState | None = None, limit: int | None = None, cursor: int | None = None
    ) -> DeliveryList:
        """One page of what was sent, the latest first; ``state="dead"`` for what was given up."""
        params = given(state=state, limit=limit, cursor=cursor)
        response = await self.connection.request("GET", f"{_hook(webhook)}/deliveries", params=params)
        return DeliveryList.model_validate_json(response.content)

    async def redeliver_webhook(self, webhook: str, delivery: str) -> WebhookDelivery:
        """Send it again, as if for the first time."""
        path = f"{_hook(webhook)}/deliveries/{quote(delivery, safe='')}/redeliver"
        response = await self.connection.request("POST", path)
        return WebhookDelivery.model_validate_json(response.content)


def _hook(webhook: str) -> str:
    return f"{_HOOKS}/{quote(webhook, safe='')}"


def _wanted(
    since: datetime | None,
    until: datetime | None,
    sandbox: str | None,
    actor: str | None,
    owner: str | None,
    operation: str | None,
    outcome: str | None,
) -> dict[str, Any]:
    times = {name: at.astimezone().isoformat() for name, at in (("since", since), ("until", until)) if at is not None}
    return times | given(sandbox=sandbox, actor=actor, owner=owner, operation=operation, outcome=outcome)
