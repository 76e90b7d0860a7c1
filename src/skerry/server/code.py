"""Code, and the contexts it runs in."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from skerry.control.inquiry import asked_to_run
from skerry.control.registry import Registry
from skerry.errors import SkerryError
from skerry.models import (
    CodeContext,
    CodeError,
    CodeEvent,
    ContextList,
    CreateContext,
    Done,
    Execution,
    Interrupted,
    RunCode,
    WarmInterpreters,
)
from skerry.server.answers import answer
from skerry.server.disconnect import until_disconnect
from skerry.server.nouns import noun_router
from skerry.server.paths import SandboxId
from skerry.server.sse import EventStream, documented


def _broken_off(error: SkerryError) -> CodeEvent:
    return CodeEvent(type="error", error=CodeError(name=type(error).__name__, message=str(error)))


def routes(registry: Registry) -> APIRouter:
    router = noun_router("/v1/sandboxes/{id}", "code")

    @router.post("/code", response_model=Execution)
    async def run_code(id: SandboxId, body: RunCode, request: Request) -> Response:
        asked_to_run(body.code)
        async with registry.use(id) as runtime:
            return answer(await until_disconnect(request.receive, runtime.code.run(body)))

    @router.post("/code/stream", responses=documented(CodeEvent), response_class=Response)
    async def run_code_stream(id: SandboxId, body: RunCode) -> Response:
        asked_to_run(body.code)
        return EventStream(registry.use(id), lambda runtime: runtime.code.stream(body), _broken_off)

    @router.post("/code/warm", response_model=Done)
    async def warm_interpreters(id: SandboxId, request: Request, body: WarmInterpreters | None = None) -> Response:
        async with registry.use(id) as runtime:
            await until_disconnect(request.receive, runtime.code.warm(body or WarmInterpreters()))
        return answer(Done(sandbox_id=id))

    @router.post("/contexts", status_code=201, response_model=CodeContext)
    async def create_context(id: SandboxId, body: CreateContext | None = None) -> Response:
        async with registry.use(id) as runtime:
            return answer(await runtime.code.create(body or CreateContext()), 201)

    @router.get("/contexts", response_model=ContextList)
    async def list_contexts(id: SandboxId) -> Response:
        async with registry.use(id) as runtime:
            return answer(ContextList(contexts=runtime.code.list()))

    @router.get("/contexts/{cid}", response_model=CodeContext)
    async def get_context(id: SandboxId, cid: str) -> Response:
        async with registry.use(id) as runtime:
            return answer(runtime.code.get(cid))

    @router.delete("/contexts/{cid}", response_model=Done)
    async def delete_context(id: SandboxId, cid: str) -> Response:
        async with registry.use(id) as runtime:
            await runtime.code.delete(cid)
        return answer(Done(sandbox_id=id))

    @router.post("/contexts/{cid}/restart", response_model=CodeContext)
    async def restart_context(id: SandboxId, cid: str) -> Response:
        async with registry.use(id) as runtime:
            return answer(await runtime.code.restart(cid))

    @router.post("/contexts/{cid}/interrupt", response_model=Interrupted)
    async def interrupt_context(id: SandboxId, cid: str) -> Response:
        async with registry.use(id) as runtime:
            return answer(Interrupted(sandbox_id=id, interrupted=await runtime.code.interrupt(cid)))

    return router
