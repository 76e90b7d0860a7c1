"""Snapshots of sandboxes: take, list, delete, fork, go back, see what changed."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query, Response

from skerry.control.registry import Registry
from skerry.models import (
    CreateSnapshot,
    Diff,
    Done,
    ForkResult,
    ForkSandbox,
    RollbackSandbox,
    SandboxInfo,
    SnapshotInfo,
    SnapshotList,
    shown_id,
)
from skerry.providers.contract import Changes
from skerry.server.answers import answer
from skerry.server.downloads import BYTES, changes_download
from skerry.server.nouns import noun_router
from skerry.server.paths import SandboxId

TAR = "application/x-tar"
LONGEST_LIST = 100_000

Reference = Annotated[str | None, Query(min_length=1, max_length=80, description="The id or name of a snapshot.")]
Force = Annotated[bool, Query(description="Also one that sandboxes were made from; they do not need it.")]
Format = Annotated[
    Literal["json", "tar"] | None, Query(description="A list or a tar; the Accept header says it where this does not.")
]
Accept = Annotated[str, Header(include_in_schema=False)]

_CHANGES: dict[int | str, dict[str, Any]] = {
    200: {"description": "The changes, as a list or as a layer.", "content": {TAR: {"schema": BYTES}}}
}


async def _changes(use: AbstractAsyncContextManager[Changes], name: str, format: str | None, accept: str) -> Response:
    if format == "tar" or (format is None and TAR in accept):
        return changes_download(use, name)
    async with use as changes:
        found, truncated = await changes.list_(LONGEST_LIST)
    return answer(Diff(changes=found, truncated=truncated))


def routes(registry: Registry) -> APIRouter:
    router = noun_router("/v1", "snapshots")

    @router.post("/sandboxes/{id}/snapshots", status_code=201, response_model=SnapshotInfo)
    async def create_snapshot(id: SandboxId, body: CreateSnapshot | None = None) -> Response:
        return answer(await registry.snapshots.create(id, body or CreateSnapshot()), 201)

    @router.post("/sandboxes/{id}/fork", status_code=201, response_model=ForkResult)
    async def fork_sandbox(id: SandboxId, body: ForkSandbox | None = None) -> Response:
        return answer(await registry.snapshots.fork(id, body or ForkSandbox()), 201)

    @router.post("/sandboxes/{id}/rollback", response_model=SandboxInfo)
    async def rollback_sandbox(id: SandboxId, body: RollbackSandbox) -> Response:
        return answer(await registry.snapshots.rollback(id, body))

    @router.get("/sandboxes/{id}/diff", response_model=Diff, responses=_CHANGES)
    async def diff_sandbox(
        id: SandboxId, since: Reference = None, format: Format = None, accept: Accept = ""
    ) -> Response:
        return await _changes(registry.snapshots.sandbox_diff(id, since), shown_id(id), format, accept)

    @router.get("/snapshots", response_model=SnapshotList)
    async def list_snapshots(
        sandbox: Annotated[str | None, Query(description="Only those of this sandbox.")] = None,
    ) -> Response:
        return answer(SnapshotList(snapshots=await registry.snapshots.list_(sandbox)))

    @router.get("/snapshots/{snapshot}", response_model=SnapshotInfo)
    async def get_snapshot(snapshot: str) -> Response:
        return answer(await registry.snapshots.get(snapshot))

    @router.delete("/snapshots/{snapshot}", response_model=Done)
    async def delete_snapshot(snapshot: str, force: Force = False) -> Response:
        await registry.snapshots.delete(snapshot, force=force)
        return answer(Done())

    @router.get("/snapshots/{snapshot}/diff", response_model=Diff, responses=_CHANGES)
    async def diff_snapshot(
        snapshot: str, to: Reference = None, format: Format = None, accept: Accept = ""
    ) -> Response:
        return await _changes(registry.snapshots.diff(snapshot, to), snapshot, format, accept)

    return router
