"""Waiting: for news of something, or for time to pass."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager


class News:
    """Of many things, each with those who want to hear of it."""

    def __init__(self) -> None:
        self._listeners: dict[str, set[asyncio.Event]] = {}

    @contextmanager
    def of(self, id: str) -> Iterator[asyncio.Event]:
        """Set whenever there is something new; whoever listens clears it."""
        listeners, news = self._listeners.setdefault(id, set()), asyncio.Event()
        listeners.add(news)
        try:
            yield news
        finally:
            listeners.discard(news)
            if not listeners and self._listeners.get(id) is listeners:
                del self._listeners[id]

    def tell(self, id: str) -> None:
        for news in self._listeners.get(id, ()):
            news.set()


class Interval:
    """Whether so many seconds have passed since it was last over; the first time at once, unless it ``waits``."""

    def __init__(self, seconds: float, *, waits: bool = False) -> None:
        self._seconds = seconds
        self._began = time.monotonic() if waits else -seconds

    def over(self) -> bool:
        if time.monotonic() - self._began < self._seconds:
            return False
        self._began = time.monotonic()
        return True
