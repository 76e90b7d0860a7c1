"""Sandboxes: made, changed, put to sleep, and what they use."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any, Literal

from pydantic import Field

from skerry.models.base import Done, EnvVars, Labels, Request, Result, SandboxRef
from skerry.models.egress import EgressMode, EgressPolicy, NetworkUsage, Secrets
from skerry.models.limits import Limits, LimitsInfo


class State(StrEnum):
    """created → starting → active → frozen or hibernated → active … → destroyed."""

    CREATED = "created"
    STARTING = "starting"
    ACTIVE = "active"
    FROZEN = "frozen"
    HIBERNATED = "hibernated"
    FAILED = "failed"
    DESTROYED = "destroyed"


Stage = Literal["freeze", "hibernate"]
"""How deep a sandbox sleeps: with its processes stopped where they are, or ended and its files kept."""


class CreateSandbox(Request):
    id: str | None = None
    image: str = "host"
    env: EnvVars = Field(default_factory=dict)
    labels: Labels = Field(default_factory=dict)
    limits: Limits = Field(default_factory=Limits)
    sleep_after: str | float | None = Field(
        None, description="Idle time before the sandbox sleeps: seconds, or '30s', '10m', '1h'; 'never' keeps it awake."
    )
    keep_alive: bool = Field(False, description="Never go to sleep for want of use.")
    on_idle: Stage = Field("hibernate", description="What idleness does: end its processes, or freeze them.")
    hibernate_after: str | float | None = Field(
        None, description="Time after which one that idleness or a request froze hibernates; never unless given."
    )
    ephemeral: bool = Field(False, description="Forget every file when the sandbox goes to sleep.")
    snapshot: str | None = Field(
        None,
        description="The id or name of a snapshot to start from: its files, image, environment, labels and limits, "
        "where this request does not say otherwise.",
    )
    provider: str | None = Field(
        None, max_length=40, description="Where it is to live, of the providers that the server has: local, docker, ..."
    )
    egress: EgressMode | EgressPolicy | None = Field(None, description="The server's setting unless given.")
    secrets: Secrets = Field(default_factory=dict)
    toolboxes: list[str] = Field(
        default_factory=list,
        max_length=16,
        description="Programs of the host to show inside, under `/opt/skerry` and on the PATH: `opencode`, "
        "`claude-code`. One that is not installed is installed now.",
    )


class UpdateSandbox(Request):
    labels: Labels | None = None
    limits: Limits | None = Field(
        None, description="Limits to change, also of one that runs; null takes one away, a tier replaces all."
    )
    sleep_after: str | float | None = None
    keep_alive: bool | None = None
    on_idle: Stage | None = None
    hibernate_after: str | float | None = None


class StartSandbox(Request):
    fresh: bool = Field(False, description="Should its files be missing, start over an empty disk.")


class SleepSandbox(Request):
    stage: Stage = "hibernate"
    grace: str | float | None = Field(
        None,
        description="Time that processes have between SIGTERM and SIGKILL: seconds, or '30s'; 0 for none. "
        "The server's setting unless given.",
    )
    ship: bool = Field(False, description="Whether its files go to a bucket, so that another server can wake it.")
    bucket: str | None = Field(None, description="Which one; the default one unless given.")


class WakeSandbox(Request):
    bucket: str | None = Field(None, description="Where to look for one that another server has shipped.")


class SetEnv(Request):
    env: dict[str, str | None] = Field(description="Variables to set; null unsets one.")


class SandboxInfo(Result):
    id: SandboxRef
    owner: str = "local"
    state: State
    image: str
    provider: str = Field("local", description="Where it lives, of the providers that the server has.")
    env: EnvVars = Field(default_factory=dict)
    labels: Labels = Field(default_factory=dict)
    limits: LimitsInfo = Field(default_factory=LimitsInfo)
    sleep_after: float | None = None
    keep_alive: bool = False
    on_idle: Stage = "hibernate"
    hibernate_after: float | None = None
    ephemeral: bool = False
    created_at: datetime
    started_at: datetime | None = None
    last_active_at: datetime | None = None
    starts: int = Field(0, description="How often the machine was started; processes live within one start.")
    egress: EgressMode | None = None
    toolboxes: list[str] = Field(default_factory=list, description="Programs of the host that are shown inside.")
    network: NetworkUsage = Field(default_factory=NetworkUsage)
    last_stop: str | None = Field(None, description="Why the machine last stopped, in a sentence.")
    active_operations: int = Field(0, description="Requests and commands in progress.")
    active_connections: int = Field(0, description="Previews and forwarded connections on which bytes move.")
    active_terminals: int = Field(0, description="Terminals on which something moved lately.")
    sleeps_in: float | None = Field(None, description="Seconds until it sleeps if nobody uses it from now on.")
    sleeps_at: datetime | None = None
    hibernates_in: float | None = Field(None, description="Seconds until one that is frozen hibernates.")
    hibernates_at: datetime | None = None
    made_from: str | None = Field(None, description="The snapshot it was made from.")
    forked_from: SandboxRef | None = Field(None, description="The sandbox it was forked from.")
    base: str | None = Field(None, description="The snapshot its files last were: taken of it, or rolled back to.")


class SandboxList(Result):
    sandboxes: list[SandboxInfo]
    next_cursor: str | None = None


class SandboxEvent(Result):
    """Something that happened to a sandbox: what, who made it happen, why, and how long it took."""

    id: int
    sandbox_id: SandboxRef
    kind: str
    message: str = Field(description="What happened and why, in a sentence.")
    at: datetime
    by: str | None = Field(None, description="Who made it happen: an API key, the idle timer, a preview, the server.")
    took: float | None = Field(None, description="Milliseconds.")
    from_state: State | None = None
    to_state: State | None = None
    details: dict[str, Any] = Field(default_factory=dict)


class EventList(Result):
    events: list[SandboxEvent]
    next_cursor: int | None = Field(None, description="What to give as `after` for those that follow.")


class Sample(Result):
    """What a sandbox used at one moment. What the host does not tell is null."""

    at: datetime
    cpu_seconds: float | None = Field(None, description="Processor time since it was last started.")
    cpu_percent: float | None = Field(None, description="Of one processor, since the sample before.")
    memory: int | None = Field(None, description="Bytes; without files that are only cached.")
    memory_peak: int | None = Field(None, description="The most since it was last started, with what was cached.")
    disk: int | None = Field(None, description="Bytes that it has written and that still exist.")
    processes: int | None = Field(None, description="Processes and threads.")
    network_in: int = 0
    network_out: int = 0


class Usage(Result):
    """What a sandbox has used in all its life, sleep and restarts included."""

    cpu_seconds: float = 0.0
    memory_byte_seconds: float = Field(0.0, description="Bytes of memory times the seconds they were held.")
    running_seconds: float = 0.0
    network_in: int = 0
    network_out: int = 0
    reached: dict[str, int] = Field(default_factory=dict, description="How often it ran into each limit.")


class SandboxMetrics(Result):
    sandbox_id: str
    state: State
    now: Sample | None = Field(None, description="Null for one that sleeps.")
    limits: LimitsInfo
    usage: Usage
    history: list[Sample] = Field(default_factory=list, description="Oldest first, one every ten seconds, for an hour.")


class Destroyed(Done):
    destroyed: bool = True
