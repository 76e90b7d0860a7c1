"""Background processes."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Literal

from pydantic import AliasChoices, Field

from skerry.limits import Limit
from skerry.models.base import Encoding, Request, Result, now


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
    limit: Limit | None = Field(None, description="The limit of the sandbox that it ran into.")


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
