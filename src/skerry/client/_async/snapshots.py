"""Snapshots of a sandbox, from the sandbox."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from skerry.client._async.client import AsyncClient, save_async
from skerry.client._async.connection import AsyncLink
from skerry.client.values import Snapshot, given, snapshot_name
from skerry.models import Diff, LayerChange, SandboxInfo, SnapshotInfo


class AsyncSnapshots:
    _link: AsyncLink

    async def snapshot(self, name: str | None = None, *, labels: Mapping[str, str] | None = None) -> SnapshotInfo:
        """Keep the files as they are now. Commands that run go on; where the server can, it takes milliseconds.

        ``name`` finds it again and must be no other snapshot's.
        """
        body = given(name=name, labels=None if labels is None else dict(labels))
        return await self._link.post(SnapshotInfo, "/snapshots", body)

    async def list_snapshots(self) -> list[SnapshotInfo]:
        """The snapshots that were taken of this sandbox, oldest first."""
        return await AsyncClient.over(self._link.connection).list_snapshots(self._link.id)

    async def delete_snapshot(self, snapshot: Snapshot, *, force: bool = False) -> None:
        """Delete a snapshot. ``force`` also deletes one that sandboxes were made from, which do not need it."""
        await AsyncClient.over(self._link.connection).delete_snapshot(snapshot, force=force)

    async def rollback(self, snapshot: Snapshot) -> SandboxInfo:
        """Make the files what they were in a snapshot. What runs ends; the next operation starts the sandbox again."""
        return await self._link.post(SandboxInfo, "/rollback", {"snapshot": snapshot_name(snapshot)})

    async def diff(self, since: Snapshot | None = None) -> list[LayerChange]:
        """The files that were added, changed and deleted since the image, or since a snapshot."""
        params = given(since=None if since is None else snapshot_name(since))
        return (await self._link.get(Diff, "/diff", params)).changes

    async def download_diff(self, local: str | Path, since: Snapshot | None = None) -> int:
        """Write the same to a tar: what is new, and ``.wh.NAME`` for what was deleted. Returns its size."""
        params = given(since=None if since is None else snapshot_name(since), format="tar")
        async with self._link.stream("GET", "/diff", params=params) as response:
            return await save_async(response, local)
