"""Delivers webhooks: what waits in the store is taken by one server at a time, sent, and tried again if need be.

Events of one sandbox reach a webhook in the order in which they happened: one that is tried again holds up those
behind it, until it is delivered or given up. Those of other sandboxes go on meanwhile.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections import Counter
from datetime import timedelta

import structlog

from skerry.control.metrics import Metrics
from skerry.control.reach import Reach, UnreachedError
from skerry.control.webhook_rows import Due, WebhookRow, WebhookRows
from skerry.models import now
from skerry.settings import Settings
from skerry.signatures import EVENT, ID, SIGNATURE, TIMESTAMP, signatures

log = structlog.get_logger(__name__)

AT_ONCE = 16
EACH = 4
"""Of one webhook at once, so that a slow receiver does not take the place of all others."""
GROWTH = 3.0
LONGEST_DELAY = 3600.0
POLL = 5.0
"""Seconds between looks for what other processes on the same store have left to be delivered."""
SOON = 0.01
MARGIN = 10.0
"""Seconds that a lease outlasts an attempt, and that the clocks of two servers may differ."""
CLOSING = 2.0
RETRY = 1.0


REPORTS = "wh_reports"
"""The webhook that is the settings' own: an AgentPod is told what happens, as its workers tell it."""


def report_url(settings: Settings) -> str | None:
    return None if settings.report_to is None else f"{settings.report_to}/api/v2/cloudflare/webhook"


class Courier:
    def __init__(self, rows: WebhookRows, metrics: Metrics, settings: Settings, reach: Reach) -> None:
        self._rows = rows
        self._metrics = metrics
        self._reach = reach
        self._report_url = report_url(settings)
        self._token = settings.worker_token
        # Whom the operator has named may be anywhere.
        self._operators = Reach(lambda: "private")
        self._timeout = settings.webhook_timeout
        self._attempts = settings.webhook_attempts
        self._delay = settings.webhook_delay
        # Of the whole schedule: what has waited so long behind others is tried once more and then given up.
        self._patience = sum(self._pause(attempt) for attempt in range(1, self._attempts))
        self._lease = settings.webhook_timeout + MARGIN
        self.name = secrets.token_hex(8)
        self._news = asyncio.Event()
        self._tasks: dict[asyncio.Task[None], str] = {}
        self._loop: asyncio.Task[None] | None = None

    def open(self) -> None:
        self._loop = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """What is being sent has a moment to arrive; everything else is left to the next server."""
        if self._loop is None:
            return
        self._loop.cancel()
        await asyncio.gather(self._loop, return_exceptions=True)
        self._loop = None
        if self._tasks:
            _, late = await asyncio.wait(list(self._tasks), timeout=CLOSING)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
            await self._rows.release(self.name)

    def nudge(self) -> None:
        """There is something to deliver."""
        self._news.set()

    @property
    def lease(self) -> float:
        return self._lease

    async def _run(self) -> None:
        while True:
            self._news.clear()
            try:
                wait = await self._look()
            except Exception as error:  # noqa: BLE001 - the store may be back in a moment
                log.warning("webhooks could not be looked for", error=type(error).__qualname__)
                wait = RETRY
            try:
                async with asyncio.timeout(wait):
                    await self._news.wait()
            except TimeoutError:
                pass

    async def _look(self) -> float:
        """Begin what is due; how many seconds there is nothing more to do."""
        free = AT_ONCE - len(self._tasks)
        if free <= 0:
            return POLL  # one that ends wakes us
        # Looked at first: whoever has no webhooks, or nothing to send, writes nothing.
        next_due = await self._rows.next_due(but=self._busy())
        if next_due is None:
            return POLL
        left = (next_due - now()).total_seconds()
        if left > 0:
            return min(left, POLL)
        taken = await self._rows.claim(self.name, lease=self._lease, limit=free, each=EACH, but=self._busy(), at=now())
        for due in taken:
            task = asyncio.get_running_loop().create_task(self._make(due))
            self._tasks[task] = due.webhook_id
            task.add_done_callback(self._ended)
        return SOON

    def _busy(self) -> list[str]:
        """Webhooks that as much is being sent to as may be."""
        return [webhook for webhook, count in Counter(self._tasks.values()).items() if count >= EACH]

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        self._news.set()

    async def _make(self, due: Due) -> None:
        try:
            await self.deliver(due)
        except Exception as error:  # noqa: BLE001 - its lease ends, and it is tried again
            log.warning("a webhook could not be seen to", delivery=due.id, error=type(error).__qualname__)

    async def deliver(self, due: Due, *, once: bool = False) -> None:
        """One attempt. ``once``: there is no other."""
        webhook = await self._rows.get(due.webhook_id)
        if webhook is None:
            return  # deleted, and its deliveries with it
        status, error = await self._send(webhook, due)
        attempts = due.attempts + 1
        if error is None:
            self._metrics.webhooks.labels("delivered").inc()
            done = {"state": "delivered", "delivered_at": now(), "next_at": None}
            return await self._rows.settle(due.id, self.name, attempts=attempts, status=status, error=None, **done)
        waited = (now() - due.queued_at).total_seconds()
        if once or attempts >= self._attempts or waited > self._patience + self._timeout:
            self._metrics.webhooks.labels("dead").inc()
            log.warning("a webhook was given up", webhook=webhook.id, delivery=due.id, attempts=attempts, reason=error)
            dead = {"state": "dead", "next_at": None}
            return await self._rows.settle(due.id, self.name, attempts=attempts, status=status, error=error, **dead)
        self._metrics.webhooks.labels("failed").inc()
        again = now() + timedelta(seconds=self._pause(attempts) * random.uniform(0.8, 1.2))
        await self._rows.settle(due.id, self.name, attempts=attempts, status=status, error=error, next_at=again)

    def _pause(self, attempts: int) -> float:
        return min(self._delay * GROWTH ** (attempts - 1), LONGEST_DELAY)

    async def _send(self, webhook: WebhookRow, due: Due) -> tuple[int | None, str | None]:
        """The status answered, and what was wrong."""
        timestamp, body = int(time.time()), due.body.encode()
        headers = [
            ("Content-Type", "application/json"),
            ("User-Agent", "Skerry"),
            (ID, due.id),
            (EVENT, due.event),
            (TIMESTAMP, str(timestamp)),
            (SIGNATURE, signatures(webhook.secrets(now()), timestamp, body)),
        ]
        reach = self._reach
        if webhook.id == REPORTS and webhook.url == self._report_url:
            reach = self._operators
            headers += [("Authorization", f"Bearer {self._token}")] if self._token is not None else []
        try:
            status = await reach.post(webhook.url, headers, body, self._timeout)
        except UnreachedError as error:
            return None, str(error)
        if 200 <= status < 300:
            return status, None
        return status, f"The receiver answered with status {status}."
