"""Sessions and commands."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, cast

from skerry.errors import FileError, MissingCommandError, SessionNotFoundError
from skerry.models import CreateSession, ExecEvent, ExecRequest
from skerry.server.cloudflare import mounts
from skerry.server.cloudflare.box import HOME, SESSIONLESS, Answer, Box, Json, Stream
from skerry.server.cloudflare.faults import Fault, invalid, moment

_SOURCED = re.compile(r"^/run/skerry[\w-]*/\d+-bash: ", re.MULTILINE)


async def create_session(box: Box) -> Answer:
    id = box.maybe("id") or f"session_{int(time.time() * 1000)}_{secrets.token_hex(6)}"
    env = {name: value for name, value in box.env().items() if value is not None}
    cwd = box.maybe("cwd") or "/workspace"
    placement = box.runtime.sessions.env.get("CLOUDFLARE_PLACEMENT_ID")
    if any(session.id == id for session in box.runtime.sessions.list()):
        raise _exists(id, placement)
    options = {"id": id, "env": env, "isolation": bool(box.body.get("isolation", False))}
    timeout = box.maybe("commandTimeoutMs", (int, float))
    if timeout:
        options["command_timeout"] = timeout
    try:
        await box.runtime.sessions.create(CreateSession(**options, cwd=cwd))
    except FileError:
        # A directory that is not there is no reason to have no session.
        await box.runtime.sessions.create(CreateSession(**options, cwd=HOME))
    data = {"id": id, "options": {"cwd": cwd, "env": env}, "ready": True}
    return {"success": True, "data": data, "id": id, "containerPlacementId": placement, "timestamp": moment()}


def _exists(id: str, placement: str | None) -> Fault:
    return Fault(
        "SESSION_ALREADY_EXISTS",
        f"Session '{id}' already exists",
        {"sessionId": id, "containerPlacementId": placement},
    )


async def list_sessions(box: Box) -> Answer:
    return box.done(data=[session.id for session in box.runtime.sessions.list()])


async def delete_session(box: Box) -> Answer:
    id = box.maybe("sessionId")
    if not id:
        raise invalid("sessionId is required")
    try:
        await box.runtime.sessions.delete(id)
    except SessionNotFoundError:
        context = {"sessionId": id, "originalError": "Session not found"}
        raise Fault("INTERNAL_ERROR", f"Session '{id}' not found", context) from None
    return box.done(sessionId=id)


def shown(stderr: str) -> str:
    """A session's bash reads its commands from a file, and says so; programs look for what it says anywhere else."""
    return _SOURCED.sub("bash: ", stderr) if "/run/skerry" in stderr else stderr


def _request(box: Box, session: str | None) -> ExecRequest:
    return ExecRequest(
        command=box.command(), cwd=box.maybe("cwd"), env=box.env(), timeout=box.timeout(), session=session
    )


async def execute(box: Box) -> Answer:
    if box.body.get("background") is True:
        from skerry.server.cloudflare.processes import start

        return await start(box)
    command, session = box.command(), await box.session()
    request = _request(box, session)
    known = await mounts.instead(box, command) if box.body.get("origin") == "internal" else None
    try:
        result = known or await box.runtime.exec(request)
    except MissingCommandError:
        raise Fault("INVALID_COMMAND", "The command is empty", {"command": command}) from None
    if result.timed_out:
        said = f"Command timeout after {request.timeout:g}ms" if request.timeout else "Command timeout"
        where = f" in session '{session}'" if session else ""
        message = f"Failed to execute command '{command}'{where}: {said}"
        raise Fault("COMMAND_EXECUTION_ERROR", message, {"command": command, "stderr": said})
    if result.shell_ended and session is not None:
        raise Fault(
            "SESSION_TERMINATED",
            f"Session '{session}' shell exited (exit code: {result.exit_code})",
            {"sessionId": session, "exitCode": result.exit_code},
        )
    stdout, stderr = result.stdout, shown(result.stderr)
    if session is not None:
        stdout, stderr = stdout.removesuffix("\n"), stderr.removesuffix("\n")
    facts = {"success": result.success, "exitCode": result.exit_code, "stdout": stdout, "stderr": stderr}
    facts |= {"command": command, "duration": round(result.duration), "timestamp": moment()}
    if box.session_id is not None:
        facts["sessionId"] = box.session_id
    return facts


async def execute_stream(box: Box) -> Answer:
    return Stream(_events(box, _request(box, await box.session())))


async def _events(box: Box, request: ExecRequest) -> AsyncIterator[Json]:
    async with aclosing(cast("Any", box.runtime.exec_stream(request))) as events:
        async for event in events:
            yield _event(event, box)


def _event(event: ExecEvent, box: Box) -> Json:
    facts: Json = {"type": event.type, "timestamp": moment()}
    match event.type:
        case "start":
            facts["command"] = event.command
            if box.session_id not in (None, SESSIONLESS):
                facts["sessionId"] = box.session_id
        case "stdout":
            facts["data"] = event.data
        case "stderr":
            facts["data"] = shown(event.data or "")
        case "complete":
            facts["exitCode"] = event.exit_code
            result = dict(event.result or {})
            result["stderr"] = shown(str(result.get("stderr") or ""))
            facts["result"] = {name: result.get(name) for name in ("stdout", "stderr", "exitCode", "success")}
        case "error":
            facts |= {"error": event.error, "data": event.error}
    return facts
