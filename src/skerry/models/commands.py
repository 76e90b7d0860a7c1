"""Commands and sessions."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import AliasChoices, Field

from skerry.limits import Limit
from skerry.models.base import Encoding, EnvVars, Request, Result, SandboxRef, now


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
    shell_ended: bool = Field(False, description="Whether the session's shell ended with it, as by `exit`.")
    stdout_truncated: int = Field(0, description="Bytes of stdout that were left out because the result was too large.")
    stderr_truncated: int = 0
    encoding: Encoding = "utf-8"
    limit: Limit | None = Field(None, description="The limit that it, or what ran beside it, ran into.")
    limit_message: str | None = Field(None, description="What that did, in a sentence.")


class ExecOutcome(Result):
    """The part of a result that clients of the older API read."""

    stdout: str
    stderr: str
    exit_code: int
    success: bool


class ExecAnswer(ExecResult):
    """What `POST …/exec` answers; the last three are left out with `Prefer: return=minimal`."""

    ok: bool | None = None
    sandbox_id: SandboxRef | None = None
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
