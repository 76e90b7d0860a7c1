"""The audit log: who asked for what, from where, and what became of it. Entries are added and never changed.

Adding one costs a few microseconds: it is written with others, at most ``PAUSE`` later. What must not be lost even by
a server that is killed waits for that (``settle``), and is then written at once.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import structlog

from skerry.chain import Verifier
from skerry.control.audit_rows import AuditRows, Wanted
from skerry.control.metrics import Metrics
from skerry.errors import AuditUnavailableError, StoreError
from skerry.models import AuditEntry, AuditPage, AuditVerification, now
from skerry.redaction import redact
from skerry.settings import Settings

log = structlog.get_logger(__name__)

PAUSE = 0.1
"""Seconds that an entry waits for others to be written with."""
RETRY = 1.0
BATCH = 500
MOST_WAITING = 10_000
"""Entries kept while the store cannot be written. How many more there were is put on record when it can be again."""
LONGEST_COMMAND = 4096


class Audit:
    def __init__(self, rows: AuditRows, metrics: Metrics, settings: Settings, node: Callable[[], str]) -> None:
        self._rows = rows
        self._metrics = metrics
        self._node = node
        self._days = settings.audit_days
        self._commands = settings.audit_commands
        self._required = settings.audit_required
        self._head = settings.home / "audit.head"
        self.enabled = settings.audit
        self._waiting: list[dict[str, Any]] = []
        self._noted = self._written = self._lost = 0
        self._settling: list[tuple[int, asyncio.Future[bool]]] = []
        self._due = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._worker: asyncio.Task[None] | None = None
        self._broken = False
        self._noted_in: int | None = None

    def open(self) -> None:
        if self.enabled:
            self._worker = asyncio.get_running_loop().create_task(self._work())

    async def close(self) -> None:
        """Write what is left."""
        if self._worker is None:
            return
        await self.settle()
        self._worker.cancel()
        await asyncio.gather(self._worker, return_exceptions=True)
        self._worker = None
        if self._timer is not None:
            self._timer.cancel()
        if self._noted_in is not None:
            os.close(self._noted_in)
            self._noted_in = None

    def note(self, entry: dict[str, Any]) -> None:
        """Add an entry: the fields of an ``AuditEntry`` but for its place in the chain. ``took`` is in microseconds."""
        if not self.enabled:
            return
        if len(self._waiting) >= MOST_WAITING:
            self._lost += 1
            self._metrics.audit_lost.inc()
            return
        entry["at"] = now()
        command = entry.get("command")
        entry["command"] = clean(redact(command[:LONGEST_COMMAND])) if command and self._commands else None
        self._waiting.append(entry)
        self._noted += 1
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(PAUSE, self._due.set)

    async def settle(self) -> bool:
        """Wait until what was noted before is in the store; whether it is."""
        if self._worker is None or self._written >= self._noted:
            return True
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._settling.append((self._noted, waiter))
        self._due.set()
        return await waiter

    def require(self) -> None:
        """Refuse to do what could not be put on record, where the server was told to."""
        if self._required and self._broken:
            raise AuditUnavailableError(
                "The audit log cannot be written, and this server does nothing that is not on record.",
                hint="Look at the server's log and at the disk of its database; it goes on once that is mended.",
            )

    async def settled(self) -> None:
        """As ``settle``; where the server was told to do nothing off the record, an error if it is not."""
        if not await self.settle() and self._required:
            raise AuditUnavailableError(
                "It was done, but could not be put on record.", hint="Look before you ask again: it was done."
            )

    async def _work(self) -> None:
        while True:
            await self._due.wait()
            self._due.clear()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            while self._waiting:
                batch = self._waiting[:BATCH]
                try:
                    seq, hash = await self._rows.append(self._node(), [*self._about_lost(), *batch])
                except Exception as error:  # noqa: BLE001 - what is wrong may pass; what was noted is kept
                    self._complain(error)
                    self._wake(self._noted, False)
                    await self._pause()
                    continue
                del self._waiting[: len(batch)]
                self._lost, self._broken = 0, False
                self._written += len(batch)
                self._metrics.audit_entries.inc(len(batch))
                self._wake(self._written, True)
                self._remember(seq, hash)

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(RETRY):
                await self._due.wait()
                self._due.clear()
        except TimeoutError:
            pass

    def _about_lost(self) -> list[dict[str, Any]]:
        if not self._lost:
            return []
        entry = _by_server("audit_lost", "failed", {"entries": self._lost})
        return [entry]

    def _wake(self, written: int, done: bool) -> None:
        waiting, self._settling = self._settling, []
        for number, waiter in waiting:
            if number > written:
                self._settling.append((number, waiter))
            elif not waiter.done():
                waiter.set_result(done)

    def _complain(self, error: Exception) -> None:
        self._metrics.audit_failures.inc()
        if not self._broken:
            reason = error.message if isinstance(error, StoreError) else type(error).__qualname__
            log.error("the audit log cannot be written", reason=reason, waiting=len(self._waiting))
        self._broken = True

    def _remember(self, seq: int, hash: str) -> None:
        """Beside the database, so that one that was tampered with is found out by who has only the home."""
        try:
            if self._noted_in is None:
                self._noted_in = os.open(self._head, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.pwrite(self._noted_in, f"{self._node()} {seq:020} {hash}\n".encode(), 0)
        except OSError as error:
            log.warning("the head of the audit log could not be noted", reason=error.strerror)

    # -- reading -------------------------------------------------------------------------------------------------------

    async def page(self, wanted: Wanted, cursor: int | None, limit: int) -> AuditPage:
        await self.settle()
        found = await self._rows.page(wanted, cursor, limit + 1)
        more, found = len(found) > limit, found[:limit]
        return AuditPage(entries=found, next_cursor=found[-1].id if more else None)

    async def all(self, wanted: Wanted) -> AsyncGenerator[AuditEntry, None]:
        await self.settle()
        async for entry in self._rows.all(wanted):
            yield entry

    async def verify(self) -> AuditVerification:
        """Go through every chain and see whether it is what was written."""
        await self.settle()
        verifier = Verifier(await self._rows.anchors(), noted_head(self._head))
        number = 0
        async for entry in self._rows.all({}):
            verifier.add(entry)
            number += 1
            if number % 100 == 0:
                await asyncio.sleep(0)  # others must not wait for it
        return verifier.result()

    async def expire(self) -> None:
        """Remove what is older than it has to be kept."""
        if not self.enabled or not self._days:
            return
        gone = await self._rows.expire(now() - timedelta(days=self._days))
        if gone:
            self.note(_by_server("expire_audit", "ok", {"entries": gone}))


def clean(text: str) -> str:
    """Text of strangers, as every database takes it."""
    if text.isascii() and "\0" not in text:
        return text
    return text.replace("\0", "\ufffd").encode(errors="replace").decode()


def noted_head(path: Path) -> list[tuple[str, int, str]]:
    try:
        node, seq, hash = path.read_text().split()
        return [(node, int(seq), hash)]
    except (OSError, ValueError):
        return []


def _by_server(operation: str, outcome: str, details: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "at": now(),
        "actor": "server",
        "client": "",
        "agent": "",
        "request_id": "",
        "operation": operation,
        "method": "",
        "outcome": outcome,
        "key": None,
        "owner": None,
        "user": None,
        "sandbox_id": None,
        "status": None,
        "code": None,
        "took": None,
        "command": None,
        "details": dict(details),
    }
