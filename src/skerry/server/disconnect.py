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


class _Watch:
    """Cancels the task that made it when the client is gone."""

    def __init__(self, receive: Receive) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.task = task
        self.gone = False
        self._watching = asyncio.ensure_future(self._until_gone(receive))
        self._watching.add_done_callback(self._over)

    async def _until_gone(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    def _over(self, watching: asyncio.Task[None]) -> None:
        if not watching.cancelled() and watching.exception() is None:
            self.gone = True
            self.task.cancel()

    def end(self) -> None:
        if self.gone:
            self.task.uncancel()
        self._watching.remove_done_callback(self._over)
        self._watching.cancel()


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do ``work``, whose request body has been read; cancel it and raise ``ClientDisconnect`` if the client leaves."""
    watch = _Watch(receive)
    try:
        return await work
    except asyncio.CancelledError:
        if watch.gone and watch.task.cancelling() == 1:  # nobody else wants it to end
            raise ClientDisconnect from None
        raise
    except Exception as failure:
        if watch.gone:
            if not isinstance(failure, SkerryError):
                unexpected(failure, during="cancellation")
            raise ClientDisconnect from None
        raise
    finally:
        watch.end()
