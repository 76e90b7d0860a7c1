"""Webhooks."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from skerry.models.base import Request, Result, SandboxRef

EventPattern = Annotated[
    str, StringConstraints(pattern=r"^(\*|(sandbox|session|workspace|workflow|webhook)\.(\*|[a-z][a-z_.]{0,60}))$")
]
DeliveryState = Literal["pending", "delivered", "dead"]


class CreateWebhook(Request):
    url: str = Field(min_length=1, max_length=2000, description="Where events are sent, by HTTP or HTTPS.")
    events: list[EventPattern] = Field(
        default_factory=lambda: ["*"], min_length=1, max_length=50, description="`*`, `sandbox.*`, `sandbox.created`, …"
    )
    description: str = Field("", max_length=200)
    enabled: bool = True
    everyone: bool = Field(False, description="Events of everybody's sandboxes, not only of your own; for admins.")


class UpdateWebhook(Request):
    url: str | None = Field(None, min_length=1, max_length=2000)
    events: list[EventPattern] | None = Field(None, min_length=1, max_length=50)
    description: str | None = Field(None, max_length=200)
    enabled: bool | None = None
    rotate_secret: bool = Field(False, description="A new secret; the old one goes on signing beside it for a day.")


class WebhookInfo(Result):
    id: str
    url: str = Field(repr=False)
    events: list[str]
    description: str = ""
    enabled: bool
    created_at: datetime
    owner: str | None = Field(None, description="Of whose sandboxes it is told; null for everybody's.")
    secret: str | None = Field(None, repr=False, description="Shown once: when it was made.")
    previous_secret_until: datetime | None = Field(None, description="Until then the one before signs, too.")


class WebhookList(Result):
    webhooks: list[WebhookInfo]


class WebhookDelivery(Result):
    """An event on its way to a webhook."""

    id: str = Field(description="What the receiver knows it by, however often it is sent.")
    webhook_id: str
    event: str
    sandbox_id: SandboxRef | None = None
    state: DeliveryState
    attempts: int
    created_at: datetime
    next_at: datetime | None = Field(None, description="When it is tried next.")
    delivered_at: datetime | None = None
    status: int | None = Field(None, description="What the receiver answered last.")
    error: str | None = Field(None, description="Why the last attempt failed.")


class DeliveryList(Result):
    deliveries: list[WebhookDelivery] = Field(description="The latest first.")
    next_cursor: int | None = Field(None, description="What to give as `cursor` for those before.")


class WebhookEvent(Result):
    """What a webhook's receiver gets."""

    id: str = Field(description="The same if it is sent again: do what it asks for once.")
    event: str
    timestamp: datetime
    data: dict[str, Any]
