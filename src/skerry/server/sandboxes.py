"""Sandboxes themselves: make, look at, change, start, stop, destroy."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Response

from skerry.control.actor import caller
from skerry.control.registry import Registry
from skerry.errors import ForbiddenError, InvalidRequestError, SkerryError
from skerry.models import (
    CreateSandbox,
    Destroyed,
    EgressInfo,
    EventList,
    KeyScope,
    SandboxEvent,
    SandboxInfo,
    SandboxList,
    SandboxMetrics,
    SetEgress,
    SetEnv,
    SleepSandbox,
    StartSandbox,
    State,
    UpdateSandbox,
    WakeSandbox,
    now,
)
from skerry.server.answers import answer
from skerry.server.nouns import noun_router
from skerry.server.paths import LARGEST, SandboxId
from skerry.server.sse import EventStream, last_seen

STREAMED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Server-sent events: each a SandboxEvent, with its id as the event's.",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    }
}


def _labels(pairs: list[str]) -> dict[str, str]:
    if bad := [pair for pair in pairs if "=" not in pair]:
        raise InvalidRequestError(f"The label {bad[0]!r} is not of the form name=value.")
    return dict(pair.split("=", 1) for pair in pairs)


def _in_utc(moment: datetime | None) -> datetime | None:
    return moment.replace(tzinfo=UTC) if moment is not None and moment.tzinfo is None else moment


def _failure(id: str, error: SkerryError) -> SandboxEvent:
    return SandboxEvent(id=0, sandbox_id=id, kind="error", message=str(error), at=now())


def routes(registry: Registry) -> APIRouter:
    router = noun_router("/v1/sandboxes", "sandboxes")

    @router.post("", status_code=201, response_model=SandboxInfo)
    async def create_sandbox(body: CreateSandbox | None = None) -> Response:
        return answer(await registry.create(body or CreateSandbox()), 201)

    @router.get("", response_model=SandboxList)
    async def list_sandboxes(
        state: State | None = None,
        image: str | None = None,
        label: Annotated[list[str], Query(description="name=value; may be repeated.")] = [],  # noqa: B006
        prefix: str | None = None,
        limit: Annotated[int, Query(ge=1, le=100)] = 50,
        cursor: str | None = None,
        everyone: Annotated[bool, Query(description="Of all owners; for admins.")] = False,
    ) -> Response:
        if everyone and caller.get().scope is not KeyScope.ADMIN:
            raise ForbiddenError("Only an admin sees the sandboxes of all owners.")
        found = await registry.list(
            state=state,
            image=image,
            labels=_labels(label),
            prefix=prefix,
            limit=limit,
            cursor=cursor,
            everyone=everyone,
        )
        return answer(found)

    @router.get("/{id}", response_model=SandboxInfo)
    async def get_sandbox(id: SandboxId) -> Response:
        return answer(await registry.get(id))

    @router.patch("/{id}", response_model=SandboxInfo)
    async def update_sandbox(id: SandboxId, body: UpdateSandbox) -> Response:
        return answer(await registry.update(id, body))

    @router.delete("/{id}", response_model=Destroyed)
    async def delete_sandbox(id: SandboxId) -> Response:
        await registry.destroy(id)
        return answer(Destroyed(sandbox_id=id))

    @router.post("/{id}/destroy", response_model=Destroyed)
    async def destroy_sandbox(id: SandboxId) -> Response:
        await registry.destroy(id)
        return answer(Destroyed(sandbox_id=id))

    @router.post("/{id}/start", response_model=SandboxInfo)
    async def start_sandbox(id: SandboxId, body: StartSandbox | None = None) -> Response:
        return answer(await registry.start(id, body))

    @router.post("/{id}/stop", response_model=SandboxInfo)
    async def stop_sandbox(id: SandboxId) -> Response:
        return answer(await registry.stop(id))

    @router.post("/{id}/restart", response_model=SandboxInfo)
    async def restart_sandbox(id: SandboxId) -> Response:
        return answer(await registry.restart(id))

    @router.post("/{id}/sleep", response_model=SandboxInfo)
    async def put_sandbox_to_sleep(id: SandboxId, body: SleepSandbox | None = None) -> Response:
        return answer(await registry.sleep(id, body or SleepSandbox()))

    @router.post("/{id}/wake", response_model=SandboxInfo)
    async def wake_sandbox(id: SandboxId, body: WakeSandbox | None = None) -> Response:
        return answer(await registry.wake(id, body))

    @router.post("/{id}/touch", response_model=SandboxInfo)
    async def touch_sandbox(id: SandboxId) -> Response:
        return answer(await registry.renew(id))

    @router.put("/{id}/env", response_model=SandboxInfo)
    async def set_env(id: SandboxId, body: SetEnv) -> Response:
        return answer(await registry.set_env(id, body))

    @router.get("/{id}/metrics", response_model=SandboxMetrics)
    async def sandbox_metrics(
        id: SandboxId, since: Annotated[datetime | None, Query(description="Only samples after this time.")] = None
    ) -> Response:
        return answer(await registry.measure(id, _in_utc(since)))

    @router.get("/{id}/egress", response_model=EgressInfo)
    async def get_egress(id: SandboxId) -> Response:
        return answer(await registry.egress(id))

    @router.put("/{id}/egress", response_model=EgressInfo)
    async def set_egress(id: SandboxId, body: SetEgress) -> Response:
        return answer(await registry.set_egress(id, body))

    @router.get("/{id}/events", response_model=EventList)
    async def sandbox_events(
        id: SandboxId,
        after: Annotated[int, Query(ge=0, le=LARGEST, description="Only events with a larger id.")] = 0,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    ) -> Response:
        found = await registry.events(id, after=after, limit=limit)
        return answer(EventList(events=found, next_cursor=found[-1].id if found else None))

    @router.get("/{id}/events/stream", responses=STREAMED, response_class=Response)
    async def follow_sandbox_events(
        id: SandboxId,
        after: Annotated[int, Query(ge=0, le=LARGEST, description="Only events with a larger id.")] = 0,
        last_event_id: Annotated[str | None, Header(description="The same, as browsers say it.")] = None,
    ) -> Response:
        seen = last_seen(last_event_id, after)
        return EventStream(nullcontext(), lambda _: registry.follow(id, seen), lambda error: _failure(id, error))

    return router
