"""How much of the server's time the output of one sandbox may take, so that a flood in one is no delay in another."""

from __future__ import annotations

import time

SHARE = 0.25
"""Of one processor; some hundred megabytes a second."""
BURST = 0.05
"""Seconds that may be spent at once, after a while of less."""


class Flow:
    """One for each sandbox, shared by all that reads from it. ``rate``: at most so many bytes a second, moreover."""

    def __init__(self, rate: float | None = None) -> None:
        self._least = 0.0 if rate is None else SHARE / rate
        self._left = BURST
        self._at = time.perf_counter()

    def spend(self, seconds: float, count: int) -> float:
        """Account for time that was spent on so much output; how long to leave the rest in its pipes."""
        moment = time.perf_counter()
        cost = max(seconds, count * self._least)
        self._left = min(BURST, self._left + (moment - self._at) * SHARE) - cost
        self._at = moment
        return 0.0 if self._left >= 0 else -self._left / SHARE
