"""What happens to a task, written down while it happens, so that a stream of it can be joined late and lose nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from typing import Any

import structlog

from skerry.control.task_rows import TaskRows
from skerry.errors import SkerryError
from skerry.models import now

log = structlog.get_logger(__name__)

GATHER = 0.08
"""Seconds that pieces of an answer wait for each other: each would be a row otherwise."""
MOMENT = 0.03
"""Seconds that anything waits for what follows it at once: each write costs as much as several together."""
AGAIN = 1.0
LAST_ATTEMPTS = 20
"""How often a store that does not answer is asked at the end of a task, once a second."""

Noted = tuple[str, datetime, dict[str, Any]]


class Journal:
    """Of one task, kept by the process that works on it."""

    def __init__(self, rows: TaskRows, task: str, told: Callable[[], None]) -> None:
        """``told`` is called whenever there is something new in the store."""
        self._rows = rows
        self._task = task
        self._told = told
        self._waiting: list[Noted] = []
        self._news = asyncio.Event()
        self._closing = asyncio.Event()
        self._writing = asyncio.Lock()
        self._worker: asyncio.Task[None] | None = None

    def open(self) -> None:
        self._worker = asyncio.get_running_loop().create_task(self._work())

    def add(self, type: str, **data: Any) -> None:
        last = self._waiting[-1] if self._waiting else None
        if type == "chunk" and last is not None and last[0] == "chunk":
            last[2]["content"] += data["content"]
        else:
            self._waiting.append((type, now(), {name: value for name, value in data.items() if value is not None}))
        self._news.set()

    async def close(self) -> None:
        """Everything is in the store when this returns; raises if the store cannot be reached for long."""
        self._closing.set()
        self._news.set()
        if self._worker is not None:
            await self._worker
        for attempt in range(LAST_ATTEMPTS):
            try:
                return await self.flush()
            except SkerryError:
                if attempt == LAST_ATTEMPTS - 1:
                    raise
                await asyncio.sleep(AGAIN)

    async def flush(self) -> None:
        """Write what waits. Not to be cancelled: the store would finish writing what is then written again."""
        async with self._writing:
            noted, self._waiting = self._waiting, []
            try:
                await self._rows.add_events(self._task, noted)
            except SkerryError:
                self._waiting = noted + self._waiting
                raise
        if noted:
            self._told()

    async def _work(self) -> None:
        while not self._closing.is_set():
            await self._news.wait()
            self._news.clear()
            await self._pause(GATHER if all(type == "chunk" for type, _, _ in self._waiting) else MOMENT)
            try:
                await self.flush()
            except SkerryError as error:
                log.warning("a task's events could not be written and wait", task=self._task, reason=error.message)
                self._news.set()
                await self._pause(AGAIN)

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._closing.wait(), seconds)
