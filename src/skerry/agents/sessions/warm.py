"""Repositories that are there already: for each that sessions use a snapshot with a fresh clone in it and nothing else.

One snapshot serves any number of sessions, of the same owner and with the same token: what a token may not read is not
found in it either.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from contextvars import Context
from dataclasses import dataclass
from hashlib import sha256

import structlog

from skerry.agents.sessions.forge import Forge
from skerry.control.registry import Registry
from skerry.control.session_rows import SessionRow
from skerry.errors import SkerryError
from skerry.models import CreateSandbox, CreateSnapshot, GitClone, Secret

log = structlog.get_logger(__name__)

AGE = 30 * 60.0
"""Seconds after which a clone is made anew."""
DEPTH = 100
LABEL = {"session-warm": "repository"}
_LIKE = ("image", "provider", "egress")
"""What it is made with as the session's sandboxes are."""

Key = tuple[str, ...]


@dataclass(slots=True)
class Entry:
    snapshot: str
    made_at: float
    row: SessionRow
    secrets: Mapping[str, Secret]
    context: Context
    """On whose behalf it was made, and is deleted."""
    used: bool = False


class Warm:
    def __init__(self, registry: Registry, forge: Forge, most: int, clock: Callable[[], float] = time.time) -> None:
        """``most``: how many repositories; the one that was made first goes first."""
        self._registry = registry
        self._forge = forge
        self._most = most
        self._clock = clock
        self._entries: dict[Key, Entry] = {}
        self._making: dict[Key, asyncio.Task[None]] = {}
        self._deleting: set[asyncio.Task[None]] = set()

    def take(self, row: SessionRow, token: str | None) -> str | None:
        """The snapshot to begin from, if there is one that is not too old."""
        entry = self._entries.get(_key(row, token))
        if entry is None or self._clock() - entry.made_at >= AGE:
            return None
        entry.used = True
        return entry.snapshot

    def want(self, row: SessionRow, token: str | None, secrets: Mapping[str, Secret], context: Context) -> None:
        """See to it that the next session with this repository finds it there."""
        key = _key(row, token)
        if row.repo_name is None or self._most == 0 or self.take(row, token) is not None or key in self._making:
            return
        if self._registry.provider.capabilities().snapshots == "none":
            return
        self._begin(key, row, secrets, context)

    def _begin(self, key: Key, row: SessionRow, secrets: Mapping[str, Secret], context: Context) -> None:
        making = self._make(key, row, secrets, context)
        task = self._making[key] = asyncio.get_running_loop().create_task(making, context=context)
        task.add_done_callback(lambda _: self._making.pop(key, None))

    def forget(self, snapshot: str) -> None:
        """It is not there any more."""
        self._entries = {key: entry for key, entry in self._entries.items() if entry.snapshot != snapshot}

    def expire(self) -> None:
        """What is too old is made anew if some session began from it, and else goes."""
        now = self._clock()
        for key, entry in list(self._entries.items()):
            if now - entry.made_at >= AGE and key not in self._making:
                self._drop(key)
                if entry.used:
                    self._begin(key, entry.row, entry.secrets, entry.context.copy())

    async def close(self) -> None:
        for task in self._making.values():
            task.cancel()
        await asyncio.gather(*self._making.values(), return_exceptions=True)
        for key in list(self._entries):
            self._drop(key)
        await asyncio.gather(*self._deleting, return_exceptions=True)

    async def sweep(self) -> None:
        """What a server that was killed has left, of whoever asks."""
        for snapshot in await self._registry.snapshots.list_():
            if snapshot.labels.items() >= LABEL.items():
                await self._delete(snapshot.id)

    async def _make(self, key: Key, row: SessionRow, given: Mapping[str, Secret], context: Context) -> None:
        assert row.repo_name is not None
        own = {name: row.settings[name] for name in _LIKE if row.settings.get(name) is not None}
        wanted = {"id": f"warm-{secrets.token_hex(6)}", "secrets": given, **own}
        try:
            info = await self._registry.create(CreateSandbox.model_validate(wanted))
            try:
                url = self._forge.clone_url(row.repo_owner or "", row.repo_name)
                place = f"/workspace/{row.repo_name}"
                async with self._registry.use(info.id) as runtime:
                    await runtime.git.clone(GitClone(repo_url=url, branch=row.branch, target_dir=place, depth=DEPTH))
                made = await self._registry.snapshots.create(info.id, CreateSnapshot(labels=LABEL))
            finally:
                await self._registry.destroy(info.id)
        except SkerryError as error:
            # It was for speed only; the session itself says what is wrong with its repository.
            log.info("session_repository_not_warmed", code=error.code, message=error.message)
            return
        before = self._entries.pop(key, None)
        if before is not None:
            await self._delete(before.snapshot)
        self._entries[key] = Entry(made.id, self._clock(), row, given, context)
        while len(self._entries) > self._most:
            self._drop(next(iter(self._entries)))

    def _drop(self, key: Key) -> None:
        entry = self._entries.pop(key)
        task = asyncio.get_running_loop().create_task(self._delete(entry.snapshot), context=entry.context.copy())
        self._deleting.add(task)
        task.add_done_callback(self._deleting.discard)

    async def _delete(self, snapshot: str) -> None:
        try:
            await self._registry.snapshots.delete(snapshot, force=True)
        except SkerryError as error:
            log.info("session_snapshot_left", snapshot=snapshot, code=error.code)


def _key(row: SessionRow, token: str | None) -> Key:
    shown = sha256((token or "").encode()).hexdigest()
    like = (row.settings.get(name) for name in ("image", "provider"))
    words = (row.owner, row.repo_owner, row.repo_name, row.branch, *like, shown)
    return tuple(str(word) for word in words)
