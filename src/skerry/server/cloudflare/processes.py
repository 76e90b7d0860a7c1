"""Background processes and the ports they open."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, cast

from skerry.errors import ProcessExistsError, ProcessExitedError, ProcessNotFoundError, SkerryError
from skerry.models import KillProcess, ProcessInfo, ProcessStatus, StartProcess, WaitForPort, WaitRequest
from skerry.server.cloudflare.box import Answer, Box, Json, Stream
from skerry.server.cloudflare.faults import Fault, invalid, moment, written


def facts_of(info: ProcessInfo, *, ended: bool = True) -> Json:
    facts: Json = {"id": info.id, "pid": info.pid, "command": info.command, "status": info.status.value}
    facts["startTime"] = written(info.start_time)
    if ended and info.end_time is not None:
        facts["endTime"] = written(info.end_time)
    if info.exit_code is not None and info.status is not ProcessStatus.KILLED:
        facts["exitCode"] = info.exit_code
    if info.session_id is not None:
        facts["sessionId"] = info.session_id
    return facts


def _unknown(id: str) -> Fault:
    return Fault("PROCESS_NOT_FOUND", f"Process {id} not found", {"processId": id})


async def start(box: Box) -> Answer:
    request = StartProcess(
        command=box.command(),
        process_id=box.maybe("processId"),
        cwd=box.maybe("cwd"),
        env=box.env(),
        session=await box.session(),
        timeout=box.timeout(),
        auto_cleanup=box.body.get("autoCleanup") is not False,
    )
    try:
        info = await box.runtime.processes.start(request)
    except ProcessExistsError:
        # An id may be used again once its process has ended.
        if not (await box.runtime.processes.get(request.process_id or "")).status.ended:
            raise
        box.runtime.processes.forget(request.process_id or "")
        info = await box.runtime.processes.start(request)
    return box.done(processId=info.id, pid=info.pid, command=info.command)


async def list_processes(box: Box) -> Answer:
    wanted = box.query.get("status")
    if wanted is not None and wanted not in ProcessStatus._value2member_map_:
        raise invalid(f"Unknown status '{wanted}'", status=wanted)
    found = await box.runtime.processes.list(None if wanted is None else ProcessStatus(wanted))
    return box.done(processes=[facts_of(info, ended=False) for info in found])


async def get(box: Box) -> Answer:
    try:
        info = await box.runtime.processes.get(box.names["id"])
    except ProcessNotFoundError:
        raise _unknown(box.names["id"]) from None
    return box.done(process=facts_of(info))


async def kill(box: Box) -> Answer:
    id = box.names["id"]
    try:
        await box.runtime.processes.kill(id, KillProcess())
    except ProcessNotFoundError:
        raise _unknown(id) from None
    return box.done(processId=id)


async def kill_all(box: Box) -> Answer:
    return box.done(cleanedCount=await box.runtime.processes.kill_all())


async def logs(box: Box) -> Answer:
    id = box.names["id"]
    try:
        found = await box.runtime.processes.logs(id)
    except ProcessNotFoundError:
        raise _unknown(id) from None
    return box.done(processId=id, stdout=found.stdout, stderr=found.stderr)


async def stream(box: Box) -> Answer:
    id = box.names["id"]
    try:
        info = await box.runtime.processes.get(id)
    except ProcessNotFoundError:
        raise _unknown(id) from None
    return Stream(_log(box, info))


async def _log(box: Box, info: ProcessInfo) -> AsyncIterator[Json]:
    about = {"processId": info.id, "command": info.command, "status": info.status.value}
    yield {"type": "process_info", **about, "timestamp": moment()}
    async with aclosing(cast("Any", box.runtime.processes.stream(info.id))) as events:
        async for event in events:
            if event.type != "exit":
                yield {"type": event.type, "data": event.data, "processId": info.id, "timestamp": moment()}
                continue
            ended = await box.runtime.processes.get(info.id)
            code = event.exit_code
            if ended.status is ProcessStatus.KILLED:
                said = "Process was killed"
            else:
                said = f"Process {'completed' if code == 0 else 'failed'} with exit code {code}"
            yield {"type": "exit", "processId": info.id, "exitCode": code, "data": said, "timestamp": moment()}


# -- ports -------------------------------------------------------------------------------------------------------------


async def watch_port(box: Box) -> Answer:
    port = box.maybe("port", int)
    if port is None or not 1 <= port <= 65535:
        raise Fault("INVALID_PORT_NUMBER", "port must be a number from 1 to 65535", {"port": port})
    mode = box.maybe("mode") or "http"
    if mode not in ("http", "tcp"):
        raise invalid("mode must be http or tcp", mode=mode)
    facts = {"port": port, "mode": mode, "path": box.maybe("path") or "/"}
    for name, field in (("statusMin", "status_min"), ("statusMax", "status_max")):
        if box.maybe(name, int) is not None:
            facts[field] = box.body[name]
    return Stream(_opening(box, facts, box.maybe("processId")))


async def _opening(box: Box, facts: Json, process: str | None) -> AsyncIterator[Json]:
    port = facts["port"]
    yield {"type": "watching", "port": port}
    try:
        if process is None:
            request = WaitForPort(**{name: value for name, value in facts.items() if name != "port"}, timeout=None)
            found = await box.runtime.wait_for_port(port, request)
        else:
            found = await box.runtime.processes.wait(process, WaitRequest(until="port", **facts, timeout=None))
    except ProcessNotFoundError:
        yield {"type": "error", "port": port, "error": "Process not found"}
    except ProcessExitedError:
        ended = facts_of(await box.runtime.processes.get(process or ""))
        yield {
            "type": "process_exited",
            "port": port,
            **({} if "exitCode" not in ended else {"exitCode": ended["exitCode"]}),
        }
    except SkerryError as error:
        yield {"type": "error", "port": port, "error": str(error)}
    else:
        ready: Json = {"type": "ready", "port": port}
        if found.status_code is not None:
            ready["statusCode"] = found.status_code
        yield ready
