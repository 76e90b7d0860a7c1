"""``/rpc``: the container's API as methods, carried by Cap'n Web. Each is one of the routes, its arguments in order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing
from typing import Any, cast

from starlette.websockets import WebSocket

from skerry.control.registry import Registry
from skerry.errors import SkerryError
from skerry.runtime.content import CHUNK
from skerry.server.cloudflare import code
from skerry.server.cloudflare.box import Box, Json, Stream
from skerry.server.cloudflare.calls import Calls
from skerry.server.cloudflare.capnweb import UNDEFINED, Bytes, RemoteError, Session
from skerry.server.cloudflare.faults import Fault, fault_of, moment
from skerry.server.cloudflare.record import Record
from skerry.server.cloudflare.tunnels import Tunnels
from skerry.server.cloudflare.writing import as_event
from skerry.server.errors import as_skerry_error

Body = Callable[[list[Any]], Json]


def _named(*names: str) -> Body:
    """Arguments by these names; an object at the end holds options beside them."""

    def body(arguments: list[Any]) -> Json:
        found: Json = dict(zip(names, arguments, strict=False))
        for options in arguments[len(names) :]:
            if isinstance(options, dict):
                found |= options
        return {name: value for name, value in found.items() if value is not UNDEFINED}

    return body


def _object(arguments: list[Any]) -> Json:
    return _named()(arguments)


def _listing(arguments: list[Any]) -> Json:
    return {**_named("path", "sessionId")(arguments[:2]), "options": _named()(arguments[2:])}


METHODS: dict[tuple[str, ...], tuple[str, str, Body]] = {
    ("commands", "execute"): ("POST", "/api/execute", _named("command", "sessionId")),
    ("commands", "executeStream"): ("POST", "/api/execute/stream", _named("command", "sessionId")),
    ("files", "readFile"): ("POST", "/api/read", _named("path", "sessionId")),
    ("files", "readFileStream"): ("POST", "/api/read/stream", _named("path", "sessionId")),
    ("files", "writeFile"): ("POST", "/api/write", _named("path", "content", "sessionId")),
    ("files", "deleteFile"): ("POST", "/api/delete", _named("path", "sessionId")),
    ("files", "renameFile"): ("POST", "/api/rename", _named("oldPath", "newPath", "sessionId")),
    ("files", "moveFile"): ("POST", "/api/move", _named("sourcePath", "destinationPath", "sessionId")),
    ("files", "mkdir"): ("POST", "/api/mkdir", _named("path", "sessionId")),
    ("files", "listFiles"): ("POST", "/api/list-files", _listing),
    ("files", "exists"): ("POST", "/api/exists", _named("path", "sessionId")),
    ("processes", "startProcess"): ("POST", "/api/process/start", _named("command", "sessionId")),
    ("processes", "listProcesses"): ("GET", "/api/process/list", _named()),
    ("processes", "killAllProcesses"): ("DELETE", "/api/process/kill-all", _named()),
    ("processes", "getProcess"): ("GET", "/api/process/{id}", _named("id")),
    ("processes", "killProcess"): ("DELETE", "/api/process/{id}", _named("id")),
    ("processes", "getProcessLogs"): ("GET", "/api/process/{id}/logs", _named("id")),
    ("processes", "streamProcessLogs"): ("GET", "/api/process/{id}/stream", _named("id")),
    ("ports", "watchPort"): ("POST", "/api/port-watch", _object),
    ("git", "checkout"): ("POST", "/api/git/checkout", _named("repoUrl", "sessionId")),
    ("utils", "createSession"): ("POST", "/api/session/create", _object),
    ("utils", "deleteSession"): ("POST", "/api/session/delete", _named("sessionId")),
    ("utils", "listSessions"): ("GET", "/api/session/list", _named()),
    ("utils", "ping"): ("GET", "/api/ping", _named()),
    ("utils", "getVersion"): ("GET", "/api/version", _named()),
    ("utils", "getCommands"): ("GET", "/api/commands", _named()),
    ("interpreter", "createCodeContext"): ("POST", "/api/contexts", _object),
    ("interpreter", "listCodeContexts"): ("GET", "/api/contexts", _named()),
    ("interpreter", "deleteCodeContext"): ("DELETE", "/api/contexts/{id}", _named("id")),
    ("interpreter", "streamCode"): ("POST", "/api/execute/code", _named("context_id", "code", "language")),
    ("backup", "createArchive"): ("POST", "/api/backup/create", _named("dir", "archivePath", "sessionId")),
    ("backup", "restoreArchive"): ("POST", "/api/backup/restore", _named("dir", "archivePath", "sessionId")),
    ("backup", "uploadParts"): ("POST", "/api/backup/upload-parts", _object),
    ("watch", "watch"): ("POST", "/api/watch", _object),
    ("watch", "checkChanges"): ("POST", "/api/watch/check", _object),
}


def _context(made: Json) -> Json:
    when = {"createdAt": moment(), "lastUsed": moment()}
    return {"id": made.get("contextId") or made["id"], "language": made["language"], "cwd": made["cwd"], **when}


ANSWERS: dict[tuple[str, ...], Callable[[Json], Any]] = {
    ("utils", "ping"): lambda answer: "healthy",
    ("utils", "getVersion"): lambda answer: answer["version"],
    ("utils", "getCommands"): lambda answer: answer["availableCommands"],
    ("utils", "listSessions"): lambda answer: {"sessions": answer["data"]},
    ("utils", "createSession"): lambda answer: {
        **{name: answer[name] for name in ("success", "id", "timestamp", "containerPlacementId")},
        "message": f"Session {answer['id']} created",
    },
    ("interpreter", "createCodeContext"): _context,
    ("interpreter", "listCodeContexts"): lambda answer: [_context(one) for one in answer["contexts"]],
    ("interpreter", "deleteCodeContext"): lambda answer: UNDEFINED,
}
"""Where the method gives something else than the route."""


class Rpc:
    def __init__(self, registry: Registry, calls: Calls, id: str, socket: WebSocket, record: Record) -> None:
        self._registry, self._calls, self._id, self._socket = registry, calls, id, socket
        self._record = record
        self._session = Session(socket, self._main, _failure)

    async def serve(self) -> None:
        await self._socket.accept()
        await self._session.serve()

    async def _main(self, path: tuple[str, ...], arguments: list[Any]) -> Any:
        method = METHODS[path][0] if path in METHODS else "POST"
        with self._record.call(method, ".".join(path)):
            return await self._call(path, arguments)

    async def _call(self, path: tuple[str, ...], arguments: list[Any]) -> Any:
        match path:
            case ("files", "writeFileStream"):
                return await self._write(arguments)
            case ("files", "readFile") if len(arguments) > 2 and _encoding(arguments[2]) == "none":
                return await self._read(arguments)
            case ("interpreter", "runCodeStream"):
                return await self._run_code(arguments)
            case ("tunnels", method):
                settings = self._socket.app.state.settings
                return await Tunnels(self._registry, self._id, settings, self._socket.scope).call(method, arguments)
        known = METHODS.get(path)
        if known is None:
            raise RemoteError(f"There is no method {'.'.join(path)[:100]}.", code="UNKNOWN_ERROR", details={})
        method, route, shape = known
        body = shape(arguments)
        if "{id}" in route:
            route = route.replace("{id}", str(body.pop("id", "")))
        if path[0] == "interpreter" and "envVars" in body:
            body["env_vars"] = body.pop("envVars")
        async with AsyncExitStack() as stack:
            answer = await stack.enter_async_context(self._calls.call(self._id, method, route, body, {}))
            if isinstance(answer, Stream):
                return Bytes(_encoded(answer.events), stack.pop_all())
            return ANSWERS.get(path, _same)(answer)

    async def _write(self, arguments: list[Any]) -> Json:
        path, content, *rest = arguments
        async with self._registry.use(self._id) as runtime:
            body = {"path": path, "sessionId": rest[0] if rest and isinstance(rest[0], str) else None}
            box = Box(self._registry, self._id, runtime, body)
            count = await runtime.files.write(await box.path(), content, force=True)
        return {"success": True, "path": path, "bytesWritten": count, "timestamp": moment()}

    async def _read(self, arguments: list[Any]) -> Json:
        path, session, *_ = arguments
        async with AsyncExitStack() as stack:
            runtime = await stack.enter_async_context(self._registry.use(self._id))
            box = Box(self._registry, self._id, runtime, {"path": path, "sessionId": session})
            file = await stack.enter_async_context(await runtime.files.open(await box.path()))

            async def chunks() -> AsyncIterator[bytes]:
                offset = 0
                while data := await file.read(CHUNK, offset):
                    yield data
                    offset += len(data)

            facts = {"success": True, "path": path, "size": file.size, "mimeType": file.mime_type}
            return facts | {"timestamp": moment(), "content": Bytes(chunks(), stack.pop_all())}

    async def _run_code(self, arguments: list[Any]) -> Any:
        """Output and results go to the client's own functions, one after the other."""
        context, source, language, callbacks, timeout = [*arguments, *[UNDEFINED] * 5][:5]
        body = {"context_id": context, "code": source, "language": language, "timeout_ms": timeout}
        body = {name: value for name, value in body.items() if value not in (UNDEFINED, None)}
        functions = callbacks if isinstance(callbacks, dict) else {}
        try:
            async with (
                self._calls.call(self._id, "POST", "/api/execute/code", body, {}) as answer,
                aclosing(cast("Any", cast("Stream", answer).events)) as events,
            ):
                async for event in events:
                    await _tell(functions, event)
        finally:
            await asyncio.shield(self._session.give_back())
        return UNDEFINED


def _same(answer: Json) -> Json:
    return answer


def _encoding(options: Any) -> Any:
    return options.get("encoding") if isinstance(options, dict) else None


async def _tell(functions: Json, event: Json) -> None:
    kind = event["type"]
    name = {"stdout": "onStdout", "stderr": "onStderr", "result": "onResult", "error": "onError"}.get(kind)
    function = functions.get(name or "")
    if not callable(function):
        return
    if kind in ("stdout", "stderr"):
        await function({"text": event["text"], "timestamp": code.milliseconds()})
    elif kind == "result":
        await function({name: value for name, value in event.items() if name not in ("type", "metadata")})
    else:
        facts = {"name": event["ename"], "message": event["evalue"], "traceback": event["traceback"]}
        if "lineNumber" in event:
            facts["lineNumber"] = event["lineNumber"]
        await function(facts)


async def _encoded(events: AsyncIterator[Json]) -> AsyncIterator[bytes]:
    """As the client parses it: server-sent events that name their type."""
    async with aclosing(cast("Any", events)) as source:
        async for event in source:
            yield f"event: {event['type']}\n".encode() + as_event(event)


def _failure(error: Exception) -> RemoteError:
    fault = error if isinstance(error, Fault) else None
    if fault is None:
        known: SkerryError = as_skerry_error(error, during="rpc")
        fault = fault_of(known)
    return RemoteError(fault.message, code=fault.code, details=fault.context)
