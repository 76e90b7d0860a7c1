"""The workspace of a sandbox in a bucket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from skerry.client._async.connection import AsyncLink
from skerry.client.values import given
from skerry.models import StoredWorkspace, SyncResult


class AsyncWorkspaces:
    _link: AsyncLink

    async def sync(
        self,
        direction: Literal["push", "pull"] = "push",
        *,
        dir: str | None = None,
        excludes: Sequence[str] | None = None,
        everything: bool | None = None,
        bucket: str | None = None,
        dry_run: bool | None = None,
    ) -> SyncResult:
        """Make the stored copy of ``/workspace`` like it (or, with ``"pull"``, bring that copy in); only what differs
        is moved.

        What can be made again (``node_modules``, ``.git``, build directories and their like) is left out unless
        ``everything`` is true; ``excludes`` leaves out more, by patterns written as in ``.gitignore``.
        """
        body = given(
            direction=direction,
            dir=dir,
            excludes=None if excludes is None else list(excludes),
            everything=everything,
            bucket=bucket,
            dryRun=dry_run,
        )
        return await self._link.post(SyncResult, "/sync", body)

    async def stored_workspace(self) -> StoredWorkspace:
        """What is stored of this sandbox's workspace, and since when."""
        return await self._link.get(StoredWorkspace, "/sync")
