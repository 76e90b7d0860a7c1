"""Syncing workspaces with buckets."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from skerry.control.registry import Registry
from skerry.models import Deleted, StoredWorkspace, StoredWorkspaces, SyncRequest, SyncResult
from skerry.server.answers import answer
from skerry.server.disconnect import until_disconnect
from skerry.server.nouns import noun_router
from skerry.server.paths import SandboxId

BucketName = Annotated[str | None, Query(max_length=255, description="The bucket it lies in, if that is not known.")]


def routes(registry: Registry) -> APIRouter:
    router = noun_router("/v1", "workspaces")

    @router.post("/sandboxes/{id}/sync", response_model=SyncResult)
    async def sync_workspace(id: SandboxId, request: Request, body: SyncRequest | None = None) -> Response:
        async with registry.use(id) as runtime:
            work = registry.workspaces.sync(runtime, id, body or SyncRequest())
            return answer(await until_disconnect(request.receive, work))

    @router.get("/sandboxes/{id}/sync", response_model=StoredWorkspace)
    async def get_workspace(id: SandboxId) -> Response:
        return answer(await registry.workspaces.get(id))

    @router.get("/workspaces", response_model=StoredWorkspaces)
    async def list_workspaces() -> Response:
        return answer(await registry.workspaces.list())

    @router.delete("/workspaces/{id}", response_model=Deleted)
    async def delete_workspace(id: SandboxId, bucket: BucketName = None) -> Response:
        return answer(Deleted(files=await registry.workspaces.delete(id, bucket)))

    return router
