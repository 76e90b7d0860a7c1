"""Writes that need not be waited for, in the order they were made."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from skerry.errors import SkerryError

log = structlog.get_logger(__name__)

Write = Callable[[], Awaitable[object]]


class Ledger:
    """One worker that carries writes to the store; ``flush`` waits until all of them are there."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Write] = asyncio.Queue()
        self._worker: asyncio.Task[None] | None = None

    def open(self) -> None:
        self._worker = asyncio.get_running_loop().create_task(self._work())

    def post(self, write: Write) -> None:
        self._queue.put_nowait(write)

    async def flush(self) -> None:
        await self._queue.join()

    async def close(self) -> None:
        if self._worker is not None:
            await self.flush()
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
            self._worker = None

    async def _work(self) -> None:
        while True:
            write = await self._queue.get()
            try:
                await write()
            except SkerryError as error:
                log.warning("a record could not be written", code=error.code, reason=error.message)
            finally:
                self._queue.task_done()
