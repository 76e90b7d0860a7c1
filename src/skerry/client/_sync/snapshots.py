# Generated from src/skerry/client/_async/snapshots.py by scripts/generate_sync.py; change that file and run it again.
"""Snapshots of a sandbox, from the sandbox."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from skerry.client._sync.client import Client, save
from skerry.client._sync.connection import Link
from skerry.client.values import Snapshot, given, snapshot_name
from skerry.models import Diff, LayerChange, SandboxInfo, SnapshotInfo


class Snapshots:
    _link: Link

    def snapshot(self, name: str | None = None, *, labels: Mapping[str, str] | None = None) -> SnapshotInfo:
        """Keep the files as they are now. Commands that run go on; where the server can, it takes milliseconds.

        ``name`` finds it again and must be no other snapshot's.
        """
        body = given(name=name, labels=None if labels is None else dict(labels))
        return self._link.post(SnapshotInfo, "/snapshots", body)

    def list_snapshots(self) -> list[SnapshotInfo]:
        """The snapshots that were taken of this sandbox, oldest first."""
        return Client.over(self._link.connection).list_snapshots(self._link.id)

    def delete_snapshot(self, snapshot: Snapshot, *, force: bool = False) -> None:
        """Delete a snapshot. ``force`` also deletes one that sandboxes were made from, which do not need it."""
        Client.over(self._link.connection).delete_snapshot(snapshot, force=force)

    def rollback(self, snapshot: Snapshot) -> SandboxInfo:
        """Make the files what they were in a snapshot. What runs ends; the next operation starts the sandbox again."""
        return self._link.post(SandboxInfo, "/rollback", {"snapshot": snapshot_name(snapshot)})

    def diff(self, since: Snapshot | None = None) -> list[LayerChange]:
        """The files that were added, changed and deleted since the image, or since a snapshot."""
        params = given(since=None if since is None else snapshot_name(since))
        return (self._link.get(Diff, "/diff", params)).changes

    def download_diff(self, local: str | Path, since: Snapshot | None = None) -> int:
        """Write the same to a tar: what is new, and ``.wh.NAME`` for what was deleted. Returns its size."""
        params = given(since=None if since is None else snapshot_name(since), format="tar")
        with self._link.stream("GET", "/diff", params=params) as response:
            return save(response, local)
