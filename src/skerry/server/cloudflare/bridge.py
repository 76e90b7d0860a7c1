"""The bridge: Cloudflare's sandboxes for programs that are no Workers, as the OpenAI Agents SDK and others speak it.

A sandbox has an id of 26 letters that the server chooses; it is made when it is first used. Files and directories are
below ``/workspace``. Without the header ``Session-Id`` every call stands for itself.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
import secrets
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing
from typing import Any, cast

from starlette.requests import ClientDisconnect
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket

from skerry.control.actor import own_id
from skerry.control.identity import LONGEST
from skerry.control.inquiry import answered, asked_to_run
from skerry.control.registry import Registry
from skerry.errors import (
    FileError,
    FileNotFoundInSandboxError,
    InvalidRequestError,
    IsDirectoryError,
    MountNotFoundError,
    NotFoundError,
    NotRegularFileError,
    PortNotExposedError,
    SandboxNotFoundError,
    SessionNotFoundError,
    SkerryError,
)
from skerry.models import CreateSession, ExecEvent, ExecRequest, ExposePort, MountBucket
from skerry.runtime.content import CHUNK
from skerry.runtime.runtime import Runtime
from skerry.server.bounds import BoundedRequest
from skerry.server.cloudflare import openapi, pty, tunnels
from skerry.server.cloudflare.faults import moment
from skerry.server.errors import told
from skerry.server.sse import EventStream
from skerry.settings import Settings
from skerry.storage.archive import Packing

NAME = "bridge"
ROOT = "/workspace"
LARGEST = 32 << 20
_ID = re.compile(r"[a-z2-7]{1,128}")
_SESSION = re.compile(r"[a-zA-Z0-9._-]{1,128}")
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
RESERVED_PORT = 3000
"""Theirs is the container's own server there, and clients know it."""
_ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"
_LENGTH = 26


class Refused(Exception):
    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


def _refusal(error: SkerryError, otherwise: str) -> Refused:
    error = told(error)
    if isinstance(error, FileNotFoundInSandboxError):
        return Refused(404, "workspace_read_not_found", error.message)
    status = error.status if error.status in (400, 401, 403, 404, 408, 409, 410, 413, 429) else 502
    return Refused(status, otherwise, str(error))


def sandbox_of(id: str) -> str:
    """The bridge's ids may be longer than ours."""
    return id if len(id) <= LONGEST else f"{id[:30]}-{hashlib.sha256(id.encode()).hexdigest()[:32]}"


Handler = Callable[["Call"], Awaitable[Response]]


class Call:
    """One request: its sandbox, its session, and what it sent."""

    def __init__(self, registry: Registry, request: BoundedRequest) -> None:
        self.registry = registry
        self.request = request

    @property
    def settings(self) -> Settings:
        settings: Settings = self.request.app.state.settings
        return settings

    @property
    def id(self) -> str:
        id: str = self.request.path_params["id"]
        if not _ID.fullmatch(id):
            raise Refused(400, "invalid_request", "A sandbox's id is 1 to 128 of a-z and 2-7.")
        return own_id(sandbox_of(id))

    @property
    def session(self) -> str | None:
        given = self.request.headers.get("session-id")
        if given is not None and not _SESSION.fullmatch(given):
            raise Refused(400, "invalid_request", "Session-Id is 1 to 128 letters, digits and . _ -")
        return given

    async def json(self) -> dict[str, Any]:
        raw = await self.request.body()
        try:
            body = json.loads(raw) if raw else {}
        except (ValueError, RecursionError):
            raise Refused(400, "invalid_request", "The request body is not JSON.") from None
        if not isinstance(body, dict):
            raise Refused(400, "invalid_request", "The request body is not an object.")
        return body

    async def ready(self, runtime: Runtime) -> str | None:
        """The session that is named, made if it is unknown."""
        session = self.session
        if session is not None and session != "default":
            try:
                runtime.sessions.find(session)
            except SessionNotFoundError:
                await runtime.sessions.create(CreateSession(id=session, isolation=False))
        return session


def _below(path: str) -> str:
    """A path of the workspace, absolute; whatever leads elsewhere is refused."""
    if "\0" in path:
        raise Refused(400, "invalid_request", "A path cannot hold a zero byte.")
    found = posixpath.normpath(posixpath.join(ROOT, path))
    if found != ROOT and not found.startswith(ROOT + "/"):
        raise Refused(403, "invalid_request", f"{path[:200]!r} is not below {ROOT}.")
    return found


# -- sandboxes and commands --------------------------------------------------------------------------------------------


async def create(call: Call) -> Response:
    return JSONResponse({"id": "".join(secrets.choice(_ALPHABET) for _ in range(_LENGTH))})


async def delete(call: Call) -> Response:
    try:
        await call.registry.destroy(call.id)
    except NotFoundError:
        pass  # it was never used, or is gone already
    return Response(status_code=204)


async def no_terminal(call: Call) -> Response:
    raise Refused(400, "invalid_request", "A terminal is a WebSocket; ask for an upgrade.")


async def document(call: Call) -> Response:
    return JSONResponse(openapi.DOCUMENT)


async def page(call: Call) -> Response:
    return HTMLResponse(openapi.page())


async def running(call: Call) -> Response:
    try:
        await call.registry.get(call.id)
        async with call.registry.use(call.id) as runtime:
            done = await runtime.exec(ExecRequest(command="true", session=None))
    except SandboxNotFoundError:
        return JSONResponse({"running": False})
    return JSONResponse({"running": done.exit_code == 0})


async def execute(call: Call) -> Response:
    body = await call.json()
    argv, timeout, cwd = body.get("argv"), body.get("timeout_ms"), body.get("cwd")
    if not isinstance(argv, list) or not argv or not all(isinstance(word, str) for word in argv) or not argv[0]:
        raise Refused(400, "invalid_request", "argv must be a list of strings that is not empty.")
    if timeout is not None and (not isinstance(timeout, int | float) or isinstance(timeout, bool) or timeout <= 0):
        raise Refused(400, "invalid_request", "timeout_ms must be a number greater than 0.")
    if cwd is not None and not isinstance(cwd, str):
        raise Refused(400, "invalid_request", "cwd must be a string.")
    asked_to_run(shlex.join(argv))
    request = ExecRequest(
        command=argv[0],
        args=argv[1:],
        timeout=timeout,
        cwd=None if cwd is None else _below(cwd),
        session=call.session,
        encoding="base64",
    )

    async def events(runtime: Runtime) -> AsyncIterator[Any]:
        await call.ready(runtime)
        async with aclosing(cast("Any", runtime.exec_stream(request))) as source:
            async for event in source:
                if event.type != "start":
                    yield event

    return cast("Response", EventStream(call.registry.use(call.id), events, cast("Any", _failed), _frame))


def _failed(error: SkerryError) -> ExecEvent:
    return ExecEvent(type="error", error=error.message, code=error.code)


def _frame(event: ExecEvent) -> bytes:
    match event.type:
        case "stdout" | "stderr":
            return f"event: {event.type}\ndata: {event.data}\n\n".encode()
        case "complete":
            return b'event: exit\ndata: {"exit_code":%d}\n\n' % (event.exit_code or 0)
    said = json.dumps({"error": event.error, "code": "exec_error"})
    return f"event: error\ndata: {said}\n\n".encode()


# -- files -------------------------------------------------------------------------------------------------------------


class Download(Response):
    """Bytes as they come. What they come from is held until the response has ended, however it ends."""

    def __init__(self, held: AsyncExitStack, chunks: AsyncIterator[bytes]) -> None:
        super().__init__()
        self._held, self._chunks = held, chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._held, aclosing(cast("Any", self._chunks)):
            await StreamingResponse(self._chunks, media_type="application/octet-stream")(scope, receive, send)


async def read(call: Call) -> Response:
    path = _below("/" + call.request.path_params["rest"].lstrip("/"))
    async with AsyncExitStack() as stack:
        runtime = await stack.enter_async_context(call.registry.use(call.id))
        try:
            file = await stack.enter_async_context(await runtime.files.open(path))
        except (IsDirectoryError, NotRegularFileError) as error:
            raise Refused(404, "workspace_read_not_found", error.message) from None

        async def content() -> AsyncIterator[bytes]:
            offset = 0
            while data := await file.read(CHUNK, offset):
                yield data
                offset += len(data)

        return Download(stack.pop_all(), content())


async def _bounded(call: Call) -> bytes:
    chunks, size = [], 0
    async for chunk in call.request.stream():
        chunks.append(chunk)
        size += len(chunk)
        if size > LARGEST:
            raise Refused(413, "payload_too_large", f"The body is larger than {LARGEST} bytes.")
    return b"".join(chunks)


async def write(call: Call) -> Response:
    path = _below("/" + call.request.path_params["rest"].lstrip("/"))
    content = await _bounded(call)
    async with call.registry.use(call.id) as runtime:
        try:
            await runtime.files.write(path, content)
        except FileError as error:
            raise Refused(502, "workspace_archive_write_error", error.message) from None
    return JSONResponse({"ok": True})


async def persist(call: Call) -> Response:
    given = call.request.query_params.get("excludes", "")
    excludes = [name for name in given.split(",") if name]
    if any(".." in name for name in excludes):
        raise Refused(400, "invalid_request", "excludes cannot lead out of the workspace.")
    excludes = [f"/{name.removeprefix('./').lstrip('/')}" for name in excludes]
    async with AsyncExitStack() as stack:
        runtime = await stack.enter_async_context(call.registry.use(call.id))
        what = {"path": ROOT, "excludes": excludes, "gitignore": False}
        archive = Packing(runtime.portal, what, lambda _, __: None).read()
        return Download(stack.pop_all(), archive)


async def hydrate(call: Call) -> Response:
    try:
        content = await _bounded(call)
    except Refused as refused:
        raise Refused(400, "invalid_request", refused.message) from None
    if not content:
        raise Refused(400, "invalid_request", "The body is empty; it should be a tar archive.")

    async def once() -> AsyncIterator[bytes]:
        yield content

    async with call.registry.use(call.id) as runtime:
        try:
            await runtime.files.extract(ROOT, once())
        except InvalidRequestError as error:
            raise Refused(502, "workspace_archive_write_error", error.message) from None
    return JSONResponse({"ok": True})


# -- buckets, sessions, ports ------------------------------------------------------------------------------------------


async def mount(call: Call) -> Response:
    body = await call.json()
    path, options = body.get("mountPath"), body.get("options") or {}
    if not isinstance(path, str) or not path.startswith("/") or not isinstance(options, dict):
        raise Refused(400, "invalid_request", "mountPath must be an absolute path, options an object.")
    if options.get("credentials") or options.get("endpoint"):
        raise Refused(
            400, "mount_error", "Credentials stay on the server: name a bucket of its configuration (buckets.toml)."
        )
    bucket = body.get("bucket") or body.get("binding")
    try:
        request = MountBucket(
            bucket=bucket,
            mount_path=path,
            prefix=options.get("prefix") or "/",
            read_only=options.get("readOnly") is True,
            local_bucket=options.get("localBucket") is True,
        )
    except ValueError:
        raise Refused(400, "invalid_request", "The options of the mount cannot be used.") from None
    try:
        await call.registry.mounts.mount(call.id, request)
    except SkerryError as error:
        raise Refused(502, "mount_error", str(error)) from None
    return JSONResponse({"ok": True})


async def unmount(call: Call) -> Response:
    path = (await call.json()).get("mountPath")
    if not isinstance(path, str) or not path.startswith("/") or posixpath.normpath(path) == "/":
        raise Refused(400, "invalid_request", "mountPath must be an absolute path below the root.")
    try:
        await call.registry.mounts.unmount(call.id, path)
    except MountNotFoundError as error:
        raise Refused(502, "unmount_error", error.message) from None
    return JSONResponse({"ok": True})


async def create_session(call: Call) -> Response:
    body = await call.json()
    if not isinstance(body.get("env") or {}, dict) or not isinstance(body.get("cwd") or "", str):
        raise Refused(400, "invalid_request", "env is an object of strings, cwd a string.")
    id = body.get("id") or f"session-{secrets.token_hex(6)}"
    if not isinstance(id, str) or not _SESSION.fullmatch(id):
        raise Refused(400, "invalid_request", "A session's id is 1 to 128 letters, digits and . _ -")
    env = {name: value for name, value in (body.get("env") or {}).items() if isinstance(value, str)}
    async with call.registry.use(call.id) as runtime:
        await runtime.sessions.create(
            CreateSession(id=id, env=env, cwd=_below(body.get("cwd") or ROOT), isolation=False)
        )
    return JSONResponse({"id": id})


async def delete_session(call: Call) -> Response:
    id = call.request.path_params["sid"]
    async with call.registry.use(call.id) as runtime:
        await runtime.sessions.delete(id)
    return JSONResponse({"success": True, "sessionId": id, "timestamp": moment()})


def _port(call: Call) -> int:
    text = call.request.path_params["port"]
    if not (text.isascii() and text.isdigit() and 1024 <= int(text) <= 65535) or int(text) == RESERVED_PORT:
        raise Refused(400, "invalid_request", f"A port is a number from 1024 to 65535, and not {RESERVED_PORT}.")
    return int(text)


async def open_tunnel(call: Call) -> Response:
    """What they answer with a tunnel, we answer with a preview."""
    port, name = _port(call), (await call.json()).get("name")
    if name is not None and not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise Refused(400, "invalid_request", "A tunnel's name is 1 to 63 of a-z, 0-9 and -.")
    exposure = await call.registry.exposures.expose(call.id, ExposePort(port=port, name=name))
    facts = {"id": exposure.token, **tunnels.facts_of(exposure, call.settings, call.request.scope)}
    return JSONResponse(facts | ({} if name is None else {"name": name}))


async def close_tunnel(call: Call) -> Response:
    try:
        await call.registry.exposures.unexpose(call.id, _port(call))
    except (PortNotExposedError, SandboxNotFoundError):
        pass
    return Response(status_code=204)


# -- the pool, and the paths of it all ---------------------------------------------------------------------------------


async def pool_stats(call: Call) -> Response:
    warm, assigned = call.registry.population()
    # There is no largest number but the machine's own, and no interval: a machine that is taken is replaced at once.
    config = {"warmTarget": call.settings.warm_pool, "refreshInterval": 0, "maxInstances": 0, "scaleBatchSize": 1}
    facts = {"warm": warm, "assigned": assigned, "total": warm + assigned, "config": config, "maxInstances": 0}
    return JSONResponse(facts)


async def prime(call: Call) -> Response:
    """The pool keeps itself filled; there is nothing to be told."""
    return JSONResponse({"ok": True})


async def shut_down_prewarmed(call: Call) -> Response:
    """Nor is there anything that would be left to run for nothing."""
    return JSONResponse({"ok": True})


TABLE: tuple[tuple[str, str, Handler, str], ...] = (
    ("POST", "/v1/sandbox", create, "sandbox_error"),
    ("DELETE", "/v1/sandbox/{id}", delete, "sandbox_error"),
    ("POST", "/v1/sandbox/{id}/exec", execute, "exec_transport_error"),
    ("GET", "/v1/sandbox/{id}/file{rest:path}", read, "exec_transport_error"),
    ("PUT", "/v1/sandbox/{id}/file{rest:path}", write, "workspace_archive_write_error"),
    ("GET", "/v1/sandbox/{id}/pty", no_terminal, "exec_transport_error"),
    ("GET", "/v1/sandbox/{id}/running", running, "sandbox_error"),
    ("POST", "/v1/sandbox/{id}/persist", persist, "workspace_archive_read_error"),
    ("POST", "/v1/sandbox/{id}/hydrate", hydrate, "workspace_archive_write_error"),
    ("POST", "/v1/sandbox/{id}/mount", mount, "mount_error"),
    ("POST", "/v1/sandbox/{id}/unmount", unmount, "unmount_error"),
    ("POST", "/v1/sandbox/{id}/session", create_session, "session_error"),
    ("DELETE", "/v1/sandbox/{id}/session/{sid}", delete_session, "session_error"),
    ("POST", "/v1/sandbox/{id}/tunnel/{port}", open_tunnel, "tunnel_error"),
    ("DELETE", "/v1/sandbox/{id}/tunnel/{port}", close_tunnel, "tunnel_error"),
    ("GET", "/v1/openapi.json", document, "sandbox_error"),
    ("GET", "/v1/openapi.html", page, "sandbox_error"),
    ("GET", "/v1/openapi", page, "sandbox_error"),
    ("GET", "/v1/pool/stats", pool_stats, "pool_error"),
    ("POST", "/v1/pool/prime", prime, "pool_error"),
    ("POST", "/v1/pool/shutdown-prewarmed", shut_down_prewarmed, "pool_error"),
)


class _Endpoint:
    def __init__(self, registry: Registry, handler: Handler, code: str) -> None:
        self._registry, self._handler, self._code = registry, handler, code

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            answer = await self._handler(Call(self._registry, BoundedRequest(scope, receive)))
            await answer(scope, receive, send)
        except ClientDisconnect:
            return
        except Refused as refused:
            answered(refused.status, refused.code)
            await _refuse(refused)(scope, receive, send)
        except SkerryError as error:
            said = _refusal(error, self._code)
            answered(said.status, error.code)
            await _refuse(said)(scope, receive, send)


def _refuse(refused: Refused) -> Response:
    return JSONResponse({"error": refused.message, "code": refused.code}, refused.status)


def bridge_routes(registry: Registry) -> list[BaseRoute]:
    async def terminal(socket: WebSocket) -> None:
        id = socket.path_params["id"]
        session = socket.headers.get("session-id") or socket.query_params.get("session") or "default"
        if not _ID.fullmatch(id) or not _SESSION.fullmatch(session):
            return await pty.refuse(socket, "The id of the sandbox or of the session cannot be used.")
        await pty.serve(registry, own_id(sandbox_of(id)), socket, session)

    return [
        *(
            Route(
                path,
                _Endpoint(registry, handler, code),
                methods=[method],
                name=f"{NAME}_{handler.__name__}",
                include_in_schema=False,
            )
            for method, path, handler, code in TABLE
        ),
        WebSocketRoute("/v1/sandbox/{id}/pty", terminal, name=f"{NAME}_terminal"),
    ]
