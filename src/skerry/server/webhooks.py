"""Webhooks: where events are sent, and what became of sending them."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response

from skerry.control.registry import Registry
from skerry.models import (
    CreateWebhook,
    DeliveryList,
    DeliveryState,
    Done,
    UpdateWebhook,
    WebhookDelivery,
    WebhookInfo,
    WebhookList,
)
from skerry.server.answers import answer
from skerry.server.nouns import noun_router
from skerry.server.paths import LARGEST


def routes(registry: Registry) -> APIRouter:
    router = noun_router("/v1/webhooks", "webhooks")

    @router.post("", status_code=201, response_model=WebhookInfo)
    async def create_webhook(body: CreateWebhook) -> Response:
        return answer(await registry.webhooks.create(body), 201)

    @router.get("", response_model=WebhookList)
    async def list_webhooks() -> Response:
        return answer(WebhookList(webhooks=await registry.webhooks.list()))

    @router.get("/{webhook}", response_model=WebhookInfo)
    async def get_webhook(webhook: str) -> Response:
        return answer(await registry.webhooks.get(webhook))

    @router.patch("/{webhook}", response_model=WebhookInfo)
    async def update_webhook(webhook: str, body: UpdateWebhook) -> Response:
        return answer(await registry.webhooks.update(webhook, body))

    @router.delete("/{webhook}", response_model=Done)
    async def delete_webhook(webhook: str) -> Response:
        await registry.webhooks.delete(webhook)
        return answer(Done())

    @router.post("/{webhook}/ping", response_model=WebhookDelivery)
    async def ping_webhook(webhook: str) -> Response:
        return answer(await registry.webhooks.ping(webhook))

    @router.get("/{webhook}/deliveries", response_model=DeliveryList)
    async def list_deliveries(
        webhook: str,
        state: DeliveryState | None = None,
        limit: Annotated[int, Query(ge=1, le=100)] = 50,
        cursor: Annotated[int | None, Query(ge=1, le=LARGEST)] = None,
    ) -> Response:
        return answer(await registry.webhooks.deliveries(webhook, state, cursor, limit))

    @router.post("/{webhook}/deliveries/{delivery}/redeliver", response_model=WebhookDelivery)
    async def redeliver_webhook(webhook: str, delivery: str) -> Response:
        return answer(await registry.webhooks.redeliver(webhook, delivery))

    return router
