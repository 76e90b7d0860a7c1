"""Pushing a session's branch: asked of the bridge, and waited for."""

from __future__ import annotations

import asyncio
from typing import Any

from skerry.errors import PushFailedError


class Pushes:
    """Keyed by branch: who asks for one that is under way waits with the others."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._waiting: dict[str, asyncio.Future[str]] = {}

    async def wait(self, branch: str, send: Any) -> str:
        """The commit that was pushed. ``send`` tells the bridge, and is called once for all who wait."""
        future = self._waiting.get(branch)
        if future is None:
            future = self._waiting[branch] = asyncio.get_running_loop().create_future()
            future.add_done_callback(lambda done: done.cancelled() or done.exception())
            try:
                await send({"type": "push", "branchName": branch})
            except BaseException:
                self._waiting.pop(branch).cancel()
                raise
        try:
            async with asyncio.timeout(self._patience):
                return await asyncio.shield(future)
        except TimeoutError:
            self._waiting.pop(branch, None)
            raise PushFailedError(
                f"Branch {branch!r} was not pushed within {self._patience:g} seconds.", hint="Try again."
            ) from None

    def hear(self, event: dict[str, Any]) -> None:
        future = self._waiting.pop(str(event.get("branchName")), None)
        if future is None or future.done():
            return
        if event["type"] == "push_complete":
            future.set_result(str(event.get("sha", "")))
        else:
            future.set_exception(PushFailedError(f"The branch could not be pushed: {event.get('error', '')}"))

    def fail(self, reason: str) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(PushFailedError(reason))
        self._waiting.clear()
