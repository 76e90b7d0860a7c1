"""A circuit breaker: what keeps failing is left alone for a while."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

from skerry.errors import CircuitOpenError

THRESHOLD = 5
OPEN_FOR = 30.0
TO_CLOSE = 3


class Breaker:
    """Closed until five failures in a row, then open for 30 seconds, then half open until three successes."""

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._clock = clock
        self._failures = 0
        self._successes = 0
        self._opened: float | None = None
        self._reason = ""

    @property
    def state(self) -> Literal["closed", "open", "half-open"]:
        if self._opened is None:
            return "closed"
        return "open" if self._clock() < self._opened + OPEN_FOR else "half-open"

    def check(self) -> None:
        """Raise ``CircuitOpenError`` while it is open."""
        if self.state == "open":
            assert self._opened is not None
            left = max(1.0, round(self._opened + OPEN_FOR - self._clock(), 1))
            raise CircuitOpenError(
                f"{self._what} failed {THRESHOLD} times in a row and is not tried again for {left:g} seconds. "
                f"The last time: {self._reason}",
                hint="Wait, then try again.",
                details={"retryAfter": left, "status": "circuit_open"},
            )

    def succeeded(self) -> None:
        self._failures = 0
        if self._opened is not None:
            self._successes += 1
            if self._successes >= TO_CLOSE:
                self._opened = None

    def failed(self, reason: str) -> None:
        self._reason = reason
        self._successes = 0
        self._failures += 1
        if self._opened is not None or self._failures >= THRESHOLD:
            self._opened = self._clock()
