"""Time as a machine has it: it stands still while the machine is frozen."""

from __future__ import annotations

import asyncio
from types import TracebackType


class Clock:
    """Deadlines for what happens inside. What was frozen for an hour has not run an hour longer."""

    def __init__(self) -> None:
        self._deadlines: set[Deadline] = set()
        self.stopped = False

    def timeout(self, seconds: float | None) -> Deadline:
        """As ``asyncio.timeout``, by this clock."""
        return Deadline(self, seconds)

    def stop(self) -> None:
        self.stopped = True
        for deadline in self._deadlines:
            deadline.pause()

    def go_on(self) -> None:
        self.stopped = False
        for deadline in self._deadlines:
            deadline.resume()


class Deadline:
    def __init__(self, clock: Clock, seconds: float | None) -> None:
        self._clock = clock
        self._left = seconds
        self._timeout = asyncio.timeout(None)

    def pause(self) -> None:
        when = self._timeout.when()
        if when is not None and not self._timeout.expired():
            self._left = when - asyncio.get_running_loop().time()
            self._timeout.reschedule(None)

    def resume(self) -> None:
        if self._left is not None and not self._timeout.expired():
            self._timeout.reschedule(asyncio.get_running_loop().time() + self._left)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()
        if self._left is not None:
            self._clock._deadlines.add(self)
            if not self._clock.stopped:
                self.resume()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clock._deadlines.discard(self)
        await self._timeout.__aexit__(kind, error, trace)
