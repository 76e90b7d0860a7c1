"""Those who work with one agent at the same time, and whoever needs it started anew, who waits for the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

T = TypeVar("T")


class Shift:
    def __init__(self) -> None:
        self._door = asyncio.Lock()
        self._empty = asyncio.Event()
        self._empty.set()
        self._inside = 0

    @asynccontextmanager
    async def entered(self, begin: Callable[[], Awaitable[T]]) -> AsyncGenerator[T, None]:
        """At work, with what ``begin`` has made or found. One begins at a time: who comes later waits at the door."""
        async with self._door:
            found = await begin()
            self._inside += 1
            self._empty.clear()
        try:
            yield found
        finally:
            self._inside -= 1
            if not self._inside:
                self._empty.set()

    async def alone(self) -> None:
        """For one who is just beginning: until all who are at work have left."""
        await self._empty.wait()
