# Generated from src/skerry/client/_async/client.py by scripts/generate_sync.py; change that file and run it again.
"""A server: its sandboxes, images and backups."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import httpx

from skerry.client._sync.accounts import Accounts
from skerry.client._sync.connection import Connection, Stream
from skerry.client._sync.record import Record
from skerry.client._sync.sessions import Sessions
from skerry.client._sync.tasks import Tasks
from skerry.client.concurrency import Content, body
from skerry.client.values import Snapshot, given, snapshot_name
from skerry.models import (
    BackupInfo,
    BackupList,
    BucketInfo,
    BucketList,
    Deleted,
    Diff,
    Health,
    ImageInfo,
    ImageList,
    LayerChange,
    SandboxInfo,
    SandboxList,
    SnapshotInfo,
    SnapshotList,
    State,
    StoredWorkspaces,
)

if TYPE_CHECKING:
    from skerry.client._sync.sandbox import Sandbox


class Client(Accounts, Record, Sessions, Tasks):
    """A Skerry server. Sandboxes taken from it share its connections.

    ``owner``: on whose behalf an admin asks.
    """

    def __init__(
        self,
        url: str | None = None,
        api_key: str | None = None,
        home: str | Path | None = None,
        *,
        owner: str | None = None,
    ) -> None:
        self.connection = Connection(url, api_key, home, owner)

    @classmethod
    def over(cls, connection: Connection) -> Client:
        """A client that shares a connection which is somebody else's to close."""
        client = cls.__new__(cls)
        client.connection = connection
        return client

    def sandbox(self, id: str | None = None, **options: Any) -> Sandbox:
        """The sandbox with this name, made on first use."""
        from skerry.client._sync.sandbox import Sandbox

        return Sandbox(id, client=self, **options)

    def health(self) -> Health:
        response = self.connection.request("GET", "/health")
        return Health.model_validate_json(response.content)

    def list_sandboxes(
        self,
        *,
        state: State | str | None = None,
        image: str | None = None,
        labels: Mapping[str, str] | None = None,
        prefix: str | None = None,
        limit: int | None = None,
        cursor: str | None = None,
        everyone: bool = False,
    ) -> SandboxList:
        """One page of sandboxes, ordered by id; ``next_cursor`` asks for the next.

        ``everyone``: of all owners, for admins.
        """
        params = given(state=str(state) if state else None, image=image, prefix=prefix, limit=limit, cursor=cursor)
        if everyone:
            params["everyone"] = "true"
        if labels:
            params["label"] = [f"{key}={value}" for key, value in labels.items()]
        response = self.connection.request("GET", "/v1/sandboxes", params=params)
        return SandboxList.model_validate_json(response.content)

    def sandboxes(
        self,
        *,
        state: State | str | None = None,
        image: str | None = None,
        labels: Mapping[str, str] | None = None,
        prefix: str | None = None,
        everyone: bool = False,
    ) -> Stream[SandboxInfo]:
        """Iterate over all sandboxes that fit, page by page."""
        return Stream(self._pages(state, image, labels, prefix, everyone))

    def _pages(
        self,
        state: State | str | None,
        image: str | None,
        labels: Mapping[str, str] | None,
        prefix: str | None,
        everyone: bool,
    ) -> Generator[SandboxInfo, None]:
        cursor: str | None = None
        while True:
            page = self.list_sandboxes(
                state=state, image=image, labels=labels, prefix=prefix, limit=100, cursor=cursor, everyone=everyone
            )
            yield from page.sandboxes
            cursor = page.next_cursor
            if cursor is None:
                return

    def images(self) -> list[ImageInfo]:
        response = self.connection.request("GET", "/v1/images")
        return ImageList.model_validate_json(response.content).images

    def import_image(self, name: str, source: Content, *, label: str | None = None) -> ImageInfo:
        """Make an image from the tar of a root file system: bytes, a binary file or an iterator of bytes.

        ``label`` says in the list of images where it came from.
        """
        path = f"/v1/images/{quote(name, safe='')}"
        response = self.connection.request("POST", path, content=body(source), params=given(source=label))
        return ImageInfo.model_validate_json(response.content)

    def remove_image(self, name: str) -> None:
        self.connection.request("DELETE", f"/v1/images/{quote(name, safe='')}")

    def list_snapshots(self, sandbox: str | None = None) -> list[SnapshotInfo]:
        """Every snapshot, or those of one sandbox, oldest first."""
        response = self.connection.request("GET", "/v1/snapshots", params=given(sandbox=sandbox))
        return SnapshotList.model_validate_json(response.content).snapshots

    def get_snapshot(self, snapshot: Snapshot) -> SnapshotInfo:
        response = self.connection.request("GET", _snapshot_path(snapshot))
        return SnapshotInfo.model_validate_json(response.content)

    def delete_snapshot(self, snapshot: Snapshot, *, force: bool = False) -> None:
        """``force`` also deletes one that sandboxes were made from; they do not need it."""
        params = {"force": "true"} if force else {}
        self.connection.request("DELETE", _snapshot_path(snapshot), params=params)

    def diff(self, snapshot: Snapshot, to: Snapshot | None = None) -> list[LayerChange]:
        """What a snapshot changed of its image; with ``to``, what changed from it to that one."""
        params = given(to=None if to is None else snapshot_name(to))
        response = self.connection.request("GET", f"{_snapshot_path(snapshot)}/diff", params=params)
        return Diff.model_validate_json(response.content).changes

    def download_diff(self, local: str | Path, snapshot: Snapshot, to: Snapshot | None = None) -> int:
        """Write the same to a tar, in which ``.wh.NAME`` says that a file was deleted. Returns its size."""
        params = given(to=None if to is None else snapshot_name(to), format="tar")
        with self.connection.stream("GET", f"{_snapshot_path(snapshot)}/diff", params=params) as response:
            return save(response, local)

    def list_backups(
        self, *, sandbox: str | None = None, name: str | None = None, bucket: str | None = None
    ) -> BackupList:
        """The backups there are, oldest first; ``unreachable`` names buckets that did not answer."""
        params = given(sandbox=sandbox, name=name, bucket=bucket)
        response = self.connection.request("GET", "/v1/backups", params=params)
        return BackupList.model_validate_json(response.content)

    def get_backup(self, backup: str, *, bucket: str | None = None) -> BackupInfo:
        """A backup by its id."""
        path = f"/v1/backups/{quote(backup, safe='')}"
        response = self.connection.request("GET", path, params=given(bucket=bucket))
        return BackupInfo.model_validate_json(response.content)

    def delete_backup(self, backup: BackupInfo | str, *, bucket: str | None = None) -> None:
        """Delete a backup, or cancel one that is being made."""
        id, place = (backup, bucket) if isinstance(backup, str) else (backup.id, bucket or backup.bucket)
        path = f"/v1/backups/{quote(id, safe='')}"
        self.connection.request("DELETE", path, params=given(bucket=place))

    def buckets(self) -> list[BucketInfo]:
        """The buckets that the server knows."""
        response = self.connection.request("GET", "/v1/buckets")
        return BucketList.model_validate_json(response.content).buckets

    def list_workspaces(self) -> StoredWorkspaces:
        """What is stored of which sandbox's workspace, and how much each owner has."""
        response = self.connection.request("GET", "/v1/workspaces")
        return StoredWorkspaces.model_validate_json(response.content)

    def delete_workspace(self, sandbox: str, *, bucket: str | None = None) -> int:
        """Delete what is stored of a sandbox's workspace; how many files that were. The sandbox keeps its own."""
        path = f"/v1/workspaces/{quote(sandbox, safe='')}"
        response = self.connection.request("DELETE", path, params=given(bucket=bucket))
        return Deleted.model_validate_json(response.content).files

    def close(self) -> None:
        self.connection.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def save(response: httpx.Response, local: str | Path) -> int:
    """Write what a response brings to a file; how much that was."""
    size = 0
    with open(local, "wb") as file:
        for piece in response.iter_bytes():
            size += file.write(piece)
    return size


def _snapshot_path(snapshot: Snapshot) -> str:
    return f"/v1/snapshots/{quote(snapshot_name(snapshot), safe='')}"
