"""A WebSocket, over the network or into the embedded server: frames of bytes or text, then None."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import Any, Protocol

import httpx
from websockets.frames import Close

from skerry.client.asgi import Call, Host, scope_of
from skerry.errors import ServerUnreachableError, SkerryError, UnauthorizedError, error_from_wire

Frame = bytes | str

_NOT_LET_IN = "The server did not let this client in; it wants an API key (SKERRY_API_KEY)."


class AsyncFrames(Protocol):
    @property
    def lost(self) -> bool:
        """Whether, after ``recv`` gave None, the connection was lost rather than closed."""
        ...

    async def send(self, frame: Frame) -> None: ...
    async def recv(self) -> Frame | None: ...
    async def close(self) -> None: ...


class Frames(Protocol):
    @property
    def lost(self) -> bool: ...
    def send(self, frame: Frame) -> None: ...
    def recv(self) -> Frame | None: ...
    def close(self) -> None: ...


def _refused(url: str, error: Exception) -> SkerryError:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return UnauthorizedError("The server refused this client.", hint="Give the right API key (SKERRY_API_KEY).")
    return ServerUnreachableError(
        f"No WebSocket could be opened at {url}: {error or type(error).__name__}.",
        hint="Is the server running? `skerry serve` starts one.",
    )


def _is_loss(close: Close | None) -> bool:
    """Whether a connection ended without the server meaning it to; raises if it never let us in."""
    if close is not None and close.code in (4401, 4403):
        raise error_from_wire(close.code - 4000, {"error": {"code": close.reason, "message": _NOT_LET_IN}})
    # 1000 and the codes of our own, from 4000 on, are said on purpose; a server that stops says 1001 or 1012.
    return close is None or (close.code != 1000 and close.code < 4000)


class AsyncWireFrames:
    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self.lost = False

    @classmethod
    async def connect(cls, url: str, headers: dict[str, str], path: str | None) -> AsyncWireFrames:
        from websockets.asyncio.client import connect, unix_connect
        from websockets.exceptions import WebSocketException

        options: dict[str, Any] = {"additional_headers": headers, "max_size": None, "compression": None}
        try:
            socket = await (unix_connect(path, url, **options) if path else connect(url, **options))
        except (OSError, WebSocketException, TimeoutError) as error:
            raise _refused(url, error) from error
        return cls(socket)

    async def send(self, frame: Frame) -> None:
        from websockets.exceptions import ConnectionClosed

        try:
            await self._socket.send(frame)
        except ConnectionClosed:
            return

    async def recv(self) -> Frame | None:
        from websockets.exceptions import ConnectionClosed

        try:
            frame: Frame = await self._socket.recv()
        except ConnectionClosed as error:
            self.lost = _is_loss(error.rcvd)
            return None
        return frame

    async def close(self) -> None:
        await self._socket.close()


class WireFrames:
    def __init__(self, stack: ExitStack, socket: Any) -> None:
        self._stack = stack
        self._socket = socket
        self.lost = False

    @classmethod
    def connect(cls, url: str, headers: dict[str, str], path: str | None) -> WireFrames:
        from websockets.exceptions import WebSocketException
        from websockets.sync.client import connect, unix_connect

        options: dict[str, Any] = {"additional_headers": headers, "max_size": None, "compression": None}
        try:
            stack = ExitStack()
            socket = stack.enter_context(unix_connect(path, url, **options) if path else connect(url, **options))
        except (OSError, WebSocketException, TimeoutError) as error:
            raise _refused(url, error) from error
        return cls(stack, socket)

    def send(self, frame: Frame) -> None:
        from websockets.exceptions import ConnectionClosed

        try:
            self._socket.send(frame)
        except ConnectionClosed:
            return

    def recv(self) -> Frame | None:
        from websockets.exceptions import ConnectionClosed

        try:
            frame: Frame = self._socket.recv()
        except ConnectionClosed as error:
            self.lost = _is_loss(error.rcvd)
            return None
        return frame

    def close(self) -> None:
        self._stack.close()


class _Socket:
    """A WebSocket into an application on another loop; every coroutine runs on that loop."""

    def __init__(self, host: Host, url: str, headers: dict[str, str]) -> None:
        self.host = host
        self._scope = scope_of(httpx.Request("GET", url, headers=headers), "websocket")
        self._scope["subprotocols"] = []
        self._call: Call | None = None
        self.lost = False
        self._left = False

    async def connect(self) -> None:
        self._call = Call(self.host, self._scope, "websocket.disconnect")
        self._call.start()
        await self._call.put({"type": "websocket.connect"})
        message = await self._call.take()
        if message is None or message["type"] != "websocket.accept":
            reason = (message or {}).get("reason") or self._call.failure or "it was refused"
            raise ServerUnreachableError(f"No WebSocket could be opened: {reason}.")

    async def send(self, frame: Frame) -> None:
        assert self._call is not None
        kind = "text" if isinstance(frame, str) else "bytes"
        await self._call.put({"type": "websocket.receive", kind: frame})

    async def recv(self) -> Frame | None:
        assert self._call is not None
        message = await self._call.take()
        if message is None or message["type"] != "websocket.send":
            if not self._left:
                self.lost = _is_loss(Close(message.get("code", 1000), message.get("reason") or "") if message else None)
            return None
        text: Frame | None = message.get("text")
        return text if text is not None else message.get("bytes")

    async def close(self) -> None:
        self._left = True
        if self._call is not None:
            self._call.disconnect()


class AsyncLocalFrames:
    def __init__(self, socket: _Socket) -> None:
        self._socket = socket

    @property
    def lost(self) -> bool:
        return self._socket.lost

    @classmethod
    async def connect(cls, host: Host, url: str, headers: dict[str, str]) -> AsyncLocalFrames:
        socket = _Socket(host, url, headers)
        await asyncio.wrap_future(host.submit(socket.connect()))
        return cls(socket)

    async def send(self, frame: Frame) -> None:
        await asyncio.wrap_future(self._socket.host.submit(self._socket.send(frame)))

    async def recv(self) -> Frame | None:
        return await asyncio.wrap_future(self._socket.host.submit(self._socket.recv()))

    async def close(self) -> None:
        await asyncio.wrap_future(self._socket.host.submit(self._socket.close()))


class LocalFrames:
    def __init__(self, socket: _Socket) -> None:
        self._socket = socket

    @property
    def lost(self) -> bool:
        return self._socket.lost

    @classmethod
    def connect(cls, host: Host, url: str, headers: dict[str, str]) -> LocalFrames:
        socket = _Socket(host, url, headers)
        host.submit(socket.connect()).result()
        return cls(socket)

    def send(self, frame: Frame) -> None:
        self._socket.host.submit(self._socket.send(frame)).result()

    def recv(self) -> Frame | None:
        return self._socket.host.submit(self._socket.recv()).result()

    def close(self) -> None:
        self._socket.host.submit(self._socket.close()).result()
