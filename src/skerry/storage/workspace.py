"""A sandbox's files in a bucket, one object each: ``workspaces/<sandbox>/<path>``.

Beside them, out of their way, lies an index of what was synced: the digest of each object, and how the file looked
inside when it was read. An object that was put here by other means is never touched by a sync.
"""

from __future__ import annotations

import builtins
import hashlib
import json
from collections.abc import AsyncIterable
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from skerry.errors import BucketError, ObjectNotFoundError
from skerry.storage.bucket import Bucket, Item

PREFIX = "workspaces"
INDEXES = f"{PREFIX}/.indexes"
"""No sandbox has a name like this."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A file as it was synced. Without a digest the object is of unknown content: a sync was cut off while at it."""

    size: int = 0
    mtime: int = 0
    ctime: int = 0
    inode: int = 0
    mode: int = 0o644
    digest: str | None = None


@dataclass(slots=True)
class Index:
    dir: str
    synced_at: datetime
    files: dict[str, Entry] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return sum(entry.size for entry in self.files.values())

    def encode(self) -> bytes:
        files = {path: list(asdict(entry).values()) for path, entry in self.files.items()}
        return json.dumps(
            {"dir": self.dir, "syncedAt": self.synced_at.isoformat(), "files": files, "links": self.links}
        ).encode()

    @classmethod
    def decode(cls, data: bytes) -> Index:
        try:
            found: dict[str, Any] = json.loads(data)
            files = {str(path): Entry(*entry) for path, entry in found["files"].items()}
            links = {str(path): str(target) for path, target in found["links"].items()}
            return cls(str(found["dir"]), datetime.fromisoformat(found["syncedAt"]), files, links)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise BucketError(
                "The index of this workspace cannot be read.", hint="Delete the stored workspace and sync again."
            ) from error


class Workspace:
    """What one sandbox has stored; nothing done through it reaches another's."""

    def __init__(self, bucket: Bucket, sandbox: str) -> None:
        self.sandbox = sandbox
        self.bucket = bucket.name
        self._files = bucket.within(f"{PREFIX}/{sandbox}")
        self._indexes = bucket.within(INDEXES)

    async def save_file(self, path: str, content: bytes | AsyncIterable[bytes]) -> Item:
        return await self._files.put(path, content)

    async def load_file(self, path: str) -> bytes | None:
        try:
            return await self._files.get(path)
        except ObjectNotFoundError:
            return None

    def stream_file(self, path: str) -> AsyncIterable[bytes]:
        return self._files.stream(path)

    async def list_files(self) -> builtins.list[Item]:
        return [item async for item in self._files.list()]

    async def delete_file(self, path: str) -> None:
        await self._files.delete(path)

    async def delete_files(self, paths: builtins.list[str]) -> None:
        if paths:
            await self._files.delete(*paths)

    async def delete_all_files(self) -> int:
        """Everything, the index included; how many files there were."""
        paths = [item.key for item in await self.list_files()]
        await self.delete_files(paths)
        await self._indexes.delete(f"{self.sandbox}.json")
        return len(paths)

    async def index(self) -> Index | None:
        try:
            return Index.decode(await self._indexes.get(f"{self.sandbox}.json"))
        except ObjectNotFoundError:
            return None

    async def save_index(self, index: Index) -> None:
        await self._indexes.put(f"{self.sandbox}.json", index.encode())


class Digest:
    """The digest of what passes through, and how much it was."""

    def __init__(self) -> None:
        self.size = 0
        self._hash = hashlib.sha256()

    def add(self, data: bytes) -> bytes:
        self.size += len(data)
        self._hash.update(data)
        return data

    def __str__(self) -> str:
        return self._hash.hexdigest()
