"""Ports: exposing them for previews, and raw TCP to and from them."""

from __future__ import annotations

import asyncio
import errno
import math
import socket as socketlib
import time
from collections.abc import Coroutine
from contextlib import suppress
from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response, WebSocket
from starlette.websockets import WebSocketDisconnect, WebSocketState

from skerry import relay
from skerry.control.exposures import Exposure
from skerry.control.registry import Registry
from skerry.errors import PermissionDeniedError, PortInUseError, PortNotListeningError, SandboxLostError
from skerry.models import CreateLink, Done, ExposedPort, ExposedPortList, ExposePort, PreviewLink
from skerry.runtime.runtime import Runtime
from skerry.server.answers import answer
from skerry.server.errors import as_skerry_error
from skerry.server.nouns import noun_router
from skerry.server.paths import SandboxId
from skerry.server.places import Places

GOING_AWAY = 1001
LOOK_EVERY = 1.0

Port = Annotated[int, Path(ge=1, le=65535)]
Channelled = Annotated[bool, Query(description="Many connections on one WebSocket, in frames of their own.")]


def routes(registry: Registry) -> APIRouter:
    router = noun_router("/v1/sandboxes/{id}/ports", "ports")

    @router.post("", status_code=201, response_model=ExposedPort)
    async def expose_port(id: SandboxId, body: ExposePort, request: Request) -> Response:
        return answer(_shown(await registry.exposures.expose(id, body), request), 201)

    @router.get("", response_model=ExposedPortList)
    async def exposed_ports(id: SandboxId, request: Request) -> Response:
        found = await registry.exposures.list(id)
        return answer(ExposedPortList(ports=[_shown(exposure, request) for exposure in found]))

    @router.get("/{port}", response_model=ExposedPort)
    async def exposed_port(id: SandboxId, port: Port, request: Request) -> Response:
        return answer(_shown(await registry.exposures.get(id, port), request))

    @router.delete("/{port}", response_model=Done)
    async def unexpose_port(id: SandboxId, port: Port) -> Response:
        await registry.exposures.unexpose(id, port)
        return answer(Done(sandbox_id=id))

    @router.post("/{port}/link", status_code=201, response_model=PreviewLink)
    async def create_preview_link(
        id: SandboxId, port: Port, request: Request, body: CreateLink | None = None
    ) -> Response:
        exposure = await registry.exposures.get(id, port)
        expires = math.ceil(time.time() + (body or CreateLink()).expires_in)
        link = registry.exposures.sign_link(exposure, expires)
        places = Places(exposure, request.app.state.settings, request.scope)
        url = None if places.url is None else f"{places.url}?skerry_link={link}"
        expires_at = datetime.fromtimestamp(expires, UTC)
        path_url = f"{places.path_url}&skerry_link={link}"
        return answer(PreviewLink(url=url, path_url=path_url, expires_at=expires_at), 201)

    @router.websocket("/{port}/tcp")
    async def tcp(socket: WebSocket, id: SandboxId, port: Port, channels: Channelled = False) -> None:
        await _attended(socket, (_connections if channels else _connection)(registry, socket, id, port))

    @router.websocket("/{port}/listen")
    async def listen(socket: WebSocket, id: SandboxId, port: Port) -> None:
        await _attended(socket, _listener(registry, socket, id, port))

    return router


def _shown(exposure: Exposure, request: Request) -> ExposedPort:
    places = Places(exposure, request.app.state.settings, request.scope)
    return ExposedPort(
        port=exposure.port,
        name=exposure.name,
        url=places.url,
        path_url=places.path_url,
        token=exposure.token,
        private=exposure.private,
        wake_on_request=exposure.wake_on_request,
        exposed_at=exposure.exposed_at,
        note=places.note,
    )


# -- raw TCP -----------------------------------------------------------------------------------------------------------


class _Frames:
    """A WebSocket as ``relay`` wants it."""

    def __init__(self, socket: WebSocket) -> None:
        self._socket = socket

    async def send(self, frame: bytes | str) -> None:
        with suppress(WebSocketDisconnect, RuntimeError):  # ``recv`` says that the client is gone
            await (self._socket.send_text(frame) if isinstance(frame, str) else self._socket.send_bytes(frame))

    async def recv(self) -> bytes | str | None:
        message = await self._socket.receive()
        if message["type"] == "websocket.disconnect":
            return None
        data: bytes | str | None = message.get("bytes")
        return data if data is not None else message["text"]


async def _attended(socket: WebSocket, work: Coroutine[None, None, int]) -> None:
    """Do the work of a WebSocket until it ends or the server closes; what fails is said and closes it."""
    try:
        await socket.accept()
    except BaseException:
        work.close()
        raise
    closing: asyncio.Event = socket.app.state.closing
    working, ending = asyncio.ensure_future(work), asyncio.ensure_future(closing.wait())
    try:
        await asyncio.wait([working, ending], return_when=asyncio.FIRST_COMPLETED)
        code = working.result() if working.done() else GOING_AWAY
    except Exception as error:  # noqa: BLE001
        known = as_skerry_error(error, during="ports")
        code = 4000 + known.status
        with suppress(WebSocketDisconnect, RuntimeError):
            await socket.send_json({"type": "error", "message": known.message, "hint": known.hint, "code": known.code})
    finally:
        working.cancel()
        ending.cancel()
        await asyncio.gather(working, ending, return_exceptions=True)
    if socket.client_state is WebSocketState.CONNECTED:
        with suppress(WebSocketDisconnect, RuntimeError):
            await socket.close(code)


async def _connection(registry: Registry, socket: WebSocket, id: str, port: int) -> int:
    with registry.attend(id) as presence:
        reader, writer = await _reach(registry, id, port)
        await socket.send_json({"type": "ready"})
        presence.stir()
        return 1000 if await relay.relay(_Frames(socket), reader, writer, presence.stir) else 1011


async def _connections(registry: Registry, socket: WebSocket, id: str, port: int) -> int:
    async with registry.use(id):
        await socket.send_json({"type": "ready"})
    with registry.attend(id) as presence:
        channels = relay.Channels(_Frames(socket), lambda: _reach(registry, id, port), stir=presence.stir)
        try:
            await channels.run()
        finally:
            await channels.close()
    return 1000


async def _listener(registry: Registry, socket: WebSocket, id: str, port: int) -> int:
    # Held, also while nothing moves: what runs inside may need the port at any time.
    async with registry.use(id) as runtime:
        channels = relay.Channels(_Frames(socket))
        ready = asyncio.Event()

        async def accept(connection: socketlib.socket) -> None:
            await ready.wait()
            await channels.carry(*await relay.streams(connection))

        try:
            listening = await runtime.portal.listen(port, accept)
        except OSError as error:
            raise _cannot_listen(error, id, port) from None
        watching = asyncio.ensure_future(_until_gone(registry, id, runtime))
        running = asyncio.ensure_future(channels.run())
        try:
            await socket.send_json({"type": "ready"})
            ready.set()
            await asyncio.wait([watching, running], return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                raise SandboxLostError(f"Sandbox {id!r} ended, and its port {port} with it.")
            running.result()
        finally:
            watching.cancel()
            running.cancel()
            await asyncio.gather(watching, running, return_exceptions=True)
            await listening.close()
            await channels.close()
    return 1000


async def _reach(registry: Registry, id: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    async with registry.use(id) as runtime:
        try:
            return await relay.streams(await runtime.portal.connect(port))
        except OSError:
            raise PortNotListeningError(
                f"Nothing listens on port {port} of sandbox {id!r}.", hint="Is the server in it started?"
            ) from None


async def _until_gone(registry: Registry, id: str, runtime: Runtime) -> None:
    while registry.look(id) is runtime:  # noqa: ASYNC110 - nobody announces it
        await asyncio.sleep(LOOK_EVERY)


def _cannot_listen(error: OSError, id: str, port: int) -> Exception:
    if error.errno == errno.EADDRINUSE:
        return PortInUseError(
            f"Port {port} of sandbox {id!r} is taken by a program in it.", hint="Choose another port, or stop it."
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return PermissionDeniedError(f"Nothing may listen on port {port} of sandbox {id!r}.")
    return error
