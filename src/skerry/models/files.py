"""Files."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import Field

from skerry.models.base import Done, Encoding, Request, Result, SandboxRef, now

FileType = Literal["file", "directory", "symlink", "other"]


class Permissions(Result):
    readable: bool
    writable: bool
    executable: bool


class FileInfo(Result):
    name: str
    absolute_path: str
    relative_path: str
    type: FileType
    size: int
    modified_at: datetime
    mode: str = Field(description="As ls writes it: rw-r--r--.")
    permissions: Permissions
    target: str | None = Field(None, description="Where a symbolic link points.")
    raw_name: str | None = Field(None, description="The name's bytes in base64, when they are not UTF-8.")


class FileList(Result):
    ok: bool = True
    sandbox_id: SandboxRef | None = None
    path: str
    files: list[FileInfo]
    count: int


class FileContent(Result):
    path: str
    content: str
    encoding: Encoding
    is_binary: bool
    mime_type: str
    size: int
    offset: int = 0


class ReadFileResult(Result):
    ok: bool = True
    sandbox_id: SandboxRef
    path: str
    file: FileContent


class WriteFileResult(Result):
    ok: bool = True
    sandbox_id: SandboxRef | None = None
    path: str
    bytes: int


class FileEvent(Result):
    """One event of a streamed file: metadata, chunk (text or base64), complete or error."""

    type: Literal["metadata", "chunk", "complete", "error"]
    mime_type: str | None = None
    size: int | None = None
    is_binary: bool | None = None
    encoding: Encoding | None = None
    data: str | None = None
    bytes_read: int | None = None
    error: str | None = None


class PathResult(Done):
    path: str
    new_path: str | None = None


class ExistsResult(Done):
    path: str
    exists: bool


class StatResult(Done):
    path: str
    file: FileInfo


class Mkdir(Request):
    path: str
    recursive: bool = False
    mode: int | None = Field(None, ge=0, le=0o7777)
    force: bool = False


class RenameFile(Request):
    old_path: str
    new_path: str
    force: bool = False


class MoveFile(Request):
    source_path: str
    destination_path: str
    force: bool = False


class CopyFile(Request):
    source_path: str
    destination_path: str
    recursive: bool = False
    force: bool = False


class Chmod(Request):
    path: str
    mode: int = Field(ge=0, le=0o7777)
    recursive: bool = False
    force: bool = False


class ExtractResult(Done):
    path: str
    files: int
    bytes: int


class WatchRequest(Request):
    path: str = "/workspace"
    recursive: bool = True
    include: list[str] | None = None
    exclude: list[str] | None = Field(None, description="Default: .git, node_modules, .DS_Store.")


class CheckChanges(WatchRequest):
    since: str | None = None


class ChangesResult(Result):
    status: Literal["unchanged", "changed", "resync"]
    version: str
    reason: Literal["expired", "restarted"] | None = None
    changed: list[str] = Field(default_factory=list, description="Paths that changed since `since`, oldest first.")
    timestamp: datetime = Field(default_factory=now)


class WatchEvent(Result):
    type: Literal["watching", "event", "stopped", "error"]
    path: str | None = None
    watch_id: str | None = None
    event_type: Literal["create", "modify", "delete", "move_from", "move_to", "attrib"] | None = None
    is_directory: bool | None = None
    timestamp: datetime = Field(default_factory=now)
    reason: str | None = None
    error: str | None = None
