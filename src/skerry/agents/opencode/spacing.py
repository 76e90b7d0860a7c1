"""An answer that grows is told whole each time, so a long one word by word would be told in gigabytes."""

from __future__ import annotations

import time
from collections.abc import Iterable

from skerry.agents.opencode.turn import Json

PAUSE = 0.06
"""Seconds between one state of an answer and the next."""


class Spacing:
    """Lets events through, but of an answer's states only one every so often: each holds what those before it did.

    What is held back is told before whatever comes after it, and when it is ``due``.
    """

    def __init__(self, pause: float = PAUSE) -> None:
        self._pause = pause
        self._next = 0.0
        self._held: Json | None = None

    def let(self, events: Iterable[Json]) -> list[Json]:
        told: list[Json] = []
        for event in events:
            if event["type"] == "token":
                self._held = event
            else:
                told += [*self.rest(), event]
        if self._held is not None and time.monotonic() >= self._next:
            told += self.rest()
        return told

    def rest(self) -> list[Json]:
        held, self._held = self._held, None
        if held is None:
            return []
        self._next = time.monotonic() + self._pause
        return [held]

    @property
    def due(self) -> float | None:
        """In how many seconds something that is held is to be told."""
        return None if self._held is None else max(0.0, self._next - time.monotonic())
