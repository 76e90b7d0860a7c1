"""The audit log: looked through, exported and verified. There is no way to change it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Response
from fastapi.responses import StreamingResponse
from pydantic import AwareDatetime

from skerry.control.registry import Registry
from skerry.models import AuditPage, AuditVerification, Outcome
from skerry.server.answers import answer
from skerry.server.nouns import noun_router
from skerry.server.paths import LARGEST

Text = Annotated[str | None, Query(min_length=1, max_length=200)]
NDJSON = "application/x-ndjson"
LINES: dict[int | str, dict[str, Any]] = {
    200: {"description": "An AuditEntry on each line.", "content": {NDJSON: {"schema": {"type": "string"}}}}
}


def _wanted(
    since: Annotated[AwareDatetime | None, Query(description="Only entries from then on.")] = None,
    until: Annotated[AwareDatetime | None, Query(description="Only entries before.")] = None,
    sandbox: Text = None,
    actor: Text = None,
    owner: Text = None,
    operation: Text = None,
    outcome: Outcome | None = None,
) -> dict[str, Any]:
    asked: dict[str, str | datetime | None] = {
        "since": since,
        "until": until,
        "sandbox_id": sandbox and sandbox.lower(),
        "actor": actor,
        "owner": owner,
        "operation": operation,
        "outcome": outcome,
    }
    return {name: value for name, value in asked.items() if value is not None}


Wanted = Annotated[dict[str, Any], Depends(_wanted)]


def routes(registry: Registry) -> APIRouter:
    router = noun_router("/v1/audit", "audit")

    @router.get("", response_model=AuditPage)
    async def list_audit(
        wanted: Wanted,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        cursor: Annotated[int | None, Query(ge=1, le=LARGEST, description="Only entries with a smaller id.")] = None,
    ) -> Response:
        return answer(await registry.audit.page(wanted, cursor, limit))

    @router.get("/export", response_class=Response, responses=LINES)
    async def export_audit(wanted: Wanted) -> Response:
        return StreamingResponse(_lines(registry, wanted), media_type=NDJSON)

    @router.get("/verify", response_model=AuditVerification)
    async def verify_audit() -> Response:
        return answer(await registry.audit.verify())

    return router


async def _lines(registry: Registry, wanted: dict[str, Any]) -> AsyncGenerator[bytes, None]:
    block: list[bytes] = []
    async for entry in registry.audit.all(wanted):
        block.append(entry.model_dump_json(by_alias=True).encode() + b"\n")
        if len(block) == 200:
            yield b"".join(block)
            block.clear()
    yield b"".join(block)
