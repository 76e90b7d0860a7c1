"""Waiting for a server that was there, and is being started again."""

from __future__ import annotations

import asyncio
import time

from skerry.errors import ServerUnreachableError


class Reunion:
    """Waits longer each time, half a minute in all; then the error is what it is."""

    PAUSES = (0.2, 0.4, 0.8, 1.6, 3.0, 4.0, 5.0, 5.0, 5.0, 5.0)

    def __init__(self) -> None:
        self._left = iter(self.PAUSES)

    async def wait_async(self, error: ServerUnreachableError) -> None:
        await asyncio.sleep(self._seconds(error))

    def wait(self, error: ServerUnreachableError) -> None:
        time.sleep(self._seconds(error))

    def _seconds(self, error: ServerUnreachableError) -> float:
        for seconds in self._left:
            return seconds
        raise error
