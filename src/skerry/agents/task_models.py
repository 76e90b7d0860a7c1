"""Tasks, teams and schedules, as they are asked for and as they are told of."""

from __future__ import annotations

import posixpath
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AliasChoices, Field, field_serializer, field_validator, model_validator

from skerry.agents.models import Model, Tokens
from skerry.models import EgressMode, EgressPolicy, EnvVars, Labels, Limits, Request, Result, SandboxRef, Secrets, now

LONGEST_MESSAGE = 1 << 20


class TaskStatus(StrEnum):
    """pending → running → completed, failed or cancelled."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        return self not in (TaskStatus.PENDING, TaskStatus.RUNNING)


TeamStatus = Literal["pending", "running", "completed", "partial", "failed", "cancelled"]
Afterwards = Literal["keep", "stop", "destroy"]
"""What becomes of a sandbox when its task has ended: it stays awake, goes to sleep, or is gone."""
Missed = Literal["skip", "once", "all"]


Message = Annotated[str, Field(min_length=1, max_length=LONGEST_MESSAGE)]


def _wish(text: str) -> str:
    if not text.strip():
        raise ValueError("it should say what is to be done")
    return text


class Work(Request):
    """What all tasks say, alone or in a team: where to work, on what, with what."""

    git_url: str | None = Field(
        None, max_length=4096, description="A repository to clone.", validation_alias=AliasChoices("gitUrl", "git_url")
    )
    git_branch: str | None = Field(None, max_length=250)
    git_depth: int | None = Field(None, ge=1, description="Clone only so many commits.")
    user_id: str | None = Field(
        None, max_length=200, description="A label on the sandbox. Whose the task is says the key that it came with."
    )
    provider: str | None = Field(None, max_length=40, description="Where to run: `local`, `docker`, `cloudflare`, …")
    use_case: Literal["development", "quick-task", "batch", "multi-agent"] | None = Field(
        None, description="What kind of work it is, by which a provider is chosen where none is named."
    )
    agent: str = Field("opencode", max_length=60, description="Which agent program.")
    config: dict[str, Any] | None = Field(None, description="Configuration of the agent program.")
    image: str | None = None
    env: EnvVars = Field(default_factory=dict)
    labels: Labels = Field(default_factory=dict)
    limits: Limits | None = None
    egress: EgressMode | EgressPolicy | None = None
    secrets: Secrets = Field(default_factory=dict, description="Added at the sandbox's door, by host.")
    toolboxes: list[str] = Field(default_factory=list, max_length=20)
    timeout: float = Field(3600.0, gt=0, le=7 * 86400, description="Seconds that the agent has.")
    afterwards: Afterwards = Field("stop", description="What becomes of the sandbox. One that was given is kept.")
    artifacts: list[str] = Field(
        default_factory=list, max_length=100, description="Files to keep, beside those in `artifacts/`; * is allowed."
    )
    prepare: str | None = Field(
        None, max_length=LONGEST_MESSAGE, description="A command to run in the directory before the agent begins."
    )
    permissions: Literal["allow", "reject"] = Field(
        "allow", description="What an agent is told that asks for leave: nobody is there to decide."
    )
    on_restart: Literal["resume", "fail"] = Field(
        "resume", description="If the server ends meanwhile: go on in the same session, or fail and say so."
    )

    @field_serializer("secrets", when_used="json")
    def _hidden(self, secrets: Secrets) -> dict[str, Any]:
        return {
            host: secret.model_dump(mode="json", by_alias=True, exclude_none=True) for host, secret in secrets.items()
        }


class CreateTask(Work):
    message: Message
    model: Model | None = None
    system: str | None = Field(None, max_length=LONGEST_MESSAGE, description="Instructions beside the message.")
    sandbox_id: str | None = Field(
        None, min_length=1, description="Work in this sandbox, made if there is none, and keep it."
    )
    session_id: str | None = Field(None, max_length=200, description="Go on in this session of that sandbox's agent.")
    snapshot: str | None = Field(None, min_length=1, description="Make its sandbox from this one, by id or name.")
    reuse: bool = Field(False, description="Work in the caller's own sandbox for quick tasks, `quick-task`.")
    template_id: str | None = Field(None, max_length=60, description="Begin from a template; see `GET …/templates`.")
    values: dict[str, str] = Field(default_factory=dict, description="For the template's placeholders.")
    directory: str | None = Field(None, max_length=4096, description="Where the agent works: an absolute path.")
    detach: bool = Field(False, description="Answer at once, not when the task has ended.")

    @model_validator(mode="before")
    @classmethod
    def _from_template(cls, given: object) -> object:
        # The template is the message; what was written beside it comes after it.
        if (
            isinstance(given, dict)
            and not given.get("message")
            and (given.get("templateId") or given.get("template_id"))
        ):
            return {**given, "message": " "}
        return given

    @field_validator("directory")
    @classmethod
    def _placed(cls, directory: str | None) -> str | None:
        if directory is None:
            return None
        if not directory.startswith("/") or "\0" in directory or ".." in directory.split("/"):
            raise ValueError("it should be an absolute path without ..")
        return posixpath.normpath("/" + directory.lstrip("/"))

    @model_validator(mode="after")
    def _sensible(self) -> CreateTask:
        if self.template_id is None and not self.message.strip():
            raise ValueError("message: it should say what is to be done")
        if self.reuse and self.sandbox_id is not None:
            raise ValueError("either sandboxId or reuse, which is the sandbox for quick tasks")
        if self.snapshot is not None and (self.reuse or self.sandbox_id is not None or self.image is not None):
            raise ValueError("snapshot: it is for a sandbox of the task's own, in place of an image")
        return self


class TeamMember(Request):
    role: str = Field(min_length=1, max_length=200)
    message: Annotated[Message, AfterValidator(_wish)]
    model: Model | None = None
    agent: str | None = Field(None, max_length=60)
    system: str | None = Field(None, max_length=LONGEST_MESSAGE)


class CreateTeam(Work):
    agents: list[TeamMember] = Field(min_length=1, max_length=50)
    model: Model | None = Field(None, description="Of those who name none.")
    shared: bool | None = Field(
        None, description="Clone and prepare once and fork that for each; unless given, where that can be done."
    )
    snapshot: str | None = Field(None, description="A snapshot that is prepared already, by id or name.")
    detach: bool = False


# -- what became of it -------------------------------------------------------------------------------------------------


class ChangedFile(Result):
    path: str
    status: Literal["added", "modified", "deleted", "renamed", "copied", "type"]
    old_path: str | None = None
    additions: int | None = Field(None, description="Lines; none of a binary file.")
    deletions: int | None = None
    binary: bool = False


class TaskDiff(Result):
    """What the agent changed in the working directory, committed or not, new files included."""

    files: list[ChangedFile] = Field(default_factory=list)
    additions: int = 0
    deletions: int = 0
    base: str | None = Field(None, description="The commit that it is against; none where there was no repository.")
    head: str | None = Field(None, description="The commit that is checked out now.")
    size: int = Field(0, description="Bytes of the patch.")
    patch: str | None = Field(None, description="For `git apply`. `GET …/task/{id}/diff` has it byte for byte.")
    truncated: bool = Field(False, description="The patch was larger than what is kept; the list of files is whole.")
    error: str | None = Field(None, description="Why there is none.")


class ArtifactInfo(Result):
    path: str
    size: int
    kept: bool = Field(True, description="Whether it can be downloaded; not if it was too large, or unreadable.")


class TaskSummary(Result):
    """A task in a list."""

    id: str
    task_id: str
    status: TaskStatus
    message: str
    response: str | None = None
    provider: str
    agent: str
    model: str | None = None
    sandbox_id: SandboxRef | None = None
    session_id: str | None = None
    team_id: str | None = None
    role: str | None = None
    schedule_id: str | None = None
    retry_of: str | None = None
    git_url: str | None = None
    git_branch: str | None = None
    user_id: str | None = None
    owner: str = "local"
    attempts: int = 0
    error: str | None = None
    error_code: str | None = None
    cost: float = 0.0
    tokens: Tokens = Field(default_factory=Tokens)
    changed_files: int = 0
    created_at: datetime
    started_at: datetime | None = None
    completed_at: datetime | None = None


class TaskInfo(TaskSummary):
    diff: TaskDiff | None = None
    artifacts: list[ArtifactInfo] = Field(default_factory=list)


class TaskList(Result):
    tasks: list[TaskSummary]
    total: int
    limit: int
    offset: int


class TeamAgent(TaskInfo):
    """One of a team: what it was asked for, and what became of it."""


class TeamInfo(Result):
    team_id: str
    status: TeamStatus = Field(
        description="Of all together: completed if all have, failed if nobody has, partial if some have."
    )
    agents: list[TeamAgent]
    shared: bool = Field(False, description="Whether all began from one prepared snapshot.")
    cost: float = 0.0
    tokens: Tokens = Field(default_factory=Tokens)
    created_at: datetime


TaskEventType = Literal[
    "start",
    "status",
    "step_start",
    "chunk",
    "tool_call",
    "step_finish",
    "permission",
    "retry",
    "warning",
    "done",
    "error",
]


class TaskEvent(Result):
    """What happened to a task. ``done`` or ``error`` is the last."""

    id: int
    type: TaskEventType
    task_id: str
    at: datetime
    message: str | None = None
    content: str | None = Field(None, description="Of a chunk: what is new of the answer.")
    sandbox_id: SandboxRef | None = None
    session_id: str | None = None
    created_new_sandbox: bool | None = None
    event: dict[str, Any] | None = Field(None, description="What the agent said, in the words of all agents.")
    status: TaskStatus | None = None
    code: str | None = None
    task: TaskInfo | None = Field(None, description="With the last event: the whole task.")


class ProviderAvailability(Result):
    available: bool
    description: str = ""
    reason: str | None = Field(None, description="Why it is not available.")


class Placeholder(Result):
    name: str
    label: str
    type: Literal["text", "textarea", "select"] = "text"
    options: list[str] | None = None


class TaskTemplate(Result):
    id: str
    name: str
    description: str
    icon: str
    category: str
    prompt: str
    placeholders: list[Placeholder] = Field(default_factory=list)


class AgentUsageDay(Result):
    day: str
    tasks: int
    completed: int
    failed: int
    cost: float
    tokens: Tokens


class AgentUsage(Result):
    """What the tasks of an owner have cost, by the day they ended on, as their agents reckon it."""

    owner: str
    days: list[AgentUsageDay]
    tasks: int
    cost: float
    tokens: Tokens


# -- schedules ---------------------------------------------------------------------------------------------------------


class CreateSchedule(Request):
    name: str = Field(min_length=1, max_length=200)
    cron: str = Field(max_length=200, description="Five fields, or @hourly, @daily, @weekly, @monthly, @yearly.")
    timezone: str = Field("UTC", max_length=100, description="Such as Europe/Berlin.")
    task: CreateTask | None = None
    team: CreateTeam | None = None
    missed: Missed = Field("once", description="What becomes of times that passed while no server ran.")
    overlap: Literal["skip", "allow"] = Field("skip", description="What if the run before has not ended.")
    paused: bool = False

    @model_validator(mode="after")
    def _one(self) -> CreateSchedule:
        if (self.task is None) == (self.team is None):
            raise ValueError("a schedule runs either a task or a team")
        return self


class UpdateSchedule(Request):
    name: str | None = Field(None, min_length=1, max_length=200)
    cron: str | None = Field(None, max_length=200)
    timezone: str | None = Field(None, max_length=100)
    missed: Missed | None = None
    overlap: Literal["skip", "allow"] | None = None
    paused: bool | None = None


class ScheduleInfo(Result):
    id: str
    name: str
    cron: str
    timezone: str
    missed: Missed
    overlap: Literal["skip", "allow"]
    paused: bool
    owner: str = "local"
    message: str = Field(description="What is asked for, or of whom.")
    request: dict[str, Any] = Field(description="Without secrets.")
    next_at: datetime | None = None
    last_at: datetime | None = None
    created_at: datetime


class ScheduleList(Result):
    schedules: list[ScheduleInfo]


class ScheduleRun(Result):
    """A time at which a schedule was due, and what became of it."""

    id: int
    due_at: datetime
    at: datetime
    outcome: Literal["started", "skipped", "failed"]
    task_id: str | None = None
    team_id: str | None = None
    status: TeamStatus | None = Field(None, description="Of the task, or of all of the team.")
    reason: str | None = None


class ScheduleHistory(Result):
    runs: list[ScheduleRun]
    next_cursor: int | None = None


# -- word from elsewhere -----------------------------------------------------------------------------------------------


class WorkerReport(Request):
    """What a worker in the cloud says has happened to a sandbox of its."""

    event: str = Field(min_length=1, max_length=100, pattern=r"^[a-z]+(\.[a-z_]+)+$")
    data: dict[str, Any] = Field(default_factory=dict)
    timestamp: datetime = Field(default_factory=now)
    id: str | None = Field(None, max_length=200, description="As Skerry's own webhooks name a delivery.")

    @field_validator("timestamp")
    @classmethod
    def _past(cls, moment: datetime) -> datetime:
        # A clock that is ahead would have nothing believed that comes after it.
        try:
            moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
        except OverflowError:
            raise ValueError("it should be a time in this era") from None
        return min(moment, now())


class Received(Result):
    received: bool = True


class WorkerSandboxInfo(Result):
    """A sandbox that a worker in the cloud has told of."""

    id: str
    user_id: str | None = None
    status: str
    worker_url: str = ""
    error: str | None = None
    workspace_synced_at: datetime | None = None
    last_active_at: datetime | None = None
    created_at: datetime
    updated_at: datetime


class WorkerSandboxes(Result):
    sandboxes: list[WorkerSandboxInfo]
