"""One object that goes up in parts, and is either finished or taken back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator
from typing import Any

import obstore
from obstore.store import ObjectStore

PART = 8 << 20
TOGETHER = 4
TAKING_BACK = 15.0


class _TakenBackError(Exception):
    """Raised to obstore, which then aborts the upload."""


async def upload(
    store: ObjectStore, path: str, data: bytes | AsyncIterable[bytes], limit: float
) -> tuple[int, str | None]:
    """The size and the etag. ``limit`` bounds each wait for the bucket, not those for the data."""
    source = _slices(data) if isinstance(data, bytes | bytearray | memoryview) else data
    return await _Upload(store, path, limit).run(source)


class _Upload:
    def __init__(self, store: ObjectStore, path: str, limit: float) -> None:
        self._store = store
        self._path = path
        self._limit = limit
        self._queue: asyncio.Queue[bytes | _TakenBackError | None] = asyncio.Queue(1)
        self._done: asyncio.Future[obstore.PutResult] | None = None
        self._size = 0

    async def run(self, source: AsyncIterable[bytes]) -> tuple[int, str | None]:
        pending = bytearray()
        try:
            async for chunk in source:
                pending += chunk
                self._size += len(chunk)
                if len(pending) >= PART:
                    # Not before there is a whole part: what is smaller than that goes up in one request.
                    await self._send(bytes(pending))
                    pending.clear()
            if self._done is None:
                async with asyncio.timeout(self._limit):
                    result = await obstore.put_async(self._store, self._path, bytes(pending), use_multipart=False)
                return self._size, result["e_tag"]
            if pending:
                await self._send(bytes(pending))
            await self._send(None)
            async with asyncio.timeout(self._limit):
                result = await asyncio.shield(self._done)
            return self._size, result["e_tag"]
        except BaseException:
            await self._take_back()
            raise

    async def _send(self, chunk: bytes | None) -> None:
        if self._done is None:
            put = obstore.put_async(
                self._store, self._path, self._parts(), use_multipart=True, chunk_size=PART, max_concurrency=TOGETHER
            )
            self._done = asyncio.ensure_future(put)
        handed = asyncio.ensure_future(self._queue.put(chunk))
        try:
            waiting: set[asyncio.Future[Any]] = {handed, self._done}
            await asyncio.wait(waiting, timeout=self._limit, return_when=asyncio.FIRST_COMPLETED)
            if not handed.done():
                if not self._done.done():
                    raise TimeoutError
                self._done.result()
        finally:
            if not handed.done():
                handed.cancel()

    async def _parts(self) -> AsyncIterator[bytes]:
        while (chunk := await self._queue.get()) is not None:
            if isinstance(chunk, _TakenBackError):
                raise chunk
            yield chunk

    async def _take_back(self) -> None:
        if self._done is None or self._done.done():
            return
        while not self._queue.empty():
            self._queue.get_nowait()
        self._queue.put_nowait(_TakenBackError())
        # Even when we are cancelled: the parts that are there would stay, and cost, for ever.
        waiting = asyncio.ensure_future(asyncio.wait({self._done}, timeout=TAKING_BACK))
        while not waiting.done():
            try:
                await asyncio.shield(waiting)
            except asyncio.CancelledError:
                continue
        if not self._done.done():
            self._done.cancel()
        elif not self._done.cancelled():
            self._done.exception()


async def _slices(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), PART):
        yield data[start : start + PART]
