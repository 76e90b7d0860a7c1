"""A server: its sandboxes, images and backups."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import httpx

from skerry.client._async.accounts import AsyncAccounts
from skerry.client._async.connection import AsyncConnection, AsyncStream
from skerry.client._async.record import AsyncRecord
from skerry.client._async.sessions import AsyncSessions
from skerry.client._async.tasks import AsyncTasks
from skerry.client.concurrency import AsyncContent, body_async
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
    from skerry.client._async.sandbox import AsyncSandbox


class AsyncClient(AsyncAccounts, AsyncRecord, AsyncSessions, AsyncTasks):
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
        self.connection = AsyncConnection(url, api_key, home, owner)

    @classmethod
    def over(cls, connection: AsyncConnection) -> AsyncClient:
        """A client that shares a connection which is somebody else's to close."""
        client = cls.__new__(cls)
        client.connection = connection
        return client

    def sandbox(self, id: str | None = None, **options: Any) -> AsyncSandbox:
        """The sandbox with this name, made on first use."""
        from skerry.client._async.sandbox import AsyncSandbox

        return AsyncSandbox(id, client=self, **options)

    async def health(self) -> Health:
        response = await self.connection.request("GET", "/health")
        return Health.model_validate_json(response.content)

    async def list_sandboxes(
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
        response = await self.connection.request("GET", "/v1/sandboxes", params=params)
        return SandboxList.model_validate_json(response.content)

    def sandboxes(
        self,
        *,
        state: State | str | None = None,
        image: str | None = None,
        labels: Mapping[str, str] | None = None,
        prefix: str | None = None,
        everyone: bool = False,
    ) -> AsyncStream[SandboxInfo]:
        """Iterate over all sandboxes that fit, page by page."""
        return AsyncStream(self._pages(state, image, labels, prefix, everyone))

    async def _pages(
        self,
        state: State | str | None,
        image: str | None,
        labels: Mapping[str, str] | None,
        prefix: str | None,
        everyone: bool,
    ) -> AsyncGenerator[SandboxInfo, None]:
        cursor: str | None = None
        while True:
            page = await self.list_sandboxes(
                state=state, image=image, labels=labels, prefix=prefix, limit=100, cursor=cursor, everyone=everyone
            )
            for info in page.sandboxes:
                yield info
            cursor = page.next_cursor
            if cursor is None:
                return

    async def images(self) -> list[ImageInfo]:
        response = await self.connection.request("GET", "/v1/images")
        return ImageList.model_validate_json(response.content).images

    async def import_image(self, name: str, source: AsyncContent, *, label: str | None = None) -> ImageInfo:
        """Make an image from the tar of a root file system: bytes, a binary file or an iterator of bytes.

        ``label`` says in the list of images where it came from.
        """
        path = f"/v1/images/{quote(name, safe='')}"
        response = await self.connection.request("POST", path, content=body_async(source), params=given(source=label))
        return ImageInfo.model_validate_json(response.content)

    async def remove_image(self, name: str) -> None:
        await self.connection.request("DELETE", f"/v1/images/{quote(name, safe='')}")

    async def list_snapshots(self, sandbox: str | None = None) -> list[SnapshotInfo]:
        """Every snapshot, or those of one sandbox, oldest first."""
        response = await self.connection.request("GET", "/v1/snapshots", params=given(sandbox=sandbox))
        return SnapshotList.model_validate_json(response.content).snapshots

    async def get_snapshot(self, snapshot: Snapshot) -> SnapshotInfo:
        response = await self.connection.request("GET", _snapshot_path(snapshot))
        return SnapshotInfo.model_validate_json(response.content)

    async def delete_snapshot(self, snapshot: Snapshot, *, force: bool = False) -> None:
        """``force`` also deletes one that sandboxes were made from; they do not need it."""
        params = {"force": "true"} if force else {}
        await self.connection.request("DELETE", _snapshot_path(snapshot), params=params)

    async def diff(self, snapshot: Snapshot, to: Snapshot | None = None) -> list[LayerChange]:
        """What a snapshot changed of its image; with ``to``, what changed from it to that one."""
        params = given(to=None if to is None else snapshot_name(to))
        response = await self.connection.request("GET", f"{_snapshot_path(snapshot)}/diff", params=params)
        return Diff.model_validate_json(response.content).changes

    async def download_diff(self, local: str | Path, snapshot: Snapshot, to: Snapshot | None = None) -> int:
        """Write the same to a tar, in which ``.wh.NAME`` says that a file was deleted. Returns its size."""
        params = given(to=None if to is None else snapshot_name(to), format="tar")
        async with self.connection.stream("GET", f"{_snapshot_path(snapshot)}/diff", params=params) as response:
            return await save_async(response, local)

    async def list_backups(
        self, *, sandbox: str | None = None, name: str | None = None, bucket: str | None = None
    ) -> BackupList:
        """The backups there are, oldest first; ``unreachable`` names buckets that did not answer."""
        params = given(sandbox=sandbox, name=name, bucket=bucket)
        response = await self.connection.request("GET", "/v1/backups", params=params)
        return BackupList.model_validate_json(response.content)

    async def get_backup(self, backup: str, *, bucket: str | None = None) -> BackupInfo:
        """A backup by its id."""
        path = f"/v1/backups/{quote(backup, safe='')}"
        response = await self.connection.request("GET", path, params=given(bucket=bucket))
        return BackupInfo.model_validate_json(response.content)

    async def delete_backup(self, backup: BackupInfo | str, *, bucket: str | None = None) -> None:
        """Delete a backup, or cancel one that is being made."""
        id, place = (backup, bucket) if isinstance(backup, str) else (backup.id, bucket or backup.bucket)
        path = f"/v1/backups/{quote(id, safe='')}"
        await self.connection.request("DELETE", path, params=given(bucket=place))

    async def buckets(self) -> list[BucketInfo]:
        """The buckets that the server knows."""
        response = await self.connection.request("GET", "/v1/buckets")
        return BucketList.model_validate_json(response.content).buckets

    async def list_workspaces(self) -> StoredWorkspaces:
        """What is stored of which sandbox's workspace, and how much each owner has."""
        response = await self.connection.request("GET", "/v1/workspaces")
        return StoredWorkspaces.model_validate_json(response.content)

    async def delete_workspace(self, sandbox: str, *, bucket: str | None = None) -> int:
        """Delete what is stored of a sandbox's workspace; how many files that were. The sandbox keeps its own."""
        path = f"/v1/workspaces/{quote(sandbox, safe='')}"
        response = await self.connection.request("DELETE", path, params=given(bucket=bucket))
        return Deleted.model_validate_json(response.content).files

    async def aclose(self) -> None:
        await self.connection.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


async def save_async(response: httpx.Response, local: str | Path) -> int:
    """Write what a response brings to a file; how much that was."""
    size = 0
    with open(local, "wb") as file:
        async for piece in response.aiter_bytes():
            size += file.write(piece)
    return size


def _snapshot_path(snapshot: Snapshot) -> str:
    return f"/v1/snapshots/{quote(snapshot_name(snapshot), safe='')}"
