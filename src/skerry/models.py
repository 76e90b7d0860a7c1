"""What crosses the wire: requests, results and events, shared by server and client.

Python names are snake_case, JSON names are camelCase. Requests refuse unknown fields; results tolerate them, so that an
older client can read a newer server.
"""

from __future__ import annotations

from datetime import UTC, date, datetime
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    SecretStr,
    StringConstraints,
    computed_field,
    field_serializer,
    field_validator,
    model_validator,
)
from pydantic.alias_generators import to_camel

from skerry.errors import CodeExecutionError
from skerry.limits import SIZES, TIERS, Limit, parse_size, parse_time


def now() -> datetime:
    return datetime.now(UTC)


MARK = 10


def shown_id(id: str) -> str:
    """The id of a sandbox as its owner knows it.

    Within a server the ids of all owners but the local one end in a mark of the owner (``demo-k3x7q2ab-``). No id that
    a person gives ends in a hyphen.
    """
    return id[:-MARK] if id.endswith("-") else id


SandboxRef = Annotated[str, PlainSerializer(shown_id, return_type=str, when_used="json")]
"""The id of a sandbox, which leaves the server without its owner's mark."""
BackupRef = SandboxRef
"""The id of a backup, which has the mark of its sandbox."""


class Request(BaseModel):
    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, extra="forbid", allow_inf_nan=False, defer_build=True
    )


class Result(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="ignore", defer_build=True)


# -- who asks ----------------------------------------------------------------------------------------------------------


class KeyScope(StrEnum):
    """How far an API key goes."""

    ADMIN = "admin"
    USE = "use"
    READ_ONLY = "read-only"
    SANDBOX = "sandbox"


# -- sandboxes ---------------------------------------------------------------------------------------------------------


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


_MEBIBYTE = 1 << 20
_OLDER = {"memoryMb": "memory", "memory_mb": "memory", "diskMb": "disk", "disk_mb": "disk", "cpus": "cpu"}


class Limits(Request):
    """What a sandbox may use: a tier, numbers, or a tier with numbers of its own. A tier can be given alone, as text.

    Sizes are bytes or text such as `512M` and `2G`.
    """

    tier: str | None = Field(None, description=f"One of {', '.join(TIERS)}.")
    memory: int | None = Field(None, ge=16 * _MEBIBYTE, le=1 << 50, description="Bytes of memory, without swap.")
    cpu: float | None = Field(None, ge=0.01, le=4096, description="Processors; 0.5 is half of one.")
    pids: int | None = Field(None, ge=16, le=1 << 22, description="Processes and threads at a time.")
    open_files: int | None = Field(None, ge=64, le=1 << 20, description="Files each process may have open.")
    disk: int | None = Field(None, ge=16 * _MEBIBYTE, le=1 << 50, description="Bytes of files of its own.")
    tmpfs: int | None = Field(None, ge=_MEBIBYTE, le=1 << 50, description="Bytes in /dev/shm; they are memory, too.")
    output: int | None = Field(None, ge=1024, le=1 << 30, description="Bytes of each stream of a command's result.")
    log: int | None = Field(None, ge=64 * 1024, le=1 << 30, description="Bytes kept of a background process's output.")
    lifetime: float | None = Field(None, gt=0, le=1e10, description="Seconds from its creation until it is stopped.")

    @model_validator(mode="before")
    @classmethod
    def _written(cls, given: object) -> object:
        if isinstance(given, str):
            given = {"tier": given}
        if not isinstance(given, dict):
            return given
        found = dict(given)
        for old, name in _OLDER.items():
            if old in found:
                value = found.pop(old)
                megabytes = old != "cpus" and isinstance(value, int)
                found.setdefault(name, value * _MEBIBYTE if megabytes else value)
        for name in SIZES:
            if name in found:
                found[name] = parse_size(found[name])
        if "lifetime" in found:
            found["lifetime"] = parse_time(found["lifetime"])
        return found

    @field_validator("tier")
    @classmethod
    def _known(cls, tier: str | None) -> str | None:
        if tier is not None and tier not in TIERS:
            raise ValueError(f"there is no tier {tier[:40]!r}; there are {', '.join(TIERS)}")
        return tier

    def resolved(self) -> dict[str, Any]:
        """The numbers of the tier, and over them those that were given, by their names in JSON."""
        own = self.model_dump(exclude_none=True, by_alias=True)
        return {**TIERS[self.tier], **own} if self.tier else own


class LimitsInfo(Result):
    """What a sandbox may use, the server's defaults included, and which of that this host holds it to."""

    tier: str | None = None
    memory: int | None = None
    cpu: float | None = None
    pids: int | None = None
    open_files: int | None = None
    disk: int | None = None
    tmpfs: int | None = None
    output: int | None = None
    log: int | None = None
    lifetime: float | None = None
    enforced: dict[str, bool] = Field(
        default_factory=dict, description="For each limit it has, whether the host holds it; `skerry doctor` says why."
    )
    pending: list[str] = Field(default_factory=list, description="Those that change with the next start.")


# -- the way out -------------------------------------------------------------------------------------------------------


EgressMode = Literal["none", "allowlist", "open"]


class EgressRule(Request):
    """Something that may be reached. As text: ``[GET,POST ]host[:443,8000-8100][/path]``."""

    host: str = Field(max_length=300, description="A name, *.name for everything below it, an address or a network.")
    ports: list[int | str] = Field(default_factory=list, description="443 or '8000-8100'; every port unless given.")
    methods: list[str] = Field(default_factory=list, description="Of HTTP; all unless given.")
    path: str | None = Field(None, description="What the path of an HTTP request has to begin with.")


class EgressPolicy(Request):
    """What a sandbox may reach outside."""

    mode: EgressMode
    allow: list[EgressRule | str] = Field(default_factory=list, max_length=1000)
    deny: list[str] = Field(default_factory=list, max_length=1000, description="Hosts that are refused all the same.")


class OAuthGrant(Request):
    """An access token that the server gets, and gets anew, with a refresh token."""

    token_url: str
    client_id: str
    client_secret_from: str | None = Field(None, description="env:NAME or file:PATH, of the server.")
    refresh_token_from: str | None = Field(None, description="env:NAME or file:PATH, of the server.")
    refresh_token: SecretStr | None = Field(None, description="Or the token itself; it is kept encrypted.")
    scope: str | None = None

    @field_serializer("refresh_token", when_used="json")
    def _reveal(self, value: SecretStr | None) -> str | None:
        return None if value is None else value.get_secret_value()


class Secret(Request):
    """A value that the proxy adds to a host's requests on their way out. It never exists inside the sandbox."""

    header: str = Field("Authorization", pattern=r"^[A-Za-z0-9-]{1,100}$")
    value: SecretStr | None = Field(None, description="The value itself; it is kept encrypted and never shown.")
    value_from: str | None = Field(None, description="env:NAME or file:PATH, of the server, or 'oauth'.")
    scheme: str = Field("{value}", max_length=200, description="What the header holds, such as 'Bearer {value}'.")
    username: str | None = Field(None, max_length=200, description="For HTTP's Basic scheme, as git speaks it.")
    placeholder: str | None = Field(
        None, max_length=300, description="A variable for programs that insist on one: NAME, or NAME=what it holds."
    )
    insecure: bool = Field(False, description="Add it without TLS too, where anybody on the way can read it.")
    oauth: OAuthGrant | None = None

    @field_serializer("value", when_used="json")
    def _reveal(self, value: SecretStr | None) -> str | None:
        return None if value is None else value.get_secret_value()


Secrets = dict[str, Secret]
"""By the host they are for, with a port where it is not 443."""


class SetEgress(Request):
    mode: EgressMode | None = Field(None, description="As it is unless given; 'allowlist' if only rules are.")
    allow: list[EgressRule | str] | None = Field(None, max_length=1000)
    deny: list[str] | None = Field(None, max_length=1000, description="All of them; those that there are stay.")
    secrets: Secrets | None = Field(None, description="All of them; those that there are stay unless given.")


class SecretInfo(Result):
    header: str
    value_from: str
    placeholder: str | None = None
    insecure: bool = False


class NetworkUsage(Result):
    """What has gone through the sandbox's door, in bytes of payload and TLS, since it was made."""

    bytes_in: int = 0
    bytes_out: int = 0
    connections: int = 0
    refused: int = 0


class EgressInfo(Result):
    mode: EgressMode
    allow: list[EgressRule | str] = Field(default_factory=list)
    deny: list[str] = Field(default_factory=list)
    secrets: dict[str, SecretInfo] = Field(default_factory=dict)
    inherited: bool = Field(False, description="Whether this is the server's own policy, for want of another.")
    transparent: bool = Field(False, description="Whether programs that know no proxy get out as well.")
    enforced: bool = Field(True, description="Whether it is held to that; not where others run the sandboxes.")
    network: NetworkUsage = Field(default_factory=NetworkUsage)


EnvVars = dict[str, str]
Labels = dict[str, str]


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


class Done(Result):
    """The answer of operations that have nothing to say but that they happened."""

    ok: bool = True
    sandbox_id: SandboxRef | None = None


class Destroyed(Done):
    destroyed: bool = True


# -- commands and sessions ---------------------------------------------------------------------------------------------

Encoding = Literal["utf-8", "base64"]


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


# -- terminals ---------------------------------------------------------------------------------------------------------


class TerminalInfo(Result):
    id: str
    session: str
    """The session whose directory and variables it began with."""
    shell: str
    cols: int
    rows: int
    viewers: int
    created_at: datetime
    silent_for: float
    """Seconds since something was typed or shown."""


class TerminalList(Result):
    terminals: list[TerminalInfo]


class TerminalTicket(Result):
    ticket: str
    """Opens one terminal of the sandbox, once, as `?ticket=`."""
    expires_in: int


# -- background processes ----------------------------------------------------------------------------------------------


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


# -- exposed ports -----------------------------------------------------------------------------------------------------


ANSWERED_BY = "Skerry-Answered-By"
"""The header that tells an answer of a server inside, fetched through the API, from one of the API's own."""


class ExposePort(Request):
    port: int = Field(
        description="Any port that a process inside listens on, from 1 to 65535.",
        json_schema_extra={"minimum": 1, "maximum": 65535},
    )
    name: str | None = Field(None, max_length=200, description="What it is called in lists.")
    token: str | None = Field(None, description="1 to 63 of a-z, 0-9 and _. Random unless given.")
    hostname: str | None = Field(
        None, description="The domain whose subdomains reach the server, in place of the server's own setting."
    )
    private: bool = Field(False, description="Also wants an API key or a signed link.")
    wake_on_request: bool = Field(False, description="A request wakes the sandbox when it sleeps.")


class ExposedPort(Result):
    """A port that is reachable from outside, and where."""

    port: int
    name: str | None = None
    url: str | None = Field(None, description="By subdomain. Null where there is none; `note` says why.")
    path_url: str = Field(description="By path, which needs no wildcard DNS.")
    token: str
    private: bool = False
    wake_on_request: bool = False
    exposed_at: datetime
    note: str | None = None


class ExposedPortList(Result):
    ports: list[ExposedPort]


class CreateLink(Request):
    expires_in: float = Field(3600, gt=0, le=366 * 86400, description="Seconds.")


class PreviewLink(Result):
    """A link that opens a private preview until it expires, without a key."""

    url: str | None = Field(None, description="By subdomain; null where there is none.")
    path_url: str
    expires_at: datetime


# -- code --------------------------------------------------------------------------------------------------------------

Language = Literal["python", "javascript", "typescript"]


class CreateContext(Request):
    id: str | None = None
    language: str = Field("python", description="python, javascript or typescript; python3, js, node and ts will do.")
    cwd: str = "/workspace"
    env: EnvVars = Field(default_factory=dict, validation_alias=AliasChoices("env", "envVars", "env_vars"))
    timeout: float | None = Field(
        None,
        gt=0,
        description="Milliseconds each run may take that has no timeout of its own.",
        validation_alias=AliasChoices("timeout", "timeoutMs", "timeout_ms"),
    )


class CodeContext(Result):
    """An interpreter that keeps its variables from one run to the next."""

    id: str
    language: Language
    cwd: str
    status: Literal["idle", "running", "ended"] = Field(
        "idle", description="`ended`: its process died; the next run gets a fresh one and says so."
    )
    execution_count: int = 0
    timeout: float | None = None
    default: bool = Field(False, description="Whether it is the one for code that names no context.")
    pid: int | None = Field(None, description="Its process, as the sandbox numbers it.")
    created_at: datetime = Field(default_factory=now)
    last_used: datetime = Field(default_factory=now)


class ContextList(Result):
    contexts: list[CodeContext]


class Interrupted(Done):
    interrupted: bool = Field(description="Whether anything was running.")


class WarmInterpreters(Request):
    language: str = "python"
    count: int = Field(1, ge=1, le=64, description="How many contexts to have ready.")
    preload: bool = Field(True, description="Whether they have pandas, numpy and matplotlib imported (Python only).")


class RunCode(Request):
    code: str
    context: str | None = Field(
        None,
        description="The context to run in; without one, the default context of the language.",
        validation_alias=AliasChoices("context", "contextId", "context_id"),
    )
    language: str | None = Field(None, description="python unless said otherwise, or what the context speaks.")
    env: dict[str, str | None] = Field(
        default_factory=dict,
        description="Variables for this run alone; null unsets one.",
        validation_alias=AliasChoices("env", "envVars", "env_vars"),
    )
    timeout: float | None = Field(
        None, gt=0, description="Milliseconds.", validation_alias=AliasChoices("timeout", "timeoutMs", "timeout_ms")
    )


class CodeResult(Result):
    """One value or picture, in every format it can be shown in; png, jpeg and pdf are base64."""

    text: str | None = None
    html: str | None = None
    markdown: str | None = None
    latex: str | None = None
    svg: str | None = None
    png: str | None = None
    jpeg: str | None = None
    pdf: str | None = None
    json_: Any = Field(None, alias="json")
    javascript: str | None = None
    data: dict[str, Any] | None = Field(None, description="A table: `schema.fields`, `records`, `rows`.")
    chart: dict[str, Any] | None = Field(None, description="What a figure shows: type, title, axes, series.")
    extra: dict[str, Any] = Field(default_factory=dict, description="Formats without a name here, by MIME type.")
    is_main_result: bool = Field(False, description="The value of the last expression, not something displayed.")
    truncated: dict[str, int] = Field(
        default_factory=dict, description="Formats that were too large, with their full size; only text is cut."
    )

    def formats(self) -> list[str]:
        """The names of the formats this result has."""
        named = {field.alias or name: getattr(self, name) for name, field in type(self).model_fields.items()}
        return [name for name in FORMATS if named[name] is not None] + list(self.extra)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        """How a notebook shows it: as it would have looked in a cell of its own."""
        bundle = {mime: getattr(self, "json_" if name == "json" else name) for name, mime in FORMATS.items()}
        return {**{mime: value for mime, value in bundle.items() if mime and value is not None}, **self.extra}, {}


FORMATS: dict[str, str | None] = {
    "text": "text/plain",
    "html": "text/html",
    "markdown": "text/markdown",
    "latex": "text/latex",
    "svg": "image/svg+xml",
    "png": "image/png",
    "jpeg": "image/jpeg",
    "pdf": "application/pdf",
    "json": "application/json",
    "javascript": "application/javascript",
    "data": None,
    "chart": None,
}
"""Every named format of a result and its MIME type; what has none is ours."""


class CodeError(Result):
    """Why the code failed: an exception it raised, or the end of its context."""

    name: str
    message: str
    traceback: list[str] = Field(default_factory=list)
    line_number: int | None = None
    limit: Limit | None = Field(None, description="The limit of the sandbox that it ran into.")

    @computed_field  # type: ignore[prop-decorator]
    @property
    def value(self) -> str:
        """The message, as older clients call it."""
        return self.message


class CodeLogs(Result):
    stdout: list[str] = Field(default_factory=list)
    stderr: list[str] = Field(default_factory=list)
    stdout_truncated: int = Field(0, description="Bytes that were left out because there were too many.")
    stderr_truncated: int = 0


class Execution(Result):
    """What running a piece of code came to."""

    code: str = ""
    context_id: str
    language: Language
    logs: CodeLogs = Field(default_factory=CodeLogs)
    results: list[CodeResult] = Field(default_factory=list)
    error: CodeError | None = None
    execution_count: int | None = None
    notices: list[str] = Field(
        default_factory=list, description="What a caller should know: that earlier state is gone, that output was cut."
    )
    timed_out: bool = False
    duration: float = Field(0, description="Milliseconds.")

    @property
    def success(self) -> bool:
        return self.error is None

    @property
    def stdout(self) -> str:
        return "".join(self.logs.stdout)

    @property
    def stderr(self) -> str:
        return "".join(self.logs.stderr)

    @property
    def text(self) -> str | None:
        """The last expression as text."""
        return next((result.text for result in self.results if result.is_main_result), None)

    def raise_for_error(self) -> Execution:
        """Itself, or ``CodeExecutionError`` if the code failed."""
        if self.error is not None:
            raise CodeExecutionError(
                f"{self.error.name}: {self.error.message}",
                details={"contextId": self.context_id, **self.error.model_dump(by_alias=True)},
            )
        return self


class CodeEvent(Result):
    """One event of running code: start, then stdout, stderr, result, notice and error as they come, then complete."""

    type: Literal["start", "stdout", "stderr", "result", "notice", "error", "complete"]
    timestamp: datetime = Field(default_factory=now)
    text: str | None = None
    result: CodeResult | None = None
    error: CodeError | None = None
    context_id: str | None = None
    language: Language | None = None
    execution_count: int | None = None
    timed_out: bool | None = None
    duration: float | None = None


# -- files -------------------------------------------------------------------------------------------------------------

FileType = Literal["file", "directory", "symlink", "other"]


class Permissions(Result):
    readable: bool
    writable: bool
    executable: bool


class FileInfo(Result):
    name: str
    absolute_path: str
    relative_path: str
    type: FileType
    size: int
    modified_at: datetime
    mode: str = Field(description="As ls writes it: rw-r--r--.")
    permissions: Permissions
    target: str | None = Field(None, description="Where a symbolic link points.")
    raw_name: str | None = Field(None, description="The name's bytes in base64, when they are not UTF-8.")


class FileList(Result):
    ok: bool = True
    sandbox_id: SandboxRef | None = None
    path: str
    files: list[FileInfo]
    count: int


class FileContent(Result):
    path: str
    content: str
    encoding: Encoding
    is_binary: bool
    mime_type: str
    size: int
    offset: int = 0


class ReadFileResult(Result):
    ok: bool = True
    sandbox_id: SandboxRef
    path: str
    file: FileContent


class WriteFileResult(Result):
    ok: bool = True
    sandbox_id: SandboxRef | None = None
    path: str
    bytes: int


class FileEvent(Result):
    """One event of a streamed file: metadata, chunk (text or base64), complete or error."""

    type: Literal["metadata", "chunk", "complete", "error"]
    mime_type: str | None = None
    size: int | None = None
    is_binary: bool | None = None
    encoding: Encoding | None = None
    data: str | None = None
    bytes_read: int | None = None
    error: str | None = None


class PathResult(Done):
    path: str
    new_path: str | None = None


class ExistsResult(Done):
    path: str
    exists: bool


class StatResult(Done):
    path: str
    file: FileInfo


class Mkdir(Request):
    path: str
    recursive: bool = False
    mode: int | None = Field(None, ge=0, le=0o7777)
    force: bool = False


class RenameFile(Request):
    old_path: str
    new_path: str
    force: bool = False


class MoveFile(Request):
    source_path: str
    destination_path: str
    force: bool = False


class CopyFile(Request):
    source_path: str
    destination_path: str
    recursive: bool = False
    force: bool = False


class Chmod(Request):
    path: str
    mode: int = Field(ge=0, le=0o7777)
    recursive: bool = False
    force: bool = False


class ExtractResult(Done):
    path: str
    files: int
    bytes: int


class WatchRequest(Request):
    path: str = "/workspace"
    recursive: bool = True
    include: list[str] | None = None
    exclude: list[str] | None = Field(None, description="Default: .git, node_modules, .DS_Store.")


class CheckChanges(WatchRequest):
    since: str | None = None


class ChangesResult(Result):
    status: Literal["unchanged", "changed", "resync"]
    version: str
    reason: Literal["expired", "restarted"] | None = None
    changed: list[str] = Field(default_factory=list, description="Paths that changed since `since`, oldest first.")
    timestamp: datetime = Field(default_factory=now)


class WatchEvent(Result):
    type: Literal["watching", "event", "stopped", "error"]
    path: str | None = None
    watch_id: str | None = None
    event_type: Literal["create", "modify", "delete", "move_from", "move_to", "attrib"] | None = None
    is_directory: bool | None = None
    timestamp: datetime = Field(default_factory=now)
    reason: str | None = None
    error: str | None = None


# -- git ---------------------------------------------------------------------------------------------------------------


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


# -- bootstrap ---------------------------------------------------------------------------------------------------------


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


# -- images ------------------------------------------------------------------------------------------------------------


class ImageInfo(Result):
    name: str
    size: int = Field(description="Bytes on disk; 0 for the host image, which takes none.")
    created_at: datetime | None = None
    source: str | None = None
    sandboxes: int = 0


class ImageList(Result):
    images: list[ImageInfo]


# -- buckets -----------------------------------------------------------------------------------------------------------


class BucketCredentials(Request):
    access_key_id: str = Field(min_length=1, max_length=1000)
    secret_access_key: SecretStr = Field(min_length=1, max_length=1000, description="Kept encrypted, never shown.")

    @field_serializer("secret_access_key", when_used="json")
    def _sent(self, value: SecretStr) -> str:
        return value.get_secret_value()


class MountBucket(Request):
    bucket: str | None = Field(None, description="One that is configured; without it, the one of R2_ENDPOINT & co.")
    endpoint: str | None = Field(
        None, max_length=500, description="Where a bucket of one's own is, if it is not one that is configured."
    )
    credentials: BucketCredentials | None = Field(None, description="Of a bucket of one's own.")
    mount_path: str = Field("/persist", validation_alias=AliasChoices("mountPath", "path", "mount_path"))
    prefix: str | None = Field(None, description="What of the bucket is shown. Default: /projects/<id>/.")
    local_bucket: bool = Field(False, description="The server's own directory, for which no credentials are needed.")
    read_only: bool = False


class UnmountBucket(Request):
    mount_path: str = Field("/persist", validation_alias=AliasChoices("mountPath", "path", "mount_path"))


class MountInfo(Result):
    mount_path: str
    prefix: str
    mode: Literal["localBucket", "remoteR2"]
    bucket: str
    endpoint: str | None = Field(None, description="Where a bucket is that came with the request.")
    read_only: bool = False
    state: Literal["mounted", "asleep", "failed"]
    """``asleep`` with its sandbox; ``failed``: everything in it is an error."""
    error: str | None = Field(None, description="What the bucket last failed with.")
    mounted_at: datetime


class MountResult(Done):
    mount: MountInfo


class MountList(Done):
    mounts: list[MountInfo]


class BucketInfo(Result):
    name: str
    kind: Literal["directory", "s3", "gcs"]
    location: str = Field(description="Where it is; never with credentials.")
    default: bool = False


class BucketList(Result):
    buckets: list[BucketInfo]


# -- backups -----------------------------------------------------------------------------------------------------------


class BackupRequest(Request):
    dir: str = Field("/workspace", description="What to ship; `/` is the whole machine.")
    name: str | None = Field(None, max_length=255)
    ttl: str | float | None = Field(None, description="How long it is kept: seconds, or a text like '12h' or '30d'.")
    gitignore: bool = Field(
        False,
        validation_alias=AliasChoices("useGitignore", "gitignore"),
        serialization_alias="useGitignore",
        description="Leave out what git would ignore.",
    )
    excludes: list[str] = Field(default_factory=list, max_length=1000, description="Patterns, as in .gitignore.")
    compression: Literal["zstd", "none"] = "zstd"
    level: int = Field(2, ge=1, le=19, description="How hard zstd tries.")
    bucket: str | None = Field(None, description="One of `GET /v1/buckets`; the default one unless given.")


class BackupInfo(Result):
    """The handle of a backup: all that is needed to restore it."""

    id: BackupRef
    dir: str
    bucket: str
    name: str | None = None
    sandbox_id: SandboxRef | None = None
    created_at: datetime
    expires_at: datetime | None = None
    size: int = Field(description="Bytes in the bucket.")
    bytes: int = Field(description="Bytes of the files, holes not counted.")
    files: int
    compression: Literal["zstd", "none"] = "zstd"
    encrypted: bool = False
    left_out: dict[str, int] = Field(
        default_factory=dict,
        description="How many of each: excluded, sockets, devices, mounts, and those that vanished, changed or shrank "
        "while they were read.",
    )
    examples: dict[str, list[str]] = Field(default_factory=dict, description="Some of them by name.")


class BackupHandle(Result):
    """As much of a handle as a restore needs."""

    id: str = Field(max_length=100)
    bucket: str | None = None


class RestoreRequest(Request):
    backup: str | BackupHandle = Field(description="A handle, or its id.")
    dir: str | None = Field(None, description="Where to; where it came from unless given.")
    bucket: str | None = None


class BackupResult(Result):
    ok: bool = True
    sandbox_id: SandboxRef = ""
    backup: BackupInfo


class RestoreResult(Result):
    ok: bool = True
    restored: bool = True
    sandbox_id: SandboxRef = ""
    backup: BackupRef
    dir: str
    files: int
    bytes: int
    left_out: dict[str, int] = Field(
        default_factory=dict, description="How many owners or extended attributes this machine could not set."
    )


class BackupList(Result):
    backups: list[BackupInfo]
    unreachable: list[str] = Field(default_factory=list, description="Buckets that did not answer.")


class BackupEvent(Result):
    type: Literal["start", "progress", "complete", "error"]
    id: BackupRef | None = None
    phase: Literal["packing", "unpacking"] | None = None
    bytes: int | None = None
    files: int | None = None
    total: int | None = Field(None, description="Bytes there will be, where that is known.")
    backup: BackupInfo | None = None
    restored: RestoreResult | None = None
    error: str | None = None
    code: str | None = Field(None, description="The code of the error, as errors have it elsewhere.")
    hint: str | None = None
    details: dict[str, Any] | None = None
    timestamp: datetime = Field(default_factory=now)


# -- workspaces in buckets ---------------------------------------------------------------------------------------------


class SyncRequest(Request):
    direction: Literal["push", "pull"] = Field("push", description="`push` into the bucket, `pull` out of it.")
    dir: str = "/workspace"
    excludes: list[str] = Field(default_factory=list, max_length=1000, description="Patterns, as in .gitignore.")
    everything: bool = Field(
        False, description="Also what is left out otherwise: node_modules, .git, build and others."
    )
    bucket: str | None = Field(None, description="One of `GET /v1/buckets`; the default one unless given.")
    dry_run: bool = Field(False, description="Only say what would be pushed.")


class SyncResult(Result):
    ok: bool = Field(description="Whether there were no errors.")
    sandbox_id: SandboxRef
    direction: Literal["push", "pull"]
    bucket: str
    synced_files: int = Field(description="Files that were moved.")
    skipped_files: int = Field(description="Files that were the same on both sides.")
    deleted_files: int = 0
    excluded_files: int = 0
    total_size: int = Field(description="Bytes of the stored workspace.")
    transferred: int = Field(description="Bytes that were moved.")
    errors: list[str] = Field(default_factory=list, description="Files that could not be moved, and why.")
    workspace_synced_at: datetime
    duration: float = Field(description="Milliseconds.")


class StoredWorkspace(Result):
    sandbox_id: SandboxRef
    owner: str
    bucket: str
    files: int
    size: int
    workspace_synced_at: datetime


class StoredWorkspaces(Result):
    workspaces: list[StoredWorkspace]
    owners: dict[str, int] = Field(description="Bytes that each owner has stored.")


class Deleted(Result):
    ok: bool = True
    files: int = Field(description="How many there were.")


class Health(Result):
    ok: bool = True
    service: str = "skerry"
    version: str
    provider: str
    isolation: dict[str, Any] = Field(default_factory=dict)
    bindings: dict[str, bool] = Field(default_factory=dict)
    snapshots: str = Field("none", description="`instant`, `copy` where they take as long as one, or `none`.")


# -- snapshots ---------------------------------------------------------------------------------------------------------


class CreateSnapshot(Request):
    name: str | None = Field(None, description="A name to find it by, which no other snapshot has.")
    labels: Labels = Field(default_factory=dict)


class SnapshotInfo(Result):
    id: str
    name: str | None = None
    sandbox_id: SandboxRef = Field(description="The sandbox it was taken of, which may be gone.")
    image: str
    parent: str | None = Field(None, description="The snapshot that sandbox was at before.")
    labels: Labels = Field(default_factory=dict)
    created_at: datetime
    sandboxes: list[SandboxRef] = Field(default_factory=list, description="The sandboxes that were made from it.")


class SnapshotList(Result):
    snapshots: list[SnapshotInfo]


class ForkSandbox(Request):
    count: int = Field(1, ge=1, le=100, description="How many; with `ids`, as many as those.")
    ids: list[str] | None = Field(None, min_length=1, max_length=100, description="The ids of the new sandboxes.")


class ForkResult(Result):
    ok: bool = True
    sandbox_id: SandboxRef
    sandboxes: list[SandboxInfo]


class RollbackSandbox(Request):
    snapshot: str = Field(description="The id or name of the snapshot.")


class ChangeKind(StrEnum):
    ADDED = "added"
    CHANGED = "changed"
    DELETED = "deleted"


class LayerChange(Result):
    path: str
    change: ChangeKind
    type: FileType = Field(description="What it is now; of a deleted one, what it was.")
    size: int = 0
    raw_path: str | None = Field(None, description="The path's bytes in base64, when they are not UTF-8.")


class Diff(Result):
    changes: list[LayerChange]
    truncated: bool = Field(False, description="There are more changes than a list holds; the tar has all of them.")


# -- keys, owners, users -----------------------------------------------------------------------------------------------

OwnerName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._@+-]{0,99}$", description="Whose it is.")]


class CreateKey(Request):
    name: str = Field("", max_length=100, description="What it is for, in your words.")
    owner: OwnerName | None = Field(None, description="Whose it is; whoever asks, unless given.")
    scope: KeyScope = KeyScope.USE
    sandbox: str | None = Field(None, description="With scope `sandbox`: the only one it opens.")
    expires_in: str | float | None = Field(
        None, description="Seconds, or a text like '12h' or '30d'; never unless given."
    )
    rate: float | None = Field(None, gt=0, le=1e6, description="Requests a second; the server's setting unless given.")


class KeyInfo(Result):
    id: str
    name: str = ""
    owner: str
    scope: KeyScope
    sandbox: SandboxRef | None = None
    rate: float | None = None
    hint: str = Field("", description="How the key begins, to tell it from others.")
    created_at: datetime
    expires_at: datetime | None = None
    revoked_at: datetime | None = None
    last_used_at: datetime | None = None


class NewKey(KeyInfo):
    key: str = Field(repr=False, description="The key itself. It is shown once: the server keeps only a digest.")


class KeyList(Result):
    keys: list[KeyInfo]


class Quotas(Request):
    """What an owner may have. What is not said is the server's setting; what nobody says has no bound."""

    sandboxes: int | None = Field(None, ge=0, description="Sandboxes there are, asleep or not.")
    running: int | None = Field(None, ge=0, description="Sandboxes that run, frozen ones included.")
    memory_mb: int | None = Field(None, ge=0, description="Memory that those which run may have together.")
    cpu_seconds_day: float | None = Field(None, ge=0, description="Seconds of CPU in a day (UTC).")
    cpu_seconds_month: float | None = Field(None, ge=0, description="Seconds of CPU in a month (UTC).")
    disk_mb: int | None = Field(None, ge=0, description="Disk that all of them may have together.")
    creates_per_minute: int | None = Field(None, ge=0, description="Sandboxes that are made in any 60 seconds.")


class UpdateOwner(Request):
    quotas: Quotas = Field(default_factory=Quotas)


class OwnerInfo(Result):
    name: str
    created_at: datetime | None = None
    quotas: dict[str, int | float] = Field(
        default_factory=dict, description="What it may have: its own bounds, and the server's."
    )
    sandboxes: int = 0
    running: int = 0
    memory_mb: int = Field(0, description="What its running sandboxes may have together.")
    disk_mb: int = Field(0, description="What its sandboxes may have on disk, or have, together.")


class OwnerList(Result):
    owners: list[OwnerInfo]


class UsageDay(Result):
    day: date
    cpu_seconds: float = 0.0
    memory_byte_seconds: float = 0.0
    disk_byte_seconds: float = 0.0
    egress_bytes: int = 0
    cost: float = Field(0.0, description="In the server's currency, at the prices it has now.")


class UsageReport(Result):
    owner: str
    since: date
    until: date
    days: list[UsageDay]
    total: UsageDay
    currency: str
    prices: dict[str, float]


class SignIn(Request):
    email: str = Field(max_length=320)
    password: SecretStr = Field(max_length=1024)


class ChangePassword(Request):
    old: SecretStr = Field(max_length=1024)
    new: SecretStr = Field(max_length=1024)


class Me(Result):
    """Who asks."""

    owner: str
    scope: KeyScope
    name: str = ""
    email: str | None = None
    sandbox: SandboxRef | None = None
    csrf: str | None = Field(
        None, description="With a session: the value of the header `X-Skerry-CSRF` of requests that change something."
    )


class Person(Result):
    """A user, as AgentPod's programs read it."""

    id: str
    email: str
    name: str
    role: str = "user"


class SignedIn(Result):
    user: Person
    redirect: bool = False


class SignedOut(Result):
    success: bool = True


class CreateUser(Request):
    email: str = Field(max_length=320)
    password: SecretStr = Field(max_length=1024)
    owner: OwnerName | None = Field(None, description="Whose sandboxes it sees; its own, by its email, unless given.")
    role: Literal["admin", "user"] = "user"


class UserInfo(Result):
    email: str
    owner: str
    role: Literal["admin", "user"]
    created_at: datetime
    signed_in_at: datetime | None = None


class UserList(Result):
    users: list[UserInfo]


# -- the audit log -----------------------------------------------------------------------------------------------------

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


# -- webhooks ----------------------------------------------------------------------------------------------------------

EventPattern = Annotated[
    str, StringConstraints(pattern=r"^(\*|(sandbox|session|workspace|workflow|webhook)\.(\*|[a-z][a-z_.]{0,60}))$")
]
DeliveryState = Literal["pending", "delivered", "dead"]


class CreateWebhook(Request):
    url: str = Field(min_length=1, max_length=2000, description="Where events are sent, by HTTP or HTTPS.")
    events: list[EventPattern] = Field(
        default_factory=lambda: ["*"], min_length=1, max_length=50, description="`*`, `sandbox.*`, `sandbox.created`, …"
    )
    description: str = Field("", max_length=200)
    enabled: bool = True
    everyone: bool = Field(False, description="Events of everybody's sandboxes, not only of your own; for admins.")


class UpdateWebhook(Request):
    url: str | None = Field(None, min_length=1, max_length=2000)
    events: list[EventPattern] | None = Field(None, min_length=1, max_length=50)
    description: str | None = Field(None, max_length=200)
    enabled: bool | None = None
    rotate_secret: bool = Field(False, description="A new secret; the old one goes on signing beside it for a day.")


class WebhookInfo(Result):
    id: str
    url: str = Field(repr=False)
    events: list[str]
    description: str = ""
    enabled: bool
    created_at: datetime
    owner: str | None = Field(None, description="Of whose sandboxes it is told; null for everybody's.")
    secret: str | None = Field(None, repr=False, description="Shown once: when it was made.")
    previous_secret_until: datetime | None = Field(None, description="Until then the one before signs, too.")


class WebhookList(Result):
    webhooks: list[WebhookInfo]


class WebhookDelivery(Result):
    """An event on its way to a webhook."""

    id: str = Field(description="What the receiver knows it by, however often it is sent.")
    webhook_id: str
    event: str
    sandbox_id: SandboxRef | None = None
    state: DeliveryState
    attempts: int
    created_at: datetime
    next_at: datetime | None = Field(None, description="When it is tried next.")
    delivered_at: datetime | None = None
    status: int | None = Field(None, description="What the receiver answered last.")
    error: str | None = Field(None, description="Why the last attempt failed.")


class DeliveryList(Result):
    deliveries: list[WebhookDelivery] = Field(description="The latest first.")
    next_cursor: int | None = Field(None, description="What to give as `cursor` for those before.")


class WebhookEvent(Result):
    """What a webhook's receiver gets."""

    id: str = Field(description="The same if it is sent again: do what it asks for once.")
    event: str
    timestamp: datetime
    data: dict[str, Any]


# -- workers in the cloud ----------------------------------------------------------------------------------------------


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
