"""Backups of a sandbox, and what becomes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from skerry.client._async.connection import AsyncLink
from skerry.client.concurrency import call_async
from skerry.client.values import given
from skerry.client.wire import stream_error
from skerry.errors import InternalError
from skerry.models import BackupEvent, BackupInfo, RestoreResult

OnProgress = Callable[[BackupEvent], Any]
_EVENTS = {"Accept": "text/event-stream"}


class AsyncBackups:
    _link: AsyncLink

    async def backup(
        self,
        dir: str | None = None,
        *,
        name: str | None = None,
        ttl: str | float | None = None,
        gitignore: bool | None = None,
        excludes: Sequence[str] | None = None,
        compression: Literal["zstd", "none"] | None = None,
        level: int | None = None,
        bucket: str | None = None,
        on_progress: OnProgress | None = None,
    ) -> BackupInfo:
        """Ship a directory (``/workspace``), or with ``"/"`` the whole machine, to a bucket; returns what restores it.

        ``ttl`` says how long it is kept (seconds, '12h', '30d'). ``gitignore`` leaves out what git would ignore,
        ``excludes`` what fits patterns written as in ``.gitignore``. The sandbox goes on meanwhile.
        """
        body = given(
            dir=dir,
            name=name,
            ttl=ttl,
            useGitignore=gitignore,
            excludes=None if excludes is None else list(excludes),
            compression=compression,
            level=level,
            bucket=bucket,
        )
        done = await self._followed("/backup", body, on_progress)
        if done.backup is None:
            raise InternalError("The server did not say what became of the backup.")
        return done.backup

    async def restore(
        self,
        backup: BackupInfo | Mapping[str, Any] | str,
        dir: str | None = None,
        *,
        bucket: str | None = None,
        on_progress: OnProgress | None = None,
    ) -> RestoreResult:
        """Bring a backup back, of this sandbox or another, to where it came from or to ``dir``: all of it or nothing.

        ``backup`` is what ``backup()`` returned, the same as a dictionary, or its id.
        """
        handle: Any = backup if isinstance(backup, str) else None
        if isinstance(backup, BackupInfo):
            handle = {"id": backup.id, "bucket": backup.bucket}
        elif not isinstance(backup, str):
            handle = dict(backup)
        done = await self._followed("/restore", {"backup": handle} | given(dir=dir, bucket=bucket), on_progress)
        if done.restored is None:
            raise InternalError("The server did not say what became of the restore.")
        return done.restored

    async def _followed(self, path: str, body: dict[str, Any], on_progress: OnProgress | None) -> BackupEvent:
        # Always as events: a connection that is silent for minutes is one that something in between may close.
        events = self._link.events(BackupEvent, "POST", path, json=body, headers=_EVENTS)
        try:
            async for event in events:
                if event.type == "complete":
                    return event
                if event.type == "error":
                    raise stream_error(
                        {"code": event.code, "message": event.error, "hint": event.hint, "details": event.details}
                    )
                await call_async(on_progress, event)
        finally:
            await events.aclose()
        raise InternalError("The stream ended before the work did.")
