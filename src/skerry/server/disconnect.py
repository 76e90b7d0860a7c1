"""Work that ends when the client that asked for it goes away."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from skerry.errors import SkerryError
from skerry.server.errors import unexpected

T = TypeVar("T")


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do ``work``, whose request body has been read; cancel it and raise ``ClientDisconnect`` if the client leaves."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
            (failure,) = await asyncio.gather(task, return_exceptions=True)
            if isinstance(failure, Exception) and not isinstance(failure, SkerryError):
                unexpected(failure, during="cancellation")
        await asyncio.gather(watcher, return_exceptions=True)
