"""Bootstrap."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from skerry.models.base import Done, Request, Result


class Bootstrap(Request):
    mount_project_data: bool = False
    local_bucket: bool = False
    bucket: str | None = None
    mount_path: str = "/persist"
    prefix: str | None = Field(None, description="Default: /projects/<id>/.")
    read_only: bool = False
    repo_url: str | None = None
    branch: str | None = None
    depth: int | None = Field(1, ge=1, description="null clones the whole history.")
    target_dir: str = "/workspace/repo"
    username: str | None = None
    password: str | None = Field(None, description="A password or token; never stored, never in the process list.")
    timeout: float = Field(600_000, gt=0, description="Milliseconds that the clone may take.")
    setup: list[str] = Field(default_factory=list, max_length=100, description="Commands, run in the repository.")
    setup_timeout: float = Field(600_000, gt=0, description="Milliseconds that each of them may take.")


class BootstrapStep(Result):
    type: Literal["mountBucket", "gitCheckout", "exec", "writeFile"]
    changed: bool = Field(True, description="False: it was done already.")
    took: float = Field(description="Milliseconds.")
    mount_path: str | None = None
    prefix: str | None = None
    mode: Literal["localBucket", "remoteR2"] | None = None
    bucket: str | None = None
    repo_url: str | None = None
    branch: str | None = None
    target_dir: str | None = None
    commit: str | None = None
    command: str | None = None
    exit_code: int | None = None
    stdout: str | None = None
    stderr: str | None = None
    path: str | None = None


class BootstrapResult(Done):
    steps: list[BootstrapStep]


class BootstrapEvent(Result):
    type: Literal["progress", "step", "complete", "error"]
    data: str | None = None
    step: BootstrapStep | None = None
    result: BootstrapResult | None = None
    error: str | None = None
    code: str | None = None
    hint: str | None = None
    details: dict[str, Any] | None = None
