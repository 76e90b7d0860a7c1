"""Writes that need not be waited for, in the order they were made."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import structlog

from skerry.errors import SkerryError

log = structlog.get_logger(__name__)

Write = Callable[[], Awaitable[object]]

BREATH = 0.03
"""Seconds before the first of several writes, so that the command a sandbox was woken for comes first."""


class Ledger:
    """One worker that carries writes to the store; ``flush`` waits until those made so far are there."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Write] = asyncio.Queue()
        self._hurry = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None

    def open(self) -> None:
        self._worker = asyncio.get_running_loop().create_task(self._work())

    def post(self, write: Write) -> None:
        self._queue.put_nowait(write)

    async def flush(self) -> None:
        """Wait for what was posted before; what others post meanwhile is not waited for."""
        if self._worker is None:
            return
        through = asyncio.Event()

        async def note() -> None:
            through.set()

        self.post(note)
        self._hurry.set()
        await through.wait()

    async def close(self) -> None:
        if self._worker is not None:
            await self.flush()
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
            self._worker = None

    async def _work(self) -> None:
        while True:
            if self._queue.empty():
                self._hurry.clear()
                write = await self._queue.get()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(BREATH):
                        await self._hurry.wait()
            else:
                write = self._queue.get_nowait()
            try:
                await write()
            except SkerryError as error:
                log.warning("a record could not be written", code=error.code, reason=error.message)
            except Exception as error:  # noqa: BLE001 - the next ones must still be written
                log.error("a record could not be written", error=type(error).__qualname__)
