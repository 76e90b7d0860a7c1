"""Workers in the cloud."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from skerry.models.base import Result


class WorkerSandbox(Result):
    """A sandbox of an AgentPod-style worker."""

    id: str
    status: str
    provider: str
    opencode_url: str


class WorkerReply(Result):
    session_id: str
    response: str = Field(description="The text of the agent's answer.")
    parts: list[Any] = Field(default_factory=list)
