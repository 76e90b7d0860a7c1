"""What crosses the wire: requests, results and events, shared by server and client.

Python names are snake_case, JSON names are camelCase. Requests refuse unknown fields; results tolerate them, so that an
older client can read a newer server.
"""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel


def now() -> datetime:
    return datetime.now(UTC)


class Request(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", allow_inf_nan=False)


class Result(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="ignore")


# -- sandboxes ---------------------------------------------------------------------------------------------------------


class State(StrEnum):
    """created → starting → active → hibernated → active … → destroyed."""

    CREATED = "created"
    STARTING = "starting"
    ACTIVE = "active"
    FROZEN = "frozen"
    HIBERNATED = "hibernated"
    FAILED = "failed"
    DESTROYED = "destroyed"


class Limits(Request):
    """What a sandbox may use. Recorded now; `enforced` in the answer says which of them the host holds it to."""

    memory_mb: int | None = Field(None, ge=16)
    cpus: float | None = Field(None, gt=0)
    pids: int | None = Field(None, ge=8)
    disk_mb: int | None = Field(None, ge=16)


EnvVars = dict[str, str]
Labels = dict[str, str]


class CreateSandbox(Request):
    id: str | None = None
    image: str = "host"
    env: EnvVars = Field(default_factory=dict)
    labels: Labels = Field(default_factory=dict)
    limits: Limits = Field(default_factory=Limits)
    sleep_after: str | float | None = Field(
        None, description="Idle time before the sandbox sleeps: seconds, or '30s', '10m', '1h'; 'never' keeps it awake."
    )
    ephemeral: bool = Field(False, description="Forget every file when the sandbox goes to sleep.")


class UpdateSandbox(Request):
    labels: Labels | None = None
    sleep_after: str | float | None = None


class SetEnv(Request):
    env: dict[str, str | None] = Field(description="Variables to set; null unsets one.")


class SandboxInfo(Result):
    id: str
    state: State
    image: str
    env: EnvVars = Field(default_factory=dict)
    labels: Labels = Field(default_factory=dict)
    limits: dict[str, Any] = Field(default_factory=dict)
    sleep_after: float | None = None
    ephemeral: bool = False
    created_at: datetime
    started_at: datetime | None = None
    last_active_at: datetime | None = None
    starts: int = Field(0, description="How often the machine was started; processes live within one start.")
    last_stop: str | None = Field(None, description="Why the machine last stopped, in a sentence.")
    active_operations: int = 0


class SandboxList(Result):
    sandboxes: list[SandboxInfo]
    next_cursor: str | None = None


class SandboxEvent(Result):
    id: int
    sandbox_id: str
    kind: str
    message: str
    at: datetime


class EventList(Result):
    events: list[SandboxEvent]


class Done(Result):
    """The answer of operations that have nothing to say but that they happened."""

    ok: bool = True
    sandbox_id: str | None = None


class Destroyed(Done):
    destroyed: bool = True


# -- commands and sessions ---------------------------------------------------------------------------------------------

Encoding = Literal["utf-8", "base64"]


class ExecRequest(Request):
    command: str = Field("", description="A shell command; with `args`, the program to run without a shell.")
    args: list[str] | None = None
    cwd: str | None = None
    env: dict[str, str | None] = Field(default_factory=dict)
    timeout: float | None = Field(
        None, gt=0, description="Milliseconds.", validation_alias=AliasChoices("timeout", "timeoutMs", "timeout_ms")
    )
    session: str | None = Field(
        "default",
        description="The session to run in; null runs in a fresh shell that is forgotten afterwards.",
        validation_alias=AliasChoices("session", "sessionId", "session_id"),
    )
    stdin: str | None = None
    encoding: Encoding = Field("utf-8", description="How stdin, stdout and stderr are written in JSON.")


class ExecResult(Result):
    stdout: str
    stderr: str
    exit_code: int
    success: bool
    command: str
    duration: float = Field(description="Milliseconds.")
    timestamp: datetime
    session_id: str | None = None
    timed_out: bool = False
    stdout_truncated: int = Field(0, description="Bytes of stdout that were left out because the result was too large.")
    stderr_truncated: int = 0
    encoding: Encoding = "utf-8"


class ExecOutcome(Result):
    """The part of a result that clients of the older API read."""

    stdout: str
    stderr: str
    exit_code: int
    success: bool


class ExecAnswer(ExecResult):
    """What `POST …/exec` answers; the last three are left out with `Prefer: return=minimal`."""

    ok: bool | None = None
    sandbox_id: str | None = None
    result: ExecOutcome | None = None


class ExecEvent(Result):
    """One event of a streamed command: start, stdout, stderr, complete or error."""

    type: Literal["start", "stdout", "stderr", "complete", "error"]
    timestamp: datetime = Field(default_factory=now)
    command: str | None = None
    data: str | None = None
    exit_code: int | None = None
    error: str | None = None
    code: str | None = Field(None, description="The code of the error, as errors have it elsewhere.")
    session_id: str | None = None
    result: dict[str, Any] | None = None
    encoding: Encoding | None = None


class CreateSession(Request):
    id: str | None = Field(None, validation_alias=AliasChoices("id", "name", "sessionId"))
    env: EnvVars = Field(default_factory=dict)
    cwd: str = "/workspace"
    isolation: bool = Field(True, description="Hide and protect processes of other sessions, where the host can.")
    command_timeout: float | None = Field(
        None, gt=0, description="Milliseconds.", validation_alias=AliasChoices("commandTimeout", "commandTimeoutMs")
    )


class SessionInfo(Result):
    id: str
    cwd: str
    env: EnvVars = Field(default_factory=dict)
    isolated: bool = False
    created_at: datetime
    busy: bool = False
    commands: int = 0
    command_timeout: float | None = None


class SessionList(Result):
    sessions: list[SessionInfo]


# -- background processes ----------------------------------------------------------------------------------------------


class ProcessStatus(StrEnum):
    STARTING = "starting"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    KILLED = "killed"
    ERROR = "error"

    @property
    def ended(self) -> bool:
        return self not in (ProcessStatus.STARTING, ProcessStatus.RUNNING)


class StartProcess(Request):
    command: str = ""
    args: list[str] | None = None
    process_id: str | None = None
    cwd: str | None = None
    env: dict[str, str | None] = Field(default_factory=dict)
    session: str | None = Field(None, validation_alias=AliasChoices("session", "sessionId", "session_id"))
    timeout: float | None = Field(
        None, gt=0, description="Milliseconds.", validation_alias=AliasChoices("timeout", "timeoutMs", "timeout_ms")
    )
    auto_cleanup: bool = Field(True, description="Forget it some time after it ended, when there are very many.")
    encoding: Encoding = "utf-8"


class ProcessInfo(Result):
    id: str
    pid: int | None = None
    command: str
    status: ProcessStatus
    start_time: datetime
    end_time: datetime | None = None
    exit_code: int | None = None
    session_id: str | None = None
    error: str | None = Field(None, description="Why it was killed or could not run.")


class ProcessList(Result):
    processes: list[ProcessInfo]


class ProcessLogs(Result):
    process_id: str
    stdout: str
    stderr: str
    stdout_truncated: int = Field(0, description="Bytes at the beginning that are no longer kept.")
    stderr_truncated: int = 0


class LogEvent(Result):
    """One event of a process's log stream."""

    type: Literal["stdout", "stderr", "exit", "error"]
    process_id: str
    timestamp: datetime = Field(default_factory=now)
    data: str | None = None
    exit_code: int | None = None


class KillProcess(Request):
    signal: str | int = "SIGTERM"
    grace: float = Field(5000, ge=0, description="Milliseconds until SIGKILL.")


class KilledCount(Result):
    killed: int


class WaitRequest(Request):
    until: Literal["exit", "log", "port"] = "exit"
    pattern: str | None = Field(None, description="A text, or with `regex` a regular expression, to find in the log.")
    regex: bool = False
    port: int | None = Field(None, ge=1, le=65535)
    mode: Literal["tcp", "http"] = "http"
    path: str = "/"
    status_min: int = 200
    status_max: int = 399
    timeout: float | None = Field(
        None, gt=0, description="Milliseconds.", validation_alias=AliasChoices("timeout", "timeoutMs", "timeout_ms")
    )


class WaitResult(Result):
    exit_code: int | None = None
    line: str | None = None
    match: list[str | None] | None = None
    port: int | None = None
    status_code: int | None = None


class WaitForPort(Request):
    mode: Literal["tcp", "http"] = "tcp"
    path: str = "/"
    status_min: int = 200
    status_max: int = 399
    timeout: float | None = Field(
        None, gt=0, description="Milliseconds.", validation_alias=AliasChoices("timeout", "timeoutMs", "timeout_ms")
    )


# -- files -------------------------------------------------------------------------------------------------------------

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
    sandbox_id: str | None = None
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
    sandbox_id: str
    path: str
    file: FileContent


class WriteFileResult(Result):
    ok: bool = True
    sandbox_id: str | None = None
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


# -- git ---------------------------------------------------------------------------------------------------------------


class GitClone(Request):
    repo_url: str
    branch: str | None = None
    target_dir: str | None = Field(None, description="Default: /workspace/<repository name>.")
    depth: int | None = Field(None, ge=1)
    timeout: float = Field(
        600_000,
        gt=0,
        description="Milliseconds.",
        validation_alias=AliasChoices("timeout", "timeoutMs", "cloneTimeoutMs", "timeout_ms"),
    )
    username: str | None = None
    password: str | None = Field(None, description="A password or token; never stored, never in the process list.")
    session: str | None = Field(None, validation_alias=AliasChoices("session", "sessionId", "session_id"))


class GitCloneResult(Result):
    ok: bool = True
    repo_url: str
    branch: str
    target_dir: str
    commit: str | None = None
    stdout: str = ""
    stderr: str = ""
    exit_code: int = 0
    timestamp: datetime = Field(default_factory=now)


class GitEvent(Result):
    type: Literal["progress", "complete", "error"]
    data: str | None = None
    result: GitCloneResult | None = None
    error: dict[str, Any] | None = None
    timestamp: datetime = Field(default_factory=now)


# -- images ------------------------------------------------------------------------------------------------------------


class ImageInfo(Result):
    name: str
    size: int = Field(description="Bytes on disk; 0 for the host image, which takes none.")
    created_at: datetime | None = None
    source: str | None = None
    sandboxes: int = 0


class ImageList(Result):
    images: list[ImageInfo]


class Health(Result):
    ok: bool = True
    service: str = "skerry"
    version: str
    provider: str
    isolation: dict[str, Any] = Field(default_factory=dict)
    bindings: dict[str, bool] = Field(default_factory=dict)
