"""What sessions say on the wire."""

from __future__ import annotations

import json
from base64 import b64decode
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, SecretStr, field_serializer

from skerry.agents.models import AgentConfig, Model
from skerry.models import EgressMode, EgressPolicy, EnvVars, Limits, Request, Result, SandboxRef, Secrets

Content = Annotated[str, Field(min_length=1, max_length=1_000_000)]
Branch = Annotated[str, Field(pattern=r"^[A-Za-z0-9_](?:[A-Za-z0-9._/-]{0,198}[A-Za-z0-9_-])?$")]
"""What git takes as a branch and no program takes for an option; ``..`` and the like are left to git to refuse."""
ModelName = Annotated[Model, Field(pattern=r"^[^/\s]+/\S+$", max_length=200, description="provider/model.")]
RepoWord = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}$")]


def _attachment(given: dict[str, Any]) -> dict[str, Any]:
    """Refused here and not by the agent, which gets it when its turn has come."""
    kind = given.get("type", "file")
    if kind not in ("file", "text", "agent", "subtask"):
        raise ValueError("is of no type that OpenCode knows: file, text, agent or subtask")
    written = kind == "text" and isinstance(given.get("text"), str)
    if kind in ("file", "text") and not written and not isinstance(given.get("url", given.get("content")), str):
        raise ValueError("has neither a `url` nor `content`")
    if given.get("encoding") == "base64":
        b64decode(str(given.get("content")), validate=True)
    return given


def _together(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if sum(len(json.dumps(each)) for each in given) > LARGEST_ATTACHMENTS:
        raise ValueError(f"are more than {LARGEST_ATTACHMENTS >> 20} MiB together")
    return given


LARGEST_ATTACHMENTS = 32 * 2**20
"""As JSON: the bridge has to take them in one message, which it would otherwise be sent again and again."""
Attachments = Annotated[
    list[Annotated[dict[str, Any], AfterValidator(_attachment)]], Field(max_length=50), AfterValidator(_together)
]


class SessionStatus(StrEnum):
    CREATED = "created"
    ACTIVE = "active"
    COMPLETED = "completed"
    ARCHIVED = "archived"


class SandboxStatus(StrEnum):
    PENDING = "pending"
    SPAWNING = "spawning"
    CONNECTING = "connecting"
    WARMING = "warming"
    SYNCING = "syncing"
    READY = "ready"
    RUNNING = "running"
    STALE = "stale"
    SNAPSHOTTING = "snapshotting"
    STOPPED = "stopped"
    FAILED = "failed"


class MessageStatus(StrEnum):
    PENDING = "pending"
    PROCESSING = "processing"
    COMPLETED = "completed"
    FAILED = "failed"


PermissionReply = Literal["once", "always", "reject"]


class CreateSession(Request):
    title: str | None = Field(None, max_length=500)
    repo_owner: RepoWord | None = None
    repo_name: RepoWord | None = None
    branch: Branch | None = Field(None, description="The branch to begin from; the repository's own unless given.")
    agent: Literal["opencode", "claude-code"] = "opencode"
    model: ModelName | None = None
    git_user_name: str | None = Field(None, max_length=200)
    git_user_email: str | None = Field(None, max_length=200)
    github_token: SecretStr | None = Field(
        None,
        description="The user's own, for pull requests and for git. Kept encrypted; it is never sent to the sandbox.",
    )
    config: AgentConfig = Field(
        default_factory=AgentConfig, description="The agent's. Keys in it stay outside of the sandbox."
    )
    env: EnvVars = Field(default_factory=dict)
    limits: Limits = Field(default_factory=Limits)
    image: str = "host"
    provider: str | None = Field(None, max_length=40, description="Where its sandboxes are: `local`, `docker`, …")
    egress: EgressMode | EgressPolicy | None = None
    secrets: Secrets = Field(default_factory=dict)

    @field_serializer("github_token", when_used="json")
    def _sent(self, value: SecretStr | None) -> str | None:
        return None if value is None else value.get_secret_value()


class SendPrompt(Request):
    content: Content
    author: str | None = Field(None, max_length=200)
    model: ModelName | None = None
    source: str = Field("api", max_length=50)
    attachments: Attachments = Field(default_factory=list)


class AnswerPermission(Request):
    """What the agent may do: this time, from now on, or not."""

    reply: PermissionReply


class AddParticipant(Request):
    user: str = Field(min_length=1, max_length=200)
    name: str | None = Field(None, max_length=200)
    email: str | None = Field(
        None, max_length=200, description="With it, what is committed for their prompts is committed in their name."
    )
    github_token: SecretStr | None = None


class AskWsToken(Request):
    user: str | None = Field(None, min_length=1, max_length=200)


class CreatePullRequest(Request):
    title: str = Field(min_length=1, max_length=500)
    body: str = Field("", max_length=100_000)
    base_branch: Branch | None = None
    head_branch: Branch | None = None
    draft: bool = False


class SandboxError(Request):
    error: str = Field(min_length=1, max_length=20_000)


class SessionInfo(Result):
    id: str
    title: str | None
    repo_owner: str | None
    repo_name: str | None
    branch: str | None
    agent: str = "opencode"
    model: str | None
    provider: str = Field("", description="Where its sandboxes are.")
    status: SessionStatus
    sandbox_id: SandboxRef | None
    sandbox_status: SandboxStatus
    snapshot: str | None
    error: str | None = Field(None, description="Why the last sandbox could not be started, or ended.")
    processing: bool = False
    queued: int = 0
    created_at: datetime
    updated_at: datetime


class SessionList(Result):
    sessions: list[SessionInfo]
    cursor: str | None = None
    has_more: bool = False


class MessageInfo(Result):
    id: str
    content: str
    author: str | None
    model: str | None
    source: str
    attachments: list[dict[str, Any]]
    status: MessageStatus
    error: str | None = None
    created_at: datetime
    started_at: datetime | None = None
    completed_at: datetime | None = None


class MessageList(Result):
    messages: list[MessageInfo]
    cursor: str | None = None
    has_more: bool = False


class EventInfo(Result):
    id: str
    number: int
    type: str
    message_id: str | None
    data: dict[str, Any]
    at: datetime


class EventList(Result):
    events: list[EventInfo]
    cursor: str | None = None
    has_more: bool = False


class SessionNews(Result):
    """Something that those who watch are told: an event of the sandbox's, or how things stand."""

    type: str = Field(description="`sandbox_event`, `sandbox_status`, `session_status`, `prompt_queued`, …")
    event: EventInfo | None = Field(None, description="Of a `sandbox_event`.")
    data: dict[str, Any] = Field(default_factory=dict, description="Of all others.")


class ArtifactInfo(Result):
    id: str
    type: str
    url: str | None
    metadata: dict[str, Any]
    created_at: datetime


class ArtifactList(Result):
    artifacts: list[ArtifactInfo]


class ParticipantInfo(Result):
    id: str
    user: str
    name: str | None
    email: str | None = None
    role: Literal["owner", "member"]
    joined_at: datetime


class ParticipantList(Result):
    participants: list[ParticipantInfo]


class PromptQueued(Result):
    message_id: str
    status: Literal["queued"] = "queued"
    position: int


class WsToken(Result):
    token: str
    participant_id: str
    expires_at: datetime


class PullRequest(Result):
    number: int
    url: str
    head_branch: str
    base_branch: str
    state: str = "open"


class Repository(Result):
    owner: str
    name: str
    full_name: str
    private: bool = False
    default_branch: str = "main"
    description: str | None = None


class RepositoryList(Result):
    repos: list[Repository]


# -- what clients say over their WebSocket -----------------------------------------------------------------------------


class Subscribe(Request):
    type: Literal["subscribe"]
    token: str = Field(max_length=500)
    client_id: str = Field(min_length=1, max_length=200)


class ClientPrompt(Request):
    type: Literal["prompt"]
    content: Content
    model: ModelName | None = None
    attachments: Attachments = Field(default_factory=list)


class ClientStop(Request):
    type: Literal["stop"]


class ClientAnswer(Request):
    type: Literal["answer"]
    permission_id: str = Field(min_length=1, max_length=200)
    reply: PermissionReply


class Typing(Request):
    type: Literal["typing"]


def _sayable(given: dict[str, Any]) -> dict[str, Any]:
    """The others are told it as it is, and what is no number to JSON they could not read."""
    json.dumps(given, allow_nan=False)
    return given


class Presence(Request):
    type: Literal["presence"]
    status: Literal["active", "idle"] = "active"
    cursor: Annotated[dict[str, Any], AfterValidator(_sayable)] | None = None


class Ping(Request):
    type: Literal["ping"]


Said = Annotated[
    Subscribe | ClientPrompt | ClientStop | ClientAnswer | Typing | Presence | Ping,
    Field(discriminator="type"),
]
