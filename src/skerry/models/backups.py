"""Backups."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import AliasChoices, Field

from skerry.models.base import BackupRef, Request, Result, SandboxRef, now


class BackupRequest(Request):
    dir: str = Field("/workspace", description="What to ship; `/` is the whole machine.")
    name: str | None = Field(None, max_length=255)
    ttl: str | float | None = Field(None, description="How long it is kept: seconds, or a text like '12h' or '30d'.")
    gitignore: bool = Field(
        False,
        validation_alias=AliasChoices("useGitignore", "gitignore"),
        serialization_alias="useGitignore",
        description="Leave out what git would ignore.",
    )
    excludes: list[str] = Field(default_factory=list, max_length=1000, description="Patterns, as in .gitignore.")
    compression: Literal["zstd", "none"] = "zstd"
    level: int = Field(2, ge=1, le=19, description="How hard zstd tries.")
    bucket: str | None = Field(None, description="One of `GET /v1/buckets`; the default one unless given.")


class BackupInfo(Result):
    """The handle of a backup: all that is needed to restore it."""

    id: BackupRef
    dir: str
    bucket: str
    name: str | None = None
    sandbox_id: SandboxRef | None = None
    created_at: datetime
    expires_at: datetime | None = None
    size: int = Field(description="Bytes in the bucket.")
    bytes: int = Field(description="Bytes of the files, holes not counted.")
    files: int
    compression: Literal["zstd", "none"] = "zstd"
    encrypted: bool = False
    left_out: dict[str, int] = Field(
        default_factory=dict,
        description="How many of each: excluded, sockets, devices, mounts, and those that vanished, changed or shrank "
        "while they were read.",
    )
    examples: dict[str, list[str]] = Field(default_factory=dict, description="Some of them by name.")


class BackupHandle(Result):
    """As much of a handle as a restore needs."""

    id: str = Field(max_length=100)
    bucket: str | None = None


class RestoreRequest(Request):
    backup: str | BackupHandle = Field(description="A handle, or its id.")
    dir: str | None = Field(None, description="Where to; where it came from unless given.")
    bucket: str | None = None


class BackupResult(Result):
    ok: bool = True
    sandbox_id: SandboxRef = ""
    backup: BackupInfo


class RestoreResult(Result):
    ok: bool = True
    restored: bool = True
    sandbox_id: SandboxRef = ""
    backup: BackupRef
    dir: str
    files: int
    bytes: int
    left_out: dict[str, int] = Field(
        default_factory=dict, description="How many owners or extended attributes this machine could not set."
    )


class BackupList(Result):
    backups: list[BackupInfo]
    unreachable: list[str] = Field(default_factory=list, description="Buckets that did not answer.")


class BackupEvent(Result):
    type: Literal["start", "progress", "complete", "error"]
    id: BackupRef | None = None
    phase: Literal["packing", "unpacking"] | None = None
    bytes: int | None = None
    files: int | None = None
    total: int | None = Field(None, description="Bytes there will be, where that is known.")
    backup: BackupInfo | None = None
    restored: RestoreResult | None = None
    error: str | None = None
    code: str | None = Field(None, description="The code of the error, as errors have it elsewhere.")
    hint: str | None = None
    details: dict[str, Any] | None = None
    timestamp: datetime = Field(default_factory=now)
