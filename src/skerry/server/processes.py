"""Background processes, their logs, and waiting for them or for a port."""

from __future__ import annotations

from typing import Annotated, cast

from fastapi import APIRouter, Path, Query, Request, Response

from skerry.control.inquiry import asked_to_run
from skerry.control.registry import Registry
from skerry.models import (
    Done,
    KilledCount,
    KillProcess,
    LogEvent,
    ProcessInfo,
    ProcessList,
    ProcessLogs,
    ProcessStatus,
    StartProcess,
    WaitForPort,
    WaitRequest,
    WaitResult,
)
from skerry.server.answers import answer
from skerry.server.bounds import BoundedRequest
from skerry.server.commands import require_command
from skerry.server.disconnect import until_disconnect
from skerry.server.downloads import RAW_BODY
from skerry.server.nouns import noun_router
from skerry.server.paths import SandboxId
from skerry.server.sse import EventStream, documented

Port = Annotated[int, Path(ge=1, le=65535)]


def routes(registry: Registry) -> APIRouter:
    router = noun_router("/v1/sandboxes/{id}", "processes")

    @router.post("/processes", status_code=201, response_model=ProcessInfo)
    async def start_process(id: SandboxId, body: StartProcess) -> Response:
        require_command(body)
        asked_to_run(body.command)
        async with registry.use(id) as runtime:
            return answer(await runtime.processes.start(body), 201)

    @router.get("/processes", response_model=ProcessList)
    async def list_processes(
        id: SandboxId, status: ProcessStatus | None = None, session: str | None = None
    ) -> Response:
        async with registry.use(id) as runtime:
            return answer(ProcessList(processes=await runtime.processes.list(status, session)))

    @router.delete("/processes", response_model=KilledCount)
    async def kill_all_processes(id: SandboxId) -> Response:
        async with registry.use(id) as runtime:
            return answer(KilledCount(killed=await runtime.processes.kill_all()))

    @router.post("/processes/cleanup", response_model=KilledCount)
    async def forget_finished_processes(id: SandboxId) -> Response:
        async with registry.use(id) as runtime:
            return answer(KilledCount(killed=await runtime.processes.cleanup()))

    @router.get("/processes/{pid}", response_model=ProcessInfo)
    async def get_process(id: SandboxId, pid: str) -> Response:
        async with registry.use(id) as runtime:
            return answer(await runtime.processes.get(pid))

    @router.post("/processes/{pid}/kill", response_model=ProcessInfo)
    async def kill_process(id: SandboxId, pid: str, body: KillProcess | None = None) -> Response:
        async with registry.use(id) as runtime:
            return answer(await runtime.processes.kill(pid, body or KillProcess()))

    @router.delete("/processes/{pid}", response_model=ProcessInfo)
    async def delete_process(id: SandboxId, pid: str, signal: str = "SIGTERM") -> Response:
        number = int(signal) if signal.isascii() and signal.isdigit() and len(signal) < 4 else signal
        async with registry.use(id) as runtime:
            return answer(await runtime.processes.kill(pid, KillProcess(signal=number)))

    @router.get("/processes/{pid}/logs", response_model=ProcessLogs)
    async def process_logs(id: SandboxId, pid: str) -> Response:
        async with registry.use(id) as runtime:
            return answer(await runtime.processes.logs(pid))

    @router.get("/processes/{pid}/logs/stream", responses=documented(LogEvent), response_class=Response)
    async def stream_process_logs(id: SandboxId, pid: str, replay: bool = True, follow: bool = True) -> Response:
        return EventStream(
            registry.use(id),
            lambda runtime: runtime.processes.stream(pid, replay=replay, follow=follow),
            lambda error: LogEvent(type="error", process_id=pid, data=str(error)),
        )

    @router.post(
        "/processes/{pid}/stdin",
        response_model=Done,
        openapi_extra=RAW_BODY,
    )
    async def write_stdin(
        id: SandboxId,
        pid: str,
        request: Request,
        eof: Annotated[bool, Query(description="Close it after the body.")] = False,
    ) -> Response:
        async with registry.use(id) as runtime:
            async for chunk in cast(BoundedRequest, request).stream():
                await runtime.processes.write(pid, chunk, False)
            await runtime.processes.write(pid, b"", eof)
        return answer(Done(sandbox_id=id))

    @router.post("/processes/{pid}/wait", response_model=WaitResult)
    async def wait_for_process(id: SandboxId, pid: str, request: Request, body: WaitRequest | None = None) -> Response:
        async with registry.use(id) as runtime:
            return answer(await until_disconnect(request.receive, runtime.processes.wait(pid, body or WaitRequest())))

    @router.post("/ports/{port}/wait", response_model=WaitResult)
    async def wait_for_port(id: SandboxId, port: Port, request: Request, body: WaitForPort | None = None) -> Response:
        async with registry.use(id) as runtime:
            return answer(await until_disconnect(request.receive, runtime.wait_for_port(port, body or WaitForPort())))

    return router
