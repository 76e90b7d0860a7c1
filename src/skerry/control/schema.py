"""The tables, as the code reads and writes them. ``migrations.py`` is what makes them in a database."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Date,
    DateTime,
    Dialect,
    Enum,
    Float,
    ForeignKey,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
)
from sqlalchemy.dialects.postgresql import JSONB

from skerry.models import KeyScope, ProcessStatus, State


class SnapshotState(StrEnum):
    """A server that finds one it did not leave ready finishes what was begun: both others mean that it goes."""

    MAKING = "making"
    READY = "ready"
    DELETING = "deleting"


class UtcDateTime(TypeDecorator[datetime]):
    """An aware datetime in UTC, both ways. SQLite has no time zones, so there it is kept as UTC without one."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"A datetime without a time zone cannot be stored: {value.isoformat()}.")
        value = value.astimezone(UTC)
        return value.replace(tzinfo=None) if dialect.name == "sqlite" else value

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


def _words(kind: type[StrEnum]) -> Enum:
    return Enum(kind, native_enum=False, create_constraint=False, values_callable=lambda kind: [w.value for w in kind])


metadata = MetaData()

sandboxes = Table(
    "sandboxes",
    metadata,
    Column("id", String, primary_key=True),
    Column("node", String, nullable=False, index=True),
    Column("state", _words(State), nullable=False),
    Column("image", String, nullable=False, index=True),
    Column("env", JSON, nullable=False),
    Column("labels", JSON().with_variant(JSONB(), "postgresql"), nullable=False),
    Column("limits", JSON, nullable=False),
    Column("sleep_after", Float),
    Column("keep_alive", Boolean, nullable=False),
    Column("on_idle", String, nullable=False),
    Column("hibernate_after", Float),
    Column("ephemeral", Boolean, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    Column("started_at", UtcDateTime),
    Column("last_active_at", UtcDateTime),
    Column("starts", Integer, nullable=False),
    Column("last_stop", Text),
    Column("made_from", String, index=True),
    Column("forked_from", String),
    Column("base", String),
    Column("shipped", JSON(none_as_null=True)),
    Column("owner", String, nullable=False, index=True),
    Column("usage", JSON(none_as_null=True)),
    Column("egress", JSON(none_as_null=True)),
    Column("secrets", JSON, nullable=False),
    Column("toolboxes", JSON, nullable=False),
)

snapshots = Table(
    "snapshots",
    metadata,
    Column("id", String, primary_key=True),
    Column("node", String, nullable=False, index=True),
    Column("name", String, unique=True),
    Column("state", _words(SnapshotState), nullable=False),
    Column("sandbox_id", String, nullable=False, index=True),
    Column("image", String, nullable=False, index=True),
    Column("parent", String),
    Column("labels", JSON, nullable=False),
    Column("settings", JSON, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    Column("owner", String, nullable=False, index=True),
)

# No foreign key: what happened to a sandbox can be read for a while after it was destroyed.
events = Table(
    "events",
    metadata,
    Column("id", BigInteger().with_variant(Integer(), "sqlite"), primary_key=True),
    Column("sandbox_id", String, nullable=False),
    Column("kind", String, nullable=False),
    Column("message", Text, nullable=False),
    Column("at", UtcDateTime, nullable=False),
    Column("by", String),
    Column("took", Float),
    Column("from_state", _words(State)),
    Column("to_state", _words(State)),
    Column("details", JSON, nullable=False),
)

processes = Table(
    "processes",
    metadata,
    Column("sandbox_id", ForeignKey("sandboxes.id", ondelete="CASCADE"), primary_key=True),
    Column("id", String, primary_key=True),
    Column("starts", Integer, nullable=False),
    Column("pid", Integer),
    Column("command", Text, nullable=False),
    Column("status", _words(ProcessStatus), nullable=False),
    Column("start_time", UtcDateTime, nullable=False),
    Column("end_time", UtcDateTime),
    Column("exit_code", Integer),
    Column("session_id", String),
    Column("error", Text),
    Column("limit", String),
)

contexts = Table(
    "contexts",
    metadata,
    Column("sandbox_id", ForeignKey("sandboxes.id", ondelete="CASCADE"), primary_key=True),
    Column("id", String, primary_key=True),
    Column("language", String, nullable=False),
    Column("cwd", Text, nullable=False),
    Column("env", JSON, nullable=False),
    Column("timeout", Float),
    Column("default", Boolean, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
)

exposures = Table(
    "exposures",
    metadata,
    Column("sandbox_id", ForeignKey("sandboxes.id", ondelete="CASCADE"), primary_key=True),
    Column("port", Integer, primary_key=True, autoincrement=False),
    Column("token", String, nullable=False),
    Column("name", Text),
    Column("hostname", String),
    Column("private", Boolean, nullable=False),
    Column("wake_on_request", Boolean, nullable=False),
    Column("exposed_at", UtcDateTime, nullable=False),
)

# No foreign key: what is stored outlives the sandbox.
workspaces = Table(
    "workspaces",
    metadata,
    Column("sandbox_id", String, primary_key=True),
    Column("owner", String, nullable=False),
    Column("bucket", String, nullable=False),
    Column("files", BigInteger, nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("synced_at", UtcDateTime, nullable=False),
)

mounts = Table(
    "mounts",
    metadata,
    Column("sandbox_id", ForeignKey("sandboxes.id", ondelete="CASCADE"), primary_key=True),
    Column("path", String, primary_key=True),
    Column("bucket", String, nullable=False),
    Column("prefix", Text, nullable=False),
    Column("read_only", Boolean, nullable=False),
    Column("mounted_at", UtcDateTime, nullable=False),
    Column("own", JSON),
)

owners = Table(
    "owners",
    metadata,
    Column("name", String, primary_key=True),
    Column("mark", String, nullable=False, unique=True),
    Column("quotas", JSON, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
)

keys = Table(
    "keys",
    metadata,
    Column("id", String, primary_key=True),
    Column("digest", String, nullable=False, unique=True),
    Column("hint", String, nullable=False),
    Column("name", Text, nullable=False),
    Column("owner", ForeignKey("owners.name"), nullable=False, index=True),
    Column("scope", _words(KeyScope), nullable=False),
    Column("sandbox", String),
    Column("rate", Float),
    Column("created_at", UtcDateTime, nullable=False),
    Column("expires_at", UtcDateTime),
    Column("revoked_at", UtcDateTime),
    Column("last_used_at", UtcDateTime),
)

users = Table(
    "users",
    metadata,
    Column("email", String, primary_key=True),
    Column("owner", ForeignKey("owners.name"), nullable=False),
    Column("role", String, nullable=False),
    Column("password", String, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    Column("signed_in_at", UtcDateTime),
)

sign_ins = Table(
    "sign_ins",
    metadata,
    Column("digest", String, primary_key=True),
    Column("email", ForeignKey("users.email", ondelete="CASCADE"), nullable=False, index=True),
    Column("csrf", String, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    Column("expires_at", UtcDateTime, nullable=False),
)

# No foreign key: what was used stays on record when its owner is gone.
usage = Table(
    "usage",
    metadata,
    Column("owner", String, primary_key=True),
    Column("day", Date, primary_key=True),
    Column("cpu_seconds", Float, nullable=False),
    Column("memory_byte_seconds", Float, nullable=False),
    Column("disk_byte_seconds", Float, nullable=False),
    Column("egress_bytes", BigInteger, nullable=False),
)

# How often credentials or quotas have changed: by this other servers on the store know that they must ask anew.
revisions = Table(
    "revisions",
    metadata,
    Column("name", String, primary_key=True),
    Column("number", BigInteger, nullable=False),
)

# Append-only, which the database itself sees to: see ``record_what_was_asked`` in ``migrations.py``.
audit = Table(
    "audit",
    metadata,
    Column("id", BigInteger().with_variant(Integer(), "sqlite"), primary_key=True),
    Column("node", String, nullable=False),
    Column("seq", BigInteger, nullable=False),
    Column("at", UtcDateTime, nullable=False),
    Column("actor", String, nullable=False),
    Column("key", String),
    Column("owner", String),
    Column("user", String),
    Column("client", String, nullable=False),
    Column("agent", String, nullable=False),
    Column("request_id", String, nullable=False),
    Column("operation", String, nullable=False),
    Column("method", String, nullable=False),
    Column("sandbox_id", String),
    Column("outcome", String, nullable=False),
    Column("status", Integer),
    Column("code", String),
    Column("took", BigInteger),
    Column("command", Text),
    Column("details", JSON, nullable=False),
    Column("previous", String, nullable=False),
    Column("hash", String, nullable=False),
)

# The last entry of each chain that was removed because of its age.
audit_anchors = Table(
    "audit_anchors",
    metadata,
    Column("node", String, primary_key=True),
    Column("seq", BigInteger, nullable=False),
    Column("hash", String, nullable=False),
)

webhooks = Table(
    "webhooks",
    metadata,
    Column("id", String, primary_key=True),
    Column("owner", String),
    Column("url", Text, nullable=False),
    Column("events", JSON, nullable=False),
    Column("description", Text, nullable=False),
    Column("enabled", Boolean, nullable=False),
    Column("secret", String, nullable=False),
    Column("previous_secret", String),
    Column("previous_secret_until", UtcDateTime),
    Column("created_at", UtcDateTime, nullable=False),
)

deliveries = Table(
    "deliveries",
    metadata,
    Column("number", BigInteger().with_variant(Integer(), "sqlite"), primary_key=True),
    Column("id", String, nullable=False, unique=True),
    Column("webhook_id", ForeignKey("webhooks.id", ondelete="CASCADE"), nullable=False),
    Column("sandbox_id", String),
    Column("event", String, nullable=False),
    Column("body", Text, nullable=False),
    Column("state", String, nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    Column("queued_at", UtcDateTime, nullable=False),
    Column("next_at", UtcDateTime),
    Column("leased_by", String),
    Column("leased_until", UtcDateTime),
    Column("delivered_at", UtcDateTime),
    Column("status", Integer),
    Column("error", Text),
)

# No foreign keys to sandboxes: what was done in one is on record when it is gone.
tasks = Table(
    "tasks",
    metadata,
    Column("id", String, primary_key=True),
    Column("node", String, nullable=False),
    Column("runner", String),
    Column("owner", String, nullable=False),
    Column("status", String, nullable=False),
    Column("provider", String, nullable=False),
    Column("agent", String, nullable=False),
    Column("sandbox_id", String),
    Column("made_sandbox", Boolean, nullable=False),
    Column("session_id", String),
    Column("team_id", String),
    Column("place", Integer),
    Column("role", Text),
    Column("schedule_id", String),
    Column("retry_of", String),
    Column("user_id", String),
    Column("message", Text, nullable=False),
    Column("model", String),
    Column("git_url", Text),
    Column("git_branch", String),
    Column("request", JSON, nullable=False),
    Column("secrets", Text),
    Column("step", String, nullable=False),
    Column("base", JSON(none_as_null=True)),
    Column("response", Text),
    Column("diff", JSON(none_as_null=True)),
    Column("patch", LargeBinary),
    Column("artifacts", JSON, nullable=False),
    Column("tokens", JSON, nullable=False),
    Column("cost", Float, nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("error", Text),
    Column("error_code", String),
    Column("cancel", Boolean, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    Column("started_at", UtcDateTime),
    Column("completed_at", UtcDateTime),
)

task_events = Table(
    "task_events",
    metadata,
    Column("id", BigInteger().with_variant(Integer(), "sqlite"), primary_key=True),
    Column("task_id", ForeignKey("tasks.id", ondelete="CASCADE"), nullable=False),
    Column("type", String, nullable=False),
    Column("at", UtcDateTime, nullable=False),
    Column("data", JSON, nullable=False),
)

task_artifacts = Table(
    "task_artifacts",
    metadata,
    Column("task_id", ForeignKey("tasks.id", ondelete="CASCADE"), primary_key=True),
    Column("path", String, primary_key=True),
    Column("content", LargeBinary, nullable=False),
)

teams = Table(
    "teams",
    metadata,
    Column("id", String, primary_key=True),
    Column("node", String, nullable=False),
    Column("owner", String, nullable=False),
    Column("request", JSON, nullable=False),
    Column("secrets", Text),
    Column("schedule_id", String),
    Column("snapshot", String),
    Column("shared", Boolean, nullable=False),
    Column("step", String, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
)

schedules = Table(
    "schedules",
    metadata,
    Column("id", String, primary_key=True),
    Column("owner", String, nullable=False),
    Column("name", Text, nullable=False),
    Column("cron", String, nullable=False),
    Column("timezone", String, nullable=False),
    Column("missed", String, nullable=False),
    Column("overlap", String, nullable=False),
    Column("paused", Boolean, nullable=False),
    Column("kind", String, nullable=False),
    Column("request", JSON, nullable=False),
    Column("secrets", Text),
    Column("next_at", UtcDateTime),
    Column("last_at", UtcDateTime),
    Column("created_at", UtcDateTime, nullable=False),
)

schedule_runs = Table(
    "schedule_runs",
    metadata,
    Column("id", BigInteger().with_variant(Integer(), "sqlite"), primary_key=True),
    Column("schedule_id", ForeignKey("schedules.id", ondelete="CASCADE"), nullable=False),
    Column("due_at", UtcDateTime, nullable=False),
    Column("at", UtcDateTime, nullable=False),
    Column("outcome", String, nullable=False),
    Column("task_id", String),
    Column("team_id", String),
    Column("reason", Text),
)

# What workers in the cloud have told of their sandboxes.
cloudflare_sandboxes = Table(
    "cloudflare_sandboxes",
    metadata,
    Column("id", String, primary_key=True),
    Column("user_id", String),
    Column("status", String, nullable=False),
    Column("worker_url", Text, nullable=False),
    Column("error", Text),
    Column("workspace_synced_at", UtcDateTime),
    Column("last_active_at", UtcDateTime),
    Column("created_at", UtcDateTime, nullable=False),
    Column("updated_at", UtcDateTime, nullable=False),
)

# A coding session, and the sandbox that it has at the time.
agent_sessions = Table(
    "agent_sessions",
    metadata,
    Column("id", String, primary_key=True),
    Column("node", String, nullable=False),
    Column("owner", String, nullable=False),
    Column("title", Text),
    Column("repo_owner", String),
    Column("repo_name", String),
    Column("branch", String),
    Column("model", String),
    Column("status", String, nullable=False),
    Column("settings", JSON, nullable=False),
    Column("sealed", Text),
    Column("sandbox_id", String),
    Column("sandbox_status", String, nullable=False),
    Column("sandbox_token", String),
    Column("agent_session", String),
    Column("snapshot", String),
    Column("spawned_at", Float),
    Column("heard_at", Float),
    Column("active_at", Float),
    Column("failures", Integer, nullable=False),
    Column("failed_at", Float),
    Column("error", Text),
    Column("created_at", UtcDateTime, nullable=False),
    Column("updated_at", UtcDateTime, nullable=False),
)

session_messages = Table(
    "session_messages",
    metadata,
    Column("number", BigInteger().with_variant(Integer(), "sqlite"), primary_key=True),
    Column("id", String, nullable=False, unique=True),
    Column("session_id", ForeignKey("agent_sessions.id", ondelete="CASCADE"), nullable=False),
    Column("content", Text, nullable=False),
    Column("author", String),
    Column("model", String),
    Column("source", String, nullable=False),
    Column("attachments", JSON, nullable=False),
    Column("status", String, nullable=False),
    Column("error", Text),
    Column("created_at", UtcDateTime, nullable=False),
    Column("started_at", UtcDateTime),
    Column("completed_at", UtcDateTime),
)

# Unique by (session, id), so that what is sent twice is there once. Of the answer so far only the latest is kept.
session_events = Table(
    "session_events",
    metadata,
    Column("number", BigInteger().with_variant(Integer(), "sqlite"), primary_key=True),
    Column("session_id", ForeignKey("agent_sessions.id", ondelete="CASCADE"), nullable=False),
    Column("id", String, nullable=False),
    Column("type", String, nullable=False),
    Column("message_id", String),
    Column("data", JSON, nullable=False),
    Column("at", UtcDateTime, nullable=False),
)

session_artifacts = Table(
    "session_artifacts",
    metadata,
    Column("id", String, primary_key=True),
    Column("session_id", ForeignKey("agent_sessions.id", ondelete="CASCADE"), nullable=False),
    Column("type", String, nullable=False),
    Column("url", Text),
    Column("metadata", JSON, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
)

session_participants = Table(
    "session_participants",
    metadata,
    Column("id", String, primary_key=True),
    Column("session_id", ForeignKey("agent_sessions.id", ondelete="CASCADE"), nullable=False),
    Column("user", String, nullable=False),
    Column("name", String),
    Column("email", String),
    Column("role", String, nullable=False),
    Column("sealed", Text),
    Column("ws_token", String),
    Column("ws_token_until", UtcDateTime),
    Column("joined_at", UtcDateTime, nullable=False),
)

servers = Table(
    "servers",
    metadata,
    Column("node", String, primary_key=True),
    Column("url", Text),
    Column("region", String),
    Column("seen_at", UtcDateTime),
)

schema_migrations = Table(
    "schema_migrations",
    metadata,
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("name", String, nullable=False),
    Column("applied_at", UtcDateTime, nullable=False),
)
