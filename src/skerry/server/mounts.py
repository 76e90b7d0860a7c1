"""Buckets mounted in a sandbox."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response

from skerry.control.registry import Registry
from skerry.models import MountBucket, MountList, MountResult, UnmountBucket
from skerry.server.answers import answer
from skerry.server.nouns import noun_router
from skerry.server.paths import SandboxId

MountPath = Annotated[str, Query(alias="mountPath", description="Where it is mounted.")]


def routes(registry: Registry) -> APIRouter:
    router = noun_router("/v1/sandboxes/{id}", "mounts")

    @router.post("/mount", response_model=MountResult)
    async def mount_bucket(id: SandboxId, body: MountBucket | None = None) -> Response:
        return answer(MountResult(sandbox_id=id, mount=await registry.mounts.mount(id, body or MountBucket())))

    @router.post("/unmount", response_model=MountResult)
    async def unmount_bucket(id: SandboxId, body: UnmountBucket | None = None) -> Response:
        path = (body or UnmountBucket()).mount_path
        return answer(MountResult(sandbox_id=id, mount=await registry.mounts.unmount(id, path)))

    @router.delete("/mount", response_model=MountResult)
    async def delete_mount(id: SandboxId, path: MountPath = "/persist") -> Response:
        return answer(MountResult(sandbox_id=id, mount=await registry.mounts.unmount(id, path)))

    @router.get("/mounts", response_model=MountList)
    async def list_mounts(id: SandboxId) -> Response:
        return answer(MountList(sandbox_id=id, mounts=await registry.mounts.list(id)))

    return router
