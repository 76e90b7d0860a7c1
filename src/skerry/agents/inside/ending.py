"""Ending tasks for good."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any


async def end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel them until they are over: before Python 3.12 `asyncio.wait_for` may swallow a cancellation."""
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        done, left = await asyncio.wait(left, timeout=1)
        await asyncio.gather(*done, return_exceptions=True)
