"""Making a sandbox ready for a project in one request."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Request, Response

from skerry.control.registry import Registry
from skerry.errors import SkerryError
from skerry.models import Bootstrap, BootstrapEvent, BootstrapResult
from skerry.server.answers import answer
from skerry.server.disconnect import until_disconnect
from skerry.server.nouns import noun_router
from skerry.server.paths import SandboxId
from skerry.server.sse import EventStream, documented

Accept = Annotated[str | None, Header(description="`text/event-stream` for each step as it is done.")]


def _failed(error: SkerryError) -> BootstrapEvent:
    return BootstrapEvent(type="error", error=error.message)


def routes(registry: Registry) -> APIRouter:
    router = noun_router("/v1/sandboxes/{id}", "bootstrap")

    @router.post("/bootstrap", response_model=BootstrapResult, responses=documented(BootstrapEvent))
    async def bootstrap(
        id: SandboxId, request: Request, body: Bootstrap | None = None, accept: Accept = None
    ) -> Response:
        wanted = body or Bootstrap()
        registry.bootstraps.check(id, wanted)
        if "text/event-stream" in (accept or ""):
            return EventStream(
                registry.use(id), lambda runtime: registry.bootstraps.events(runtime, id, wanted), _failed
            )
        async with registry.use(id) as runtime:
            return answer(await until_disconnect(request.receive, registry.bootstraps.run(runtime, id, wanted)))

    return router
