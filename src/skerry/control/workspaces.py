"""Workspaces that are kept in buckets: synced on demand and before a sleep, and accounted for, owner by owner."""

from __future__ import annotations

import asyncio
import builtins
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

import structlog

from skerry.control.actor import SERVER, caller
from skerry.control.events import Events
from skerry.control.identity import LOCAL, normalise_id
from skerry.control.metrics import Metrics
from skerry.control.store import Store, StoredRow
from skerry.errors import NotFoundError, SkerryError
from skerry.models import SandboxInfo, StoredWorkspace, StoredWorkspaces, SyncRequest, SyncResult
from skerry.runtime.environment import WORKSPACE
from skerry.runtime.paths import resolve
from skerry.runtime.runtime import Runtime
from skerry.settings import Settings

if TYPE_CHECKING:
    from skerry.storage.buckets import Buckets
    from skerry.storage.workspace import Workspace

log = structlog.get_logger(__name__)

OWNER = "owner"
"""The label that says whose a sandbox is."""
NOBODY = "default"


@dataclass
class _Turn:
    lock: asyncio.Lock
    waiting: int = 0


class Workspaces:
    def __init__(
        self,
        settings: Settings,
        store: Store,
        history: Events,
        metrics: Metrics,
        get: Callable[[str], Awaitable[SandboxInfo]],
    ) -> None:
        self._settings = settings
        self._store = store
        self._history = history
        self._metrics = metrics
        self._get = get
        self._opened: Buckets | None = None
        self._turns: dict[str, _Turn] = {}

    async def sync(self, runtime: Runtime, id: str, request: SyncRequest) -> SyncResult:
        """Make the stored workspace like the directory, or the other way round. One at a time for each sandbox."""
        from skerry.storage import sync

        id = normalise_id(id)
        dir = resolve(request.dir, WORKSPACE)
        excludes = [*(() if request.everything else sync.EXCLUDED), *request.excludes]
        workspace = self._workspace(id, request.bucket)
        turn = self._turns.setdefault(id, _Turn(asyncio.Lock()))
        turn.waiting += 1
        began = time.perf_counter()
        try:
            async with turn.lock:
                with self._metrics.timed("sync"):
                    if request.direction == "push":
                        outcome = await sync.push(runtime.portal, dir, workspace, excludes, _nobody, request.dry_run)
                    else:
                        outcome = await sync.pull(runtime.portal, dir, workspace, _nobody)
        except SkerryError as error:
            self._history.record(id, "sync_failed", error.message, details={"code": error.code})
            raise
        finally:
            turn.waiting -= 1
            if not turn.waiting:
                del self._turns[id]
        took = time.perf_counter() - began
        pushed = request.direction == "push" and not request.dry_run
        if pushed:
            await self._account(id, workspace.bucket, outcome.stored, outcome.size, outcome.synced_at)
        if not request.dry_run:
            self._metrics.sync_duration.observe(took)
            self._alert(id, "r2.sync_duration", took)
            self._metrics.bytes.labels("up" if request.direction == "push" else "down").inc(outcome.moved)
            self._history.record(
                id,
                "synced",
                f"{dir} was synced {'to' if pushed else 'from'} bucket {workspace.bucket!r}: "
                f"{outcome.synced} files moved, {outcome.unchanged} unchanged.",
                took=took,
                details={"bytes": outcome.moved, "size": outcome.size, "errors": len(outcome.errors)},
            )
        return SyncResult(
            ok=not outcome.errors,
            sandbox_id=id,
            direction=request.direction,
            bucket=workspace.bucket,
            synced_files=outcome.synced,
            skipped_files=outcome.unchanged,
            deleted_files=outcome.deleted,
            excluded_files=outcome.excluded,
            total_size=outcome.size,
            transferred=outcome.moved,
            errors=outcome.errors,
            workspace_synced_at=outcome.synced_at,
            duration=round(took * 1000, 3),
        )

    async def before_sleep(self, id: str, runtime: Runtime) -> None:
        """If that is wished: what cannot be synced now is said, and the sandbox sleeps all the same."""
        if not self._settings.sync_on_hibernate:
            return
        try:
            await self.sync(runtime, id, SyncRequest())
        except (SkerryError, OSError) as error:
            log.warning("workspace not synced", sandbox=id, reason=str(error))

    async def get(self, id: str) -> StoredWorkspace:
        id = normalise_id(id)
        for row in await self._store.workspaces(id):
            return _described(row)
        await self._get(id)
        raise NotFoundError(f"The workspace of sandbox {id!r} was never synced.", hint=f"skerry sync {id}")

    async def list(self) -> StoredWorkspaces:
        rows = [row for row in await self._store.workspaces() if caller.get().owns(row.sandbox_id)]
        return StoredWorkspaces(workspaces=[_described(row) for row in rows], owners=dict(_sums(rows)))

    async def delete(self, id: str, bucket: str | None = None) -> int:
        """Forget what is stored of a sandbox's workspace; how many files that were. The sandbox keeps its own."""
        id = normalise_id(id)
        rows = await self._store.workspaces(id)
        place = bucket or (rows[0].bucket if rows else None)
        count = await self._workspace(id, place).delete_all_files()
        await self._store.delete_workspace(id)
        await self._publish()
        if rows:
            said = f"What was stored of its workspace in bucket {rows[0].bucket!r} was deleted."
            self._history.record(id, "workspace_deleted", said, details={"files": count})
            await self._history.flush()
        return count

    async def _account(self, id: str, bucket: str, files: int, size: int, synced_at: datetime) -> None:
        info = await self._get(id)
        labels = info.labels
        owner = info.owner if info.owner != LOCAL else labels.get(OWNER) or labels.get("userId") or NOBODY
        await self._store.save_workspace(StoredRow(id, owner, bucket, files, size, synced_at))
        self._alert(id, "r2.storage_bytes", (await self._publish())[owner], owner=owner)

    def _alert(self, id: str, metric: str, value: float, **about: str) -> None:
        said = self._metrics.beyond(metric, value, sandbox=id, **about)
        if said is not None:
            details = {"metric": metric, "value": round(value, 3), **about}
            self._history.record(id, "alert", said, by=SERVER, details=details)

    async def _publish(self) -> Counter[str]:
        sums = _sums(await self._store.workspaces())
        self._metrics.storage_bytes.clear()
        for owner, size in sums.items():
            self._metrics.storage_bytes.labels(owner).set(size)
        return sums

    async def open(self) -> None:
        await self._publish()

    def _workspace(self, id: str, bucket: str | None) -> Workspace:
        from skerry.storage.buckets import Buckets
        from skerry.storage.workspace import Workspace

        if self._opened is None:
            self._opened = Buckets(self._settings.home, self._settings.buckets)
        return Workspace(self._opened.open(bucket), id)


def _described(row: StoredRow) -> StoredWorkspace:
    return StoredWorkspace(
        sandbox_id=row.sandbox_id,
        owner=row.owner,
        bucket=row.bucket,
        files=row.files,
        size=row.size,
        workspace_synced_at=row.synced_at,
    )


def _sums(rows: builtins.list[StoredRow]) -> Counter[str]:
    sums: Counter[str] = Counter()
    for row in rows:
        sums[row.owner] += row.size
    return sums


def _nobody(files: int, size: int) -> None:
    return None
