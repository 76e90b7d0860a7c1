"""Events of an execution as they reach the client, and how long to wait for one that cannot begin yet."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from skerry.client.wire import stream_error
from skerry.errors import InterpreterNotReadyError, SkerryError
from skerry.models import CodeContext, CodeEvent

ContextRef = CodeContext | str


def context_name(context: ContextRef | None) -> str | None:
    return context.id if isinstance(context, CodeContext) else context


class ReceivedEvent(CodeEvent):
    """An event from the wire. An ``error`` that is no fault of the code says, by its code, which exception it is."""

    code: str | None = None
    hint: str | None = None
    details: dict[str, Any] | None = None

    def failure(self) -> SkerryError:
        message = self.error.message if self.error is not None else None
        return stream_error({"code": self.code, "message": message, "hint": self.hint, "details": self.details})


class Patience:
    """Waits for an interpreter that is still starting, as long as the server asks for, a few times."""

    TIMES = 3
    LONGEST = 10.0

    def __init__(self) -> None:
        self._waited = 0

    async def wait_async(self, error: InterpreterNotReadyError) -> None:
        await asyncio.sleep(self._seconds(error))

    def wait(self, error: InterpreterNotReadyError) -> None:
        time.sleep(self._seconds(error))

    def _seconds(self, error: InterpreterNotReadyError) -> float:
        if self._waited == self.TIMES:
            raise error
        self._waited += 1
        asked = error.retry_after
        return min(max(asked if asked is not None else 1.0, 0.0), self.LONGEST)
