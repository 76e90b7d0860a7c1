"""What happened to each sandbox, kept: who, why, how long it took. A bounded number, and for a while after its end."""

from __future__ import annotations

import asyncio
import builtins
import json
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Mapping
from datetime import timedelta
from typing import Any

import structlog

from skerry.control.actor import actor
from skerry.control.identity import mark_in
from skerry.control.ledger import Ledger
from skerry.control.store import Store
from skerry.models import SandboxEvent, State, now

log = structlog.get_logger(__name__)

TRIM_EVERY = 32
"""Trimming costs a statement, so a sandbox may have so many events more than it should."""
PAGE = 100
LAST = "destroyed"
AFTERWARDS = ("snapshot_deleted", "backup_deleted", "workspace_deleted")
"""What is kept of a sandbox outlives it, so these may come after the last."""


class Events:
    def __init__(
        self,
        store: Store,
        ledger: Ledger,
        *,
        limit: int,
        days: float,
        provider: Callable[[], str] = lambda: "local",
    ) -> None:
        self._store = store
        self._ledger = ledger
        self._limit = limit
        self._days = days
        self._provider = provider
        self._untrimmed: Counter[str] = Counter()
        self._followers: defaultdict[str, set[asyncio.Event]] = defaultdict(set)

    def record(
        self,
        id: str,
        kind: str,
        message: str,
        *,
        by: str | None = None,
        took: float | None = None,
        details: Mapping[str, Any] | None = None,
        from_state: State | None = None,
        to_state: State | None = None,
    ) -> None:
        """Note something, in the order it happened; it is in the store soon. ``took`` is in seconds.

        ``by`` is whoever the request came from unless it is given.
        """
        event = {
            "at": now(),
            "by": by or actor.get(),
            "took": None if took is None else round(took * 1000, 3),
            "from_state": from_state,
            "to_state": to_state,
            "details": dict(details or {}),
        }
        said = {"by": event["by"], "took": event["took"], "provider": self._provider()}
        log.info("sandbox", kind=kind, sandbox=id, message=message, **said)
        self._ledger.post(lambda: self._add(id, kind, message, event))

    async def flush(self) -> None:
        """Wait until what was recorded so far is in the store."""
        await self._ledger.flush()

    async def list(self, id: str, after: int = 0, limit: int = PAGE) -> builtins.list[SandboxEvent]:
        """Oldest first, with all that was recorded before this was called."""
        await self.flush()
        found = await self._store.events(id, after, limit)
        if mark := mark_in(id):
            for event in found:
                event.message = event.message.replace(mark, "")
                event.details = json.loads(json.dumps(event.details).replace(mark, ""))
        return found

    async def follow(self, id: str, after: int = 0) -> AsyncGenerator[SandboxEvent, None]:
        """Those after the one with that number, then each as it happens; ends when the sandbox is destroyed."""
        news, ended = asyncio.Event(), False
        self._followers[id].add(news)
        try:
            while True:
                news.clear()
                page = await self.list(id, after)
                for event in page:
                    yield event
                    after = event.id
                    ended = event.kind == LAST or (ended and event.kind in AFTERWARDS)
                if len(page) < PAGE:
                    if ended:
                        return
                    await news.wait()
        finally:
            self._followers[id].discard(news)
            if not self._followers[id]:
                del self._followers[id]

    async def expire(self) -> None:
        """Forget what is old of sandboxes that are gone, and what is too much of others."""
        await self._store.expire_events(now() - timedelta(days=self._days), self._limit)

    async def _add(self, id: str, kind: str, message: str, event: Mapping[str, Any]) -> None:
        await self._store.add_event(id, kind, message, **event)
        for news in self._followers.get(id, ()):
            news.set()
        self._untrimmed[id] += 1
        if self._untrimmed[id] >= TRIM_EVERY or kind == LAST:
            del self._untrimmed[id]
            await self._store.trim_events(id, self._limit)
