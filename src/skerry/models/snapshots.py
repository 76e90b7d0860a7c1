"""Snapshots, forks and what changed."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from pydantic import Field

from skerry.models.base import Labels, Request, Result, SandboxRef
from skerry.models.files import FileType
from skerry.models.sandboxes import SandboxInfo


class CreateSnapshot(Request):
    name: str | None = Field(None, description="A name to find it by, which no other snapshot has.")
    labels: Labels = Field(default_factory=dict)


class SnapshotInfo(Result):
    id: str
    name: str | None = None
    sandbox_id: SandboxRef = Field(description="The sandbox it was taken of, which may be gone.")
    image: str
    parent: str | None = Field(None, description="The snapshot that sandbox was at before.")
    labels: Labels = Field(default_factory=dict)
    created_at: datetime
    sandboxes: list[SandboxRef] = Field(default_factory=list, description="The sandboxes that were made from it.")


class SnapshotList(Result):
    snapshots: list[SnapshotInfo]


class ForkSandbox(Request):
    count: int = Field(1, ge=1, le=100, description="How many; with `ids`, as many as those.")
    ids: list[str] | None = Field(None, min_length=1, max_length=100, description="The ids of the new sandboxes.")


class ForkResult(Result):
    ok: bool = True
    sandbox_id: SandboxRef
    sandboxes: list[SandboxInfo]


class RollbackSandbox(Request):
    snapshot: str = Field(description="The id or name of the snapshot.")


class ChangeKind(StrEnum):
    ADDED = "added"
    CHANGED = "changed"
    DELETED = "deleted"


class LayerChange(Result):
    path: str
    change: ChangeKind
    type: FileType = Field(description="What it is now; of a deleted one, what it was.")
    size: int = 0
    raw_path: str | None = Field(None, description="The path's bytes in base64, when they are not UTF-8.")


class Diff(Result):
    changes: list[LayerChange]
    truncated: bool = Field(False, description="There are more changes than a list holds; the tar has all of them.")
