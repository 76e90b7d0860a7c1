"""Events on their way to one reader, who may be slow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

T = TypeVar("T")

LIMIT = 1 << 20


class Backlog(Generic[T]):
    """At most about a megabyte waits here: then ``pause`` is called, and ``resume`` once it was read."""

    def __init__(self) -> None:
        self.size = 0
        self._queue: list[T] = []
        self._wake = asyncio.Event()
        self._done = False

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def add(self, event: T, size: int) -> None:
        self._queue.append(event)
        self.size += size
        if self.size > LIMIT:
            self.pause()
        self._wake.set()

    def finish(self) -> None:
        self._done = True
        self._wake.set()

    async def read(self) -> AsyncIterator[T]:
        while True:
            batch, self._queue, self.size = self._queue, [], 0
            self._wake.clear()
            for event in batch:
                yield event
            if self._done and not self._queue:
                return
            self.resume()
            if not self._queue:
                await self._wake.wait()
