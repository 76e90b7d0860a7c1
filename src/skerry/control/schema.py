"""The tables, as the code reads and writes them. ``migrations.py`` is what makes them in a database."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    DateTime,
    Dialect,
    Enum,
    Float,
    ForeignKey,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
)
from sqlalchemy.dialects.postgresql import JSONB

from skerry.models import ProcessStatus, State


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
)

schema_migrations = Table(
    "schema_migrations",
    metadata,
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("name", String, nullable=False),
    Column("applied_at", UtcDateTime, nullable=False),
)
