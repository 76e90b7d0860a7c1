"""Bytes that leave as they are read: a file, or a part of one, or the tar of a directory."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast
from urllib.parse import quote

from fastapi import Response
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from skerry.errors import RangeNotSatisfiableError
from skerry.server.disconnect import until_disconnect
from skerry.server.errors import unexpected

if TYPE_CHECKING:
    from skerry.providers.contract import Changes
    from skerry.runtime.runtime import Runtime

T = TypeVar("T")

_RANGE = re.compile(r"\s*bytes\s*=\s*(\d{0,18})\s*-\s*(\d{0,18})\s*", re.ASCII | re.IGNORECASE)
BYTES: dict[str, Any] = {"type": "string", "format": "binary"}
RAW_BODY: dict[str, Any] = {"requestBody": {"content": {"application/octet-stream": {"schema": BYTES}}}}


def attachment(path: str, suffix: str = "") -> dict[str, str]:
    """Headers that make a browser save what it gets; contents of a sandbox must never run as a page of this server."""
    name = (path.rstrip("/").rpartition("/")[2] or "root") + suffix
    plain = re.sub(r'[^\x20-\x7e]|["\\%;/]', "_", name)
    encoded = quote(name.encode("utf-8", "surrogateescape"), safe="")
    return {
        "Content-Disposition": f"attachment; filename=\"{plain}\"; filename*=UTF-8''{encoded}",
        "X-Content-Type-Options": "nosniff",
        "Content-Security-Policy": "sandbox; default-src 'none'",
    }


def requested_range(headers: Headers, size: int) -> tuple[int, int] | None:
    """The (offset, length) that a Range header asks for; None for the whole, also when the header makes no sense."""
    # If-Range never matches, because no validators are given out; then RFC 9110 wants the whole.
    match = _RANGE.fullmatch(headers.get("range", ""))
    if match is None or "if-range" in headers or match.groups() == ("", ""):
        return None
    first, last = match.groups()
    if first == "":
        offset, end = max(0, size - int(last)), size
    else:
        offset, end = int(first), min(int(last) + 1, size) if last else size
        if last and int(last) < offset:
            return None
    if offset >= size or offset >= end:
        raise RangeNotSatisfiableError(
            f"The file has {size} bytes; the range asked for lies outside of it.", details={"size": size}
        )
    return offset, end - offset


class Download(Response, Generic[T]):
    """A response that holds the sandbox open while its bytes flow; what fails before the first is an HTTP error."""

    def __init__(
        self, use: AbstractAsyncContextManager[T], deliver: Callable[[T, Scope, Send], Awaitable[None]]
    ) -> None:
        super().__init__()
        self._use, self._deliver = use, deliver

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientDisconnect):
            await until_disconnect(receive, self._run(scope, send))

    async def _run(self, scope: Scope, send: Send) -> None:
        async with self._use as held:
            await self._deliver(held, scope, send)


async def _start(send: Send, status: int, headers: dict[str, str]) -> None:
    raw = [(name.lower().encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})


async def _pour(send: Send, chunks: AsyncIterator[bytes], length: int | None = None, wanted: bool = True) -> None:
    """Send them all and finish; when that cannot be done the response stays unfinished, so that the client notices."""
    sent = 0
    async with aclosing(cast("AsyncGenerator[bytes, None]", chunks)):
        try:
            while wanted and (chunk := await anext(chunks, b"")):
                sent += len(chunk)
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await asyncio.sleep(0)
        except Exception as error:  # noqa: BLE001
            unexpected(error, during="download")
            return
    if length is None or sent == length or not wanted:  # else the file shrank while it was read
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def file_download(use: AbstractAsyncContextManager[Runtime], path: str) -> Download[Runtime]:
    async def deliver(runtime: Runtime, scope: Scope, send: Send) -> None:
        async with await runtime.files.open(path) as file:
            headers = {"Content-Type": file.mime_type, **attachment(path)}
            if not file.size and await file.read(1):  # as in /proc, where files do not know their size
                await _start(send, 200, headers)
                return await _pour(send, file.chunks(), wanted=scope["method"] != "HEAD")
            span = requested_range(Headers(scope=scope), file.size)
            offset, length = span or (0, file.size)
            headers |= {"Content-Length": str(length), "Accept-Ranges": "bytes"}
            if span:
                headers["Content-Range"] = f"bytes {offset}-{offset + length - 1}/{file.size}"
            await _start(send, 206 if span else 200, headers)
            chunks = file.chunks(offset=offset, length=length)
            await _pour(send, chunks, length=length, wanted=scope["method"] != "HEAD")

    return Download(use, deliver)


def archive_download(use: AbstractAsyncContextManager[Runtime], path: str) -> Download[Runtime]:
    async def deliver(runtime: Runtime, scope: Scope, send: Send) -> None:
        async with aclosing(cast("AsyncGenerator[bytes, None]", runtime.files.archive(path))) as chunks:
            first = await anext(chunks, b"")
            await _start(send, 200, {"Content-Type": "application/x-tar"} | attachment(path, ".tar"))
            await send({"type": "http.response.body", "body": first, "more_body": True})
            await _pour(send, chunks)

    return Download(use, deliver)


def changes_download(use: AbstractAsyncContextManager[Changes], name: str) -> Download[Changes]:
    async def deliver(changes: Changes, scope: Scope, send: Send) -> None:
        async with aclosing(changes.tar()) as chunks:
            first = await anext(chunks, b"")
            await _start(send, 200, {"Content-Type": "application/x-tar"} | attachment(name, ".tar"))
            await send({"type": "http.response.body", "body": first, "more_body": True})
            await _pour(send, chunks)

    return Download(use, deliver)
