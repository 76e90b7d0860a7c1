"""HTTP to programs on this machine's loopback, and to the control plane: JSON there and back, and event streams."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any
from urllib.parse import urlsplit

from reach import reach

LARGEST = 64 * 2**20


class Failed(Exception):
    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class Speaker:
    def __init__(self, url: str, headers: dict[str, str] | None = None, user: tuple[str, str] | None = None) -> None:
        self._parts = urlsplit(url)
        self._headers = dict(headers or {})
        if user is not None:
            self._headers["Authorization"] = "Basic " + base64.b64encode(":".join(user).encode()).decode()

    async def ask(self, method: str, path: str, body: Any = None, patience: float = 30.0) -> Any:
        """The answer's JSON, or None where it has none. Raises ``Failed``, and ``OSError`` where nobody answers."""
        try:
            return await asyncio.wait_for(self._ask(method, path, body), patience)
        except asyncio.TimeoutError:
            raise Failed(f"{method} {path} was not answered within {patience:g} seconds.") from None

    async def _ask(self, method: str, path: str, body: Any) -> Any:
        reader, writer, status, headers = await self._send(method, path, body, "application/json")
        try:
            data = b""
            async for piece in _body(reader, headers):
                data += piece
                if len(data) > LARGEST:
                    raise Failed(f"The answer to {method} {path} is too large.")
        finally:
            writer.close()
        if status >= 400:
            raise Failed(f"{method} {path} was answered with {status}: {data[:500].decode('utf-8', 'replace')}", status)
        try:
            return json.loads(data) if data.strip() else None
        except (ValueError, RecursionError):
            return None

    async def events(self, path: str) -> AsyncGenerator[Any, None]:
        """What an event stream says, as JSON, until it ends."""
        reader, writer, status, headers = await asyncio.wait_for(self._send("GET", path, None, "text/event-stream"), 30)
        try:
            if status != 200:
                raise Failed(f"GET {path} was answered with {status}.", status)
            rest, said = b"", []
            async for piece in _body(reader, headers):
                *lines, rest = (rest + piece).split(b"\n")
                for line in (each.rstrip(b"\r") for each in lines):
                    if line.startswith(b"data:"):
                        said.append(line[5:].strip())
                    elif not line and said:
                        try:
                            yield json.loads(b"\n".join(said))
                        except (ValueError, RecursionError):
                            pass
                        said = []
        finally:
            writer.close()

    async def _send(
        self, method: str, path: str, body: Any, accept: str
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, int, dict[str, str]]:
        reader, writer = await reach(self._parts)
        try:
            data = b"" if body is None else json.dumps(body).encode()
            lines = {"Host": self._parts.netloc, "Accept": accept, "Connection": "close", **self._headers}
            if body is not None:
                lines.update({"Content-Type": "application/json", "Content-Length": str(len(data))})
            elif method != "GET":
                lines["Content-Length"] = "0"
            head = f"{method} {self._parts.path}{path} HTTP/1.1\r\n"
            head += "".join(f"{name}: {value}\r\n" for name, value in lines.items())
            writer.write(head.encode("latin-1") + b"\r\n" + data)
            await writer.drain()
            answer = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            status = int(answer[0].split(" ", 2)[1])
            headers = dict(line.lower().split(": ", 1) for line in answer[1:] if ": " in line)
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, IndexError, ValueError):
            writer.close()
            raise OSError("The connection ended in the middle of an answer.") from None
        except BaseException:
            writer.close()
            raise
        return reader, writer, status, headers


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    try:
        if "chunked" in headers.get("transfer-encoding", ""):
            while True:
                size = int((await reader.readline()).split(b";")[0] or b"0", 16)
                if not size:
                    return
                yield await reader.readexactly(size)
                await reader.readexactly(2)
        elif "content-length" in headers:
            left = int(headers["content-length"])
            while left:
                piece = await reader.read(min(left, 1 << 16))
                if not piece:
                    raise OSError("The connection ended in the middle of an answer.")
                left -= len(piece)
                yield piece
        else:
            while True:
                piece = await reader.read(1 << 16)
                if not piece:
                    return
                yield piece
    except (asyncio.IncompleteReadError, ValueError):
        raise OSError("The connection ended in the middle of an answer.") from None
