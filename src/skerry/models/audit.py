"""The audit log."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import Field

from skerry.models.base import Result

Outcome = Literal["ok", "refused", "failed"]


class AuditEntry(Result):
    """Something that somebody asked the server for: who, from where, what, and what became of it."""

    id: int = 0
    node: str = Field(description="The server that wrote it. Each has a chain of its own.")
    seq: int = Field(description="Its place in the chain, from 1.")
    at: datetime
    actor: str = Field(description="Who, as events name them: an API key, a local client, a preview.")
    key: str | None = Field(None, description="The API key, by its name or number; never the key itself.")
    owner: str | None = None
    user: str | None = None
    client: str = Field("", description="The address it came from; empty for a program that runs the server itself.")
    agent: str = Field("", description="What the client says it is (User-Agent).")
    request_id: str = ""
    operation: str
    method: str = ""
    sandbox_id: str | None = None
    outcome: Outcome
    status: int | None = None
    code: str | None = Field(None, description="The error's code.")
    took: float | None = Field(None, description="Milliseconds until it was answered.")
    command: str | None = Field(None, description="Only where the server records commands.")
    details: dict[str, Any] = Field(default_factory=dict)
    previous: str = Field("", description="The hash of the entry before; empty for the first.")
    hash: str = Field("", description="SHA-256 of all the above but `id`, as JSON with sorted keys and no spaces.")


class AuditPage(Result):
    entries: list[AuditEntry] = Field(description="The latest first.")
    next_cursor: int | None = Field(None, description="What to give as `cursor` for those before.")


class AuditChain(Result):
    node: str
    first: int = Field(description="The first entry that is kept; those before were removed because of their age.")
    last: int
    head: str = Field(description="The hash of the last entry. Kept elsewhere, it proves all that is before it.")


class AuditProblem(Result):
    node: str
    seq: int
    message: str


class AuditVerification(Result):
    ok: bool
    entries: int
    chains: list[AuditChain]
    problems: list[AuditProblem]
