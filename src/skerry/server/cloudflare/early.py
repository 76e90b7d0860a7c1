"""What clients of 0.3 say and expect differently. They have a base URL of their own: ``…/container-0.3``.

Nothing in their requests tells them from later ones, and code execution has another format there: a line of JSON for
each event. Beside that they name a session ``id``, must have made it before they use it, put options into an object,
read errors from ``error``, and may not touch the system's directories.
"""

from __future__ import annotations

import posixpath
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from skerry.errors import CircuitOpenError, SessionNotFoundError
from skerry.models import KillProcess, ProcessStatus
from skerry.server.cloudflare import code, commands, files, processes, routes
from skerry.server.cloudflare.box import Answer, Box, Json, Operation, Stream
from skerry.server.cloudflare.faults import Fault, invalid, moment
from skerry.server.cloudflare.writing import as_json

_SYSTEM = ("/etc", "/var", "/usr", "/bin", "/sbin", "/boot", "/dev", "/proc", "/sys")
_PATHS = ("path", "oldPath", "newPath", "sourcePath", "destinationPath")


class UnknownSession(Fault):
    def __init__(self, id: str, known: list[str]) -> None:
        super().__init__("SESSION_DESTROYED", f"Session '{id}' not found", {"sessionId": id}, status=404)
        self.known = known


def fault_wire(fault: Fault) -> Json:
    said = fault.to_wire()
    said["error"] = fault.message
    if fault.code == "INTERPRETER_NOT_READY":
        is_open = isinstance(fault.cause, CircuitOpenError)
        said |= {"status": "circuit_open"} if is_open else {"status": "initializing", "progress": 0}
    if isinstance(fault, UnknownSession):
        said["availableSessions"] = fault.known
    return said


def as_line(event: Json) -> bytes:
    return as_json(event) + b"\n"


# -- sessions and commands ---------------------------------------------------------------------------------------------


async def create_session(box: Box) -> Answer:
    """One that is there is used as it is. Its processes are its own, unless it is asked not to."""
    if not box.maybe("id"):
        raise invalid("Session ID is required")
    box.body.setdefault("isolation", True)
    try:
        await commands.create_session(box)
    except Fault as fault:
        if fault.code != "SESSION_ALREADY_EXISTS":
            raise
    return box.done(id=box.body["id"], message=f"Session '{box.body['id']}' is ready")


def _known(box: Box) -> None:
    id = box.maybe("id")
    if not id or not box.maybe("command"):
        raise invalid("Session ID and command are required")
    try:
        box.runtime.sessions.find(id)
    except SessionNotFoundError:
        raise UnknownSession(id, [session.id for session in box.runtime.sessions.list()]) from None
    cwd = box.maybe("cwd")
    if cwd is not None and not cwd.startswith("/"):
        raise invalid("cwd must be an absolute path starting with /", cwd=cwd)
    box.body["sessionId"] = id


async def execute(box: Box) -> Answer:
    _known(box)
    return await commands.execute(box)


async def execute_stream(box: Box) -> Answer:
    _known(box)
    answer = await commands.execute_stream(box)
    assert isinstance(answer, Stream)
    return Stream(_named(answer.events, box.body["command"]))


async def _named(events: AsyncIterator[Json], command: str) -> AsyncIterator[Json]:
    async for event in events:
        yield {**event, "command": command}


# -- files -------------------------------------------------------------------------------------------------------------


def _checked(operation: Operation, *, root: bool = False) -> Operation:
    async def work(box: Box) -> Answer:
        for name in _PATHS:
            given = box.body.get(name)
            if not isinstance(given, str):
                continue
            path = posixpath.normpath("/" + given.lstrip("/")) if given.startswith("/") else given
            dangerous = any(path == place or path.startswith(place + "/") for place in _SYSTEM)
            if dangerous or (path == "/" and not root) or ".." in given.split("/"):
                raise invalid("Dangerous path not allowed", path=given)
        return await operation(box)

    return work


async def checkout(box: Box) -> Answer:
    box.body.setdefault("branch", "main")
    if not box.maybe("targetDir"):
        box.body["targetDir"] = f"repo_{int(time.time() * 1000)}_{secrets.token_hex(3)}"
    answer = await files.checkout(box)
    assert isinstance(answer, dict)
    return answer | {"stdout": "", "stderr": "", "exitCode": 0}


# -- processes ---------------------------------------------------------------------------------------------------------


async def start_process(box: Box) -> Answer:
    options = box.maybe("options", dict) or {}
    box.body = {**options, **box.body}
    if options.get("timeout") is not None:
        box.body["timeoutMs"] = options["timeout"]
    started = await processes.start(box)
    assert isinstance(started, dict)
    info = await box.runtime.processes.get(started["processId"])
    return box.done(process=processes.facts_of(info))


def _of_session(box: Box, info: Any) -> bool:
    wanted = box.query.get("session")
    return wanted is None or info.session_id == wanted


async def list_processes(box: Box) -> Answer:
    found = [info for info in await box.runtime.processes.list(None) if _of_session(box, info)]
    return box.done(processes=[processes.facts_of(info) for info in found], count=len(found))


async def kill_all(box: Box) -> Answer:
    running = [info for info in await box.runtime.processes.list(ProcessStatus.RUNNING) if _of_session(box, info)]
    for info in running:
        await box.runtime.processes.kill(info.id, KillProcess())
    return box.done(killedCount=len(running), message=f"Killed {len(running)} processes")


# -- code --------------------------------------------------------------------------------------------------------------


async def create_context(box: Box) -> Answer:
    made = await code.create(box)
    assert isinstance(made, dict)
    return made | {"id": made["contextId"], "createdAt": moment(), "lastUsed": moment()}


async def list_contexts(box: Box) -> Answer:
    found = await code.list_contexts(box)
    assert isinstance(found, dict)
    when = {"createdAt": moment(), "lastUsed": moment()}
    return found | {"contexts": [context | when for context in found["contexts"]]}


async def delete_context(box: Box) -> Answer:
    try:
        return await code.delete(box)
    except Fault as fault:
        fault.message = f"Context {box.names['id']} not found"
        raise


_OWN: dict[tuple[str, str], Operation] = {
    ("POST", "/api/session/create"): create_session,
    ("POST", "/api/execute"): execute,
    ("POST", "/api/execute/stream"): execute_stream,
    ("POST", "/api/process/start"): start_process,
    ("GET", "/api/process/list"): list_processes,
    ("DELETE", "/api/process/kill-all"): kill_all,
    ("POST", "/api/contexts"): create_context,
    ("GET", "/api/contexts"): list_contexts,
    ("POST", "/api/git/checkout"): checkout,
    ("POST", "/api/list-files"): _checked(files.list_files, root=True),
    **{
        ("POST", f"/api/{name}"): _checked(operation)
        for name, operation in {
            "read": files.read,
            "read/stream": files.read_stream,
            "write": files.write,
            "mkdir": files.mkdir,
            "delete": files.delete,
            "rename": files.rename,
            "move": files.move,
        }.items()
    },
}


def find(method: str, path: str) -> tuple[Operation, Mapping[str, str]] | None:
    own = _OWN.get((method, path))
    if own is not None:
        return own, {}
    found = routes.find(method, path)
    return (delete_context, found[1]) if found is not None and found[0] is code.delete else found
