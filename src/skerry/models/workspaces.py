"""Workspaces in buckets."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import Field

from skerry.models.base import Request, Result, SandboxRef


class SyncRequest(Request):
    direction: Literal["push", "pull"] = Field("push", description="`push` into the bucket, `pull` out of it.")
    dir: str = "/workspace"
    excludes: list[str] = Field(default_factory=list, max_length=1000, description="Patterns, as in .gitignore.")
    everything: bool = Field(
        False, description="Also what is left out otherwise: node_modules, .git, build and others."
    )
    bucket: str | None = Field(None, description="One of `GET /v1/buckets`; the default one unless given.")
    dry_run: bool = Field(False, description="Only say what would be pushed.")


class SyncResult(Result):
    ok: bool = Field(description="Whether there were no errors.")
    sandbox_id: SandboxRef
    direction: Literal["push", "pull"]
    bucket: str
    synced_files: int = Field(description="Files that were moved.")
    skipped_files: int = Field(description="Files that were the same on both sides.")
    deleted_files: int = 0
    excluded_files: int = 0
    total_size: int = Field(description="Bytes of the stored workspace.")
    transferred: int = Field(description="Bytes that were moved.")
    errors: list[str] = Field(default_factory=list, description="Files that could not be moved, and why.")
    workspace_synced_at: datetime
    duration: float = Field(description="Milliseconds.")


class StoredWorkspace(Result):
    sandbox_id: SandboxRef
    owner: str
    bucket: str
    files: int
    size: int
    workspace_synced_at: datetime


class StoredWorkspaces(Result):
    workspaces: list[StoredWorkspace]
    owners: dict[str, int] = Field(description="Bytes that each owner has stored.")


class Deleted(Result):
    ok: bool = True
    files: int = Field(description="How many there were.")
