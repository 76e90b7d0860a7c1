"""Shipping directories and machines to buckets, and bringing them back."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Query, Request, Response

from skerry.control.registry import Registry
from skerry.errors import SkerryError
from skerry.models import (
    BackupEvent,
    BackupInfo,
    BackupList,
    BackupRequest,
    BackupResult,
    BucketList,
    Done,
    RestoreRequest,
    RestoreResult,
)
from skerry.server.answers import answer
from skerry.server.disconnect import until_disconnect
from skerry.server.nouns import noun_router
from skerry.server.paths import SandboxId
from skerry.server.sse import EventStream, documented

Accept = Annotated[str | None, Header(description="`text/event-stream` for events on the way.")]
BucketName = Annotated[str | None, Query(max_length=255, description="Look only in this bucket.")]
Filter = Annotated[str | None, Query(max_length=255)]


def _failed(error: SkerryError) -> BackupEvent:
    return BackupEvent(type="error", error=error.message)


def routes(registry: Registry) -> APIRouter:
    router = noun_router("/v1", "backups")

    @router.post("/sandboxes/{id}/backup", response_model=BackupResult, responses=documented(BackupEvent))
    async def make_backup(
        id: SandboxId, request: Request, body: BackupRequest | None = None, accept: Accept = None
    ) -> Response:
        wanted = body or BackupRequest()
        if "text/event-stream" in (accept or ""):
            return EventStream(
                registry.use(id), lambda runtime: registry.backups.backup_events(runtime, id, wanted), _failed
            )
        async with registry.use(id) as runtime:
            return answer(await until_disconnect(request.receive, registry.backups.backup(runtime, id, wanted)))

    @router.post("/sandboxes/{id}/restore", response_model=RestoreResult, responses=documented(BackupEvent))
    async def restore_backup(id: SandboxId, request: Request, body: RestoreRequest, accept: Accept = None) -> Response:
        if "text/event-stream" in (accept or ""):
            return EventStream(
                registry.refill(id), lambda runtime: registry.backups.restore_events(runtime, id, body), _failed
            )
        async with registry.refill(id) as runtime:
            return answer(await until_disconnect(request.receive, registry.backups.restore(runtime, id, body)))

    @router.get("/backups", response_model=BackupList)
    async def list_backups(sandbox: Filter = None, name: Filter = None, bucket: BucketName = None) -> Response:
        return answer(await registry.backups.list(sandbox=sandbox, name=name, bucket=bucket))

    @router.get("/backups/{backup}", response_model=BackupInfo)
    async def get_backup(backup: str, bucket: BucketName = None) -> Response:
        return answer(await registry.backups.get(backup, bucket))

    @router.delete("/backups/{backup}", response_model=Done)
    async def delete_backup(backup: str, bucket: BucketName = None) -> Response:
        await registry.backups.delete(backup, bucket)
        return answer(Done())

    @router.get("/buckets", response_model=BucketList)
    async def list_buckets() -> Response:
        return answer(BucketList(buckets=registry.backups.buckets()))

    return router
