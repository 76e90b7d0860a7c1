"""The bucket as the file system sees it: answers and errors in bounded time, and errors as the kernel knows them."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from skerry.errors import (
    BucketDeniedError,
    BucketFullError,
    InvalidKeyError,
    ObjectNotFoundError,
    SkerryError,
)
from skerry.storage.buckets import Bucket, Item

PATIENCE = 15.0
"""How long a request may stay without an answer, in seconds."""
LISTING, COPYING = 2, 4
"""How many times as long a listing may take, and a copy or the deletion of many."""
RESPITE = 2.0
"""After a bucket did not answer, everything fails at once for so long: a program that walks a tree on a dead bucket
must not wait for each file."""
CHUNK = 8 << 20

T = TypeVar("T")
Moved = Callable[[str, int], None]
"""Hears of bytes that went ``up`` or ``down``."""


class Remote:
    """``bucket`` is None where it is no longer configured: then everything is an error."""

    def __init__(
        self, bucket: Bucket | None, patience: float = PATIENCE, moved: Moved = lambda way, size: None
    ) -> None:
        self._bucket = bucket
        self._patience = patience
        self._moved = moved
        self._clock = time.monotonic
        self._dead_until = 0.0
        self.last_error: str | None = None

    async def head(self, key: str) -> Item | None:
        """None where there is no such object."""
        try:
            return await self._within(self._here.head(key))
        except FileNotFoundError:
            return None

    async def children(self, prefix: str) -> tuple[list[Item], list[str]]:
        items, inner = await self._within(self._here.children(prefix), LISTING)
        # Some have an object for the directory itself, whose key ends with a slash that we never see.
        return [item for item in items if item.key != prefix], inner

    async def any_below(self, prefix: str) -> bool:
        async def look() -> bool:
            found = self._here.list(prefix)
            try:
                async for _ in found:
                    return True
                return False
            finally:
                await found.aclose()  # type: ignore[attr-defined]

        return await self._within(look())

    async def below(self, prefix: str, most: int) -> list[Item]:
        """Everything below a prefix; one more than ``most`` if there is more than that."""

        async def collect() -> list[Item]:
            items: list[Item] = []
            found = self._here.list(prefix)
            try:
                async for item in found:
                    if item.key != prefix:
                        items.append(item)
                    if len(items) > most:
                        break
                return items
            finally:
                await found.aclose()  # type: ignore[attr-defined]

        return await self._within(collect(), LISTING)

    async def read(self, key: str, start: int, length: int) -> bytes:
        data = await self._within(self._here.read(key, start, length))
        self._moved("down", len(data))
        return data

    async def stream(self, key: str) -> AsyncIterator[bytes]:
        chunks = self._here.stream(key).__aiter__()
        while True:
            try:
                chunk = await self._within(chunks.__anext__())
            except StopAsyncIteration:
                return
            self._moved("down", len(chunk))
            yield chunk

    async def put(self, key: str, fd: int, size: int) -> Item:
        """Upload what a file holds."""
        item = await self._put(key, fd, size)
        self._moved("up", size)
        return item

    async def _put(self, key: str, fd: int, size: int) -> Item:
        """Time is up when nothing moved for a while, however large the file is."""
        if size <= CHUNK:
            return await self._within(self._here.put(key, os.pread(fd, size, 0)))
        moved = self._clock()

        async def parts() -> AsyncIterator[bytes]:
            nonlocal moved
            for start in range(0, size, CHUNK):
                moved = self._clock()
                yield os.pread(fd, min(CHUNK, size - start), start)
            moved = self._clock()

        with self._translated():
            putting = asyncio.ensure_future(self._here.put(key, parts()))
            try:
                while not putting.done():
                    left = moved + self._patience - self._clock()
                    if left <= 0:
                        raise TimeoutError
                    await asyncio.wait({putting}, timeout=left)
                return putting.result()
            finally:
                putting.cancel()
                await asyncio.gather(putting, return_exceptions=True)

    async def put_empty(self, key: str) -> None:
        await self._within(self._here.put(key, b""))

    async def delete(self, *keys: str) -> None:
        await self._within(self._here.delete(*keys), COPYING if len(keys) > 1 else 1)

    async def copy(self, source: str, target: str) -> None:
        await self._within(self._here.copy(source, target), COPYING)

    # -- time and errors -----------------------------------------------------------------------------------------------

    @property
    def _here(self) -> Bucket:
        if self._bucket is None:
            raise OSError(errno.EIO, "the bucket is no longer configured")
        if self._clock() < self._dead_until:
            raise OSError(errno.EIO, "the bucket did not answer a moment ago")
        return self._bucket

    async def _within(self, work: Awaitable[T], times: int = 1) -> T:
        with self._translated():
            async with asyncio.timeout(times * self._patience):
                return await work

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            self._dead_until = self._clock() + RESPITE
            self.last_error = "The bucket did not answer in time."
            raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)) from None
        except SkerryError as error:
            number = _number(error)
            if number == errno.EIO:
                self._dead_until = self._clock() + RESPITE
            if number != errno.ENOENT:
                self.last_error = error.message
            raise OSError(number, os.strerror(number)) from error


def _number(error: SkerryError) -> int:
    match error:
        case ObjectNotFoundError():
            return errno.ENOENT
        case BucketDeniedError():
            return errno.EACCES
        case BucketFullError():
            return errno.ENOSPC
        case InvalidKeyError():
            return errno.EILSEQ
        case _:
            return errno.EIO
