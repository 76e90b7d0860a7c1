"""The bridge: Cloudflare's sandboxes for programs that are no Workers, as the OpenAI Agents SDK and others speak it.

A sandbox has an id of 26 letters that the server chooses; it is made when it is first used. Files and directories are
below ``/workspace``. Without the header ``Session-Id`` every call stands for itself.
"""

from __future__ import annotations

import base64
import json
import posixpath
import re
import secrets
import shlex
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from typing import Any, cast

from starlette.requests import ClientDisconnect
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket

from skerry.control.actor import own_id
from skerry.control.inquiry import answered, asked_to_run
from skerry.control.registry import Registry
from skerry.errors import (
    BucketEndpointError,
    FileError,
    InvalidRequestError,
    IsDirectoryError,
    MountNotFoundError,
    NotFoundError,
    NotRegularFileError,
    PortNotExposedError,
    SandboxNotFoundError,
    SkerryError,
)
from skerry.models import CreateSession, ExecEvent, ExecRequest, ExposePort, MountBucket
from skerry.runtime.content import CHUNK
from skerry.runtime.runtime import Runtime
from skerry.server.bounds import BoundedRequest
from skerry.server.cloudflare import openapi, pty, tunnels
from skerry.server.cloudflare.box import HOME
from skerry.server.cloudflare.bridge_call import (
    ROOT,
    Call,
    Handler,
    Refused,
    below,
    is_sandbox,
    is_session,
    refusal,
    sandbox_of,
)
from skerry.server.cloudflare.faults import moment
from skerry.server.errors import told
from skerry.server.sse import EventStream
from skerry.storage.archive import Packing

NAME = "bridge"
LARGEST = 32 << 20
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
RESERVED_PORT = 3000
"""Theirs is the container's own server there, and clients know it."""
_BUILTINS = """. : alias bg builtin cd command declare eval exec exit export fg getopts hash jobs let local mapfile popd
pushd read readarray readonly return set shift shopt source times trap type typeset ulimit umask unalias unset wait"""
BUILTINS = frozenset(_BUILTINS.split())
"""Words that are no programs: a shell's own. Without a session they have one for themselves."""
_SOURCED = re.compile(rb"^/run/skerry[\w-]*/\d+-words\.step: ", re.MULTILINE)
_ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"
_LENGTH = 26


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
    session = call.session
    words = argv if session is not None or argv[0] not in BUILTINS else ["bash", "-c", '"$@"', "bash", *argv]
    request = ExecRequest(
        command=words[0],
        args=words[1:],
        timeout=timeout,
        cwd=None if cwd is None else below(cwd),
        session=session,
        encoding="base64",
    )

    async def events(runtime: Runtime) -> AsyncIterator[Any]:
        await call.ready(runtime)
        async with aclosing(cast("Any", runtime.exec_stream(request, builtins=True))) as source:
            async for event in source:
                if event.type == "stderr" and session is not None:
                    event.data = _shown(event.data or "")
                if event.type != "start":
                    yield event

    return cast("Response", EventStream(call.registry.use(call.id), events, cast("Any", _failed), _frame))


def _shown(data: str) -> str:
    """What the session's bash says of a word of its own, without the place it read it from."""
    raw = base64.b64decode(data)
    return base64.b64encode(_SOURCED.sub(b"bash: ", raw)).decode() if b"/run/skerry" in raw else data


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


def _file(call: Call) -> str:
    rest = call.request.path_params["rest"].lstrip("/")
    if not rest:
        raise Refused(400, "invalid_request", "The path of the file is missing.")
    return below(f"/{rest}")


async def read(call: Call) -> Response:
    path = _file(call)
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
    path = _file(call)
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
    if body.get("binding") is not None and options.get("endpoint") is not None:
        raise Refused(400, "invalid_request", "Give either binding or options.endpoint, not both.")
    try:
        request = MountBucket(
            bucket=body.get("bucket") or body.get("binding"),
            mount_path=path,
            endpoint=options.get("endpoint"),
            credentials=options.get("credentials"),
            prefix=options.get("prefix") or "/",
            read_only=options.get("readOnly") is True,
            local_bucket=options.get("localBucket") is True,
        )
    except ValueError:
        raise Refused(400, "invalid_request", "The options of the mount cannot be used.") from None
    try:
        await call.registry.mounts.mount(call.id, request)
    except BucketEndpointError as error:
        raise Refused(400, "mount_error", str(error)) from None
    except SkerryError as error:
        raise Refused(502, "mount_error", str(told(error))) from None
    return JSONResponse({"ok": True})


async def unmount(call: Call) -> Response:
    path = (await call.json()).get("mountPath")
    if not isinstance(path, str) or not path.startswith("/") or posixpath.normpath(path) == "/":
        raise Refused(400, "invalid_request", "mountPath must be an absolute path below the root.")
    try:
        gone = await call.registry.mounts.unmount(call.id, path)
    except MountNotFoundError as error:
        raise Refused(502, "unmount_error", error.message) from None
    if gone.state != "asleep":
        async with call.registry.use(call.id) as runtime:  # what it was mounted on goes too, if it is empty
            await runtime.exec(ExecRequest(command="rmdir", args=["--", gone.mount_path], session=None))
    return JSONResponse({"ok": True})


async def create_session(call: Call) -> Response:
    body = await call.json()
    if not isinstance(body.get("env") or {}, dict) or not isinstance(body.get("cwd") or "", str):
        raise Refused(400, "invalid_request", "env is an object of strings, cwd a string.")
    id = body.get("id") or f"session-{secrets.token_hex(6)}"
    if not is_session(id):
        raise Refused(400, "invalid_request", "A session's id is 1 to 128 letters, digits and . _ - without ..")
    env = {name: value for name, value in (body.get("env") or {}).items() if isinstance(value, str)}
    # A session may begin anywhere: it is single files and directories of commands that stay in the workspace.
    cwd = posixpath.normpath(posixpath.join(ROOT, body.get("cwd") or ROOT))
    async with call.registry.use(call.id) as runtime:
        try:
            await runtime.sessions.create(CreateSession(id=id, env=env, cwd=cwd, isolation=False))
        except FileError:
            # A directory that is not there is no reason to have no session.
            await runtime.sessions.create(CreateSession(id=id, env=env, cwd=HOME, isolation=False))
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


def _token(name: str | None) -> str | None:
    return None if name is None else name.replace("-", "_")


async def open_tunnel(call: Call) -> Response:
    """What they answer with a tunnel, we answer with a preview. One with a name has the same address every time."""
    port, name = _port(call), (await call.json()).get("name")
    if name is not None and not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise Refused(400, "invalid_request", "A tunnel's name is 1 to 63 of a-z, 0-9 and -.")
    exposure = await call.registry.exposures.expose(call.id, ExposePort(port=port, name=name, token=_token(name)))
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
    facts = {"warm": warm, "assigned": assigned, "total": warm + assigned, "config": config, "maxInstances": None}
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
            said = refusal(error, self._code)
            answered(said.status, error.code)
            await _refuse(said)(scope, receive, send)


def _refuse(refused: Refused) -> Response:
    return JSONResponse({"error": refused.message, "code": refused.code}, refused.status)


def bridge_routes(registry: Registry) -> list[BaseRoute]:
    async def terminal(socket: WebSocket) -> None:
        id = socket.path_params["id"]
        session = socket.headers.get("session-id") or socket.query_params.get("session") or "default"
        if not is_sandbox(id) or not is_session(session):
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
