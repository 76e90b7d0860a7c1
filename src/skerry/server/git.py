"""Cloning repositories into a sandbox."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from skerry.control.registry import Registry
from skerry.models import GitClone, GitCloneResult, GitEvent
from skerry.server.answers import answer
from skerry.server.disconnect import until_disconnect
from skerry.server.nouns import noun_router
from skerry.server.paths import SandboxId
from skerry.server.sse import EventStream, documented


def routes(registry: Registry) -> APIRouter:
    router = noun_router("/v1/sandboxes/{id}/git", "git")

    @router.post("/clone", response_model=GitCloneResult)
    async def git_clone(id: SandboxId, body: GitClone, request: Request) -> Response:
        async with registry.use(id) as runtime:
            return answer(await until_disconnect(request.receive, runtime.git.clone(body)))

    @router.post("/clone/stream", responses=documented(GitEvent), response_class=Response)
    async def git_clone_stream(id: SandboxId, body: GitClone) -> Response:
        return EventStream(
            registry.use(id),
            lambda runtime: runtime.git.clone_stream(body),
            lambda error: GitEvent(type="error", error=error.to_wire()["error"]),
        )

    return router
