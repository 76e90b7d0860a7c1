"""What agents say while they work, in one vocabulary for all of them.

token           the answer so far, whole each time
tool_call       a tool was called, or ended: args, status, output
step_start      the model is asked
step_finish     it has answered: what that cost
permission      the agent waits for leave to do something
retry           the model could not be reached and is asked again
error           something went wrong; the turn may go on
execution_complete   the turn is over, the last event of it
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, field_serializer
from pydantic.alias_generators import to_camel

from skerry.models import EgressMode, EgressPolicy, Limits, Request, Result, SandboxRef, SyncResult


class ToolStatus(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    ERROR = "error"


class Tokens(Result):
    input: int = 0
    output: int = 0
    reasoning: int = 0
    cache_read: int = 0
    cache_write: int = 0

    def __add__(self, more: Tokens) -> Tokens:
        return Tokens(**{name: getattr(self, name) + getattr(more, name) for name in Tokens.model_fields})


class _Event(Result):
    message_id: str = Field("", description="Of the prompt that this belongs to.")


class Token(_Event):
    type: Literal["token"] = "token"
    content: str


class ToolCall(_Event):
    type: Literal["tool_call"] = "tool_call"
    call_id: str
    tool: str
    args: dict[str, Any] = Field(default_factory=dict)
    status: ToolStatus
    output: str | None = None


class StepStart(_Event):
    type: Literal["step_start"] = "step_start"


class StepFinish(_Event):
    type: Literal["step_finish"] = "step_finish"
    cost: float = 0.0
    tokens: Tokens = Field(default_factory=Tokens)
    reason: str | None = None


class Permission(_Event):
    type: Literal["permission"] = "permission"
    id: str
    tool: str
    patterns: list[str] = Field(default_factory=list)


class Retry(_Event):
    type: Literal["retry"] = "retry"
    attempt: int
    message: str


class AgentFault(_Event):
    type: Literal["error"] = "error"
    error: str
    code: str = "agent_failed"
    """``model_denied``, ``model_failed``, ``model_unreachable``, ``model_unknown``, ``aborted``, ``agent_died``,
    ``agent_failed``."""


class ExecutionComplete(_Event):
    type: Literal["execution_complete"] = "execution_complete"
    success: bool
    error: str | None = None
    code: str | None = None


AgentEvent = Annotated[
    Token | ToolCall | StepStart | StepFinish | Permission | Retry | AgentFault | ExecutionComplete,
    Field(discriminator="type"),
]


class Credential(Request):
    """What a provider of models wants to see: a key, or tokens. It stays outside of sandboxes."""

    type: Literal["api", "oauth"] = "api"
    key: SecretStr | None = None
    refresh: SecretStr | None = None
    access: SecretStr | None = None
    expires: float | None = Field(None, description="When the access token ends, in milliseconds since 1970.")
    token_url: str | None = Field(None, description="Where the server gets a new access token.")
    client_id: str | None = None

    @field_serializer("key", "refresh", "access", when_used="json")
    def _sent(self, value: SecretStr | None) -> str | None:
        return None if value is None else value.get_secret_value()


class ConfigFile(Request):
    type: Literal["agent", "command", "tool", "plugin"]
    name: str = Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}$")
    extension: str = Field("md", pattern=r"^\.?[A-Za-z0-9]{1,10}$")
    content: str = Field(max_length=1 << 20)
    is_system: bool = False


class AgentConfig(BaseModel):
    """How an agent is set up, in AgentPod's words. What is not named here is a setting of OpenCode's."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="allow", allow_inf_nan=False)

    provider: dict[str, dict[str, Any]] = Field(default_factory=dict, repr=False)
    auth: dict[str, Credential] = Field(default_factory=dict)
    model: str | None = Field(None, description="`provider/model`.")
    files: list[ConfigFile] = Field(default_factory=list, max_length=500)
    agents_md: str | None = Field(
        None,
        max_length=1 << 20,
        validation_alias=AliasChoices("agentsMd", "agents_md"),
        description="What the agent is told before anything else.",
    )
    mcp: dict[str, dict[str, Any]] = Field(default_factory=dict, repr=False)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of OpenCode's that have no name here."""
        return dict(self.model_extra or {})


# -- AgentPod's worker -------------------------------------------------------------------------------------------------


def _model(value: object) -> object:
    """``provider/model``, or the two apart, as other clients write them."""
    if isinstance(value, dict) and set(value) == {"providerID", "modelID"}:
        return f"{value['providerID']}/{value['modelID']}"
    return value


Model = Annotated[str, BeforeValidator(_model), Field(min_length=1, max_length=300)]


class WorkerCreate(Request):
    id: str | None = Field(None, description="Made up unless given.")
    user_id: str | None = Field(None, max_length=200, description="Kept as the label `userId`.")
    config: dict[str, Any] | None = Field(None, repr=False)
    git_url: str | None = Field(None, description="A repository to clone into the directory that is worked in.")
    git_branch: str | None = None
    agent: Literal["opencode"] = "opencode"
    provider: str | None = Field(None, max_length=40, description="Where it is; the server's own unless given.")
    image: str = "host"
    limits: Limits = Field(default_factory=Limits)
    egress: EgressMode | EgressPolicy | None = Field(None, description="The server's setting unless given.")


class WorkerInfo(Result):
    success: bool = True
    sandbox_id: SandboxRef
    status: Literal["created", "starting", "running", "sleeping", "error", "deleted"]
    agent: str = "opencode"
    agent_running: bool = False
    server_port: int = Field(4096, description="Where inside the agent's own API is.")
    has_workspace: bool = Field(False, description="Whether a copy of its workspace lies in a bucket.")
    user_id: str | None = None
    last_active_at: datetime | None = None


class WorkerDeleted(Result):
    success: bool = True
    sandbox_id: SandboxRef
    files: int = Field(0, description="How many files of its stored workspace were deleted.")


class WorkerMessage(Request):
    message: str = Field(min_length=1, max_length=4 << 20)
    session_id: str | None = Field(None, description="A new session is begun unless given.")
    model: Model | None = Field(None, description="`provider/model`, or `{providerID, modelID}`.")
    config: dict[str, Any] | None = Field(None, repr=False)
    stream: bool = Field(False, description="Answer with server-sent events, as `Accept: text/event-stream` does too.")


class WorkerAnswer(Result):
    success: bool = True
    session_id: str
    message_id: str
    response: str = Field(description="The text of the agent's answer.")
    parts: list[Any] = Field(default_factory=list, description="All parts of the answer, as OpenCode has them.")
    cost: float = 0.0
    tokens: Tokens = Field(default_factory=Tokens)
    error: str | None = None
    code: str | None = None


class MessageStart(Result):
    type: Literal["start"] = "start"
    session_id: str
    message_id: str


class MessageDone(WorkerAnswer):
    type: Literal["done"] = "done"


class WorkerSync(SyncResult):
    success: bool = True
