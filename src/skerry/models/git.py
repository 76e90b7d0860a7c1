"""Git."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import AliasChoices, Field

from skerry.models.base import Request, Result, now


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
