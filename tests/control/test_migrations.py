from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
from sqlalchemy import Connection, insert, inspect, select, text
from sqlalchemy.ext.asyncio import create_async_engine

from skerry.control import schema
from skerry.control.database import database_url
from skerry.control.migrations import MIGRATIONS, migrate, schema_version
from skerry.control.store import SandboxRow, Store
from skerry.errors import StoreError
from skerry.models import State, now
from tests.postgres import Postgres

T = TypeVar("T")


async def on(database: str, work: Callable[[Connection], T]) -> T:
    """Do something with the bare database, beside any store."""
    engine = create_async_engine(database_url(database), isolation_level="AUTOCOMMIT")
    try:
        async with engine.connect() as connection:
            return await connection.run_sync(work)
    finally:
        await engine.dispose()


def columns(connection: Connection) -> dict[str, dict[str, bool]]:
    """Every column, and whether it may be null. SQLite says that a numbered key may, though it never is."""
    found = inspect(connection)
    return {
        table: {
            column["name"]: column["nullable"]
            and column["name"] not in found.get_pk_constraint(table)["constrained_columns"]
            for column in found.get_columns(table)
        }
        for table in found.get_table_names()
    }


def versions(connection: Connection) -> list[int]:
    return list(connection.scalars(select(schema.schema_migrations.c.version)))


def claim_version_99(connection: Connection) -> None:
    record = {"version": 99, "name": "from_the_future", "applied_at": now()}
    connection.execute(insert(schema.schema_migrations).values(record))


async def test_an_empty_database_becomes_what_the_schema_says(database: str) -> None:
    store = Store(database)
    await store.open()
    await store.close()
    expected = {
        table.name: {column.name: bool(column.nullable) for column in table.columns}
        for table in schema.metadata.sorted_tables
    }
    assert await on(database, columns) == expected
    assert await on(database, versions) == list(range(1, len(MIGRATIONS) + 1))


async def test_opening_again_changes_nothing_and_loses_nothing(database: str) -> None:
    for number in range(3):
        store = Store(database)
        await store.open()
        await store.insert_sandbox(SandboxRow(id=f"s{number}", node="here", state=State.ACTIVE, image="host"))
        await store.close()
    assert await on(database, versions) == list(range(1, len(MIGRATIONS) + 1))
    store = Store(database)
    await store.open()
    assert [row.id for row in await store.all_sandboxes("here")] == ["s0", "s1", "s2"]
    await store.close()


async def test_a_database_newer_than_the_code_is_refused_and_left_alone(database: str) -> None:
    store = Store(database)
    await store.open()
    await store.close()
    await on(database, claim_version_99)
    before = await on(database, columns)
    with pytest.raises(StoreError, match=r"schema version 99.*Upgrade Skerry") as caught:
        await Store(database).open()
    assert caught.value.details == {"databaseVersion": 99, "knownVersion": len(MIGRATIONS)}
    assert await on(database, columns) == before


async def test_later_migrations_are_applied_once_each_and_in_order(database: str) -> None:
    def add_colour(connection: Connection) -> None:
        connection.execute(text("ALTER TABLE sandboxes ADD COLUMN colour VARCHAR"))

    def paint(connection: Connection) -> None:
        connection.execute(text("UPDATE sandboxes SET colour = 'red'"))

    await on(database, migrate)
    steps = (*MIGRATIONS, add_colour, paint)
    for _ in range(2):
        await on(database, lambda connection: migrate(connection, steps))
    assert await on(database, schema_version) == len(steps)
    assert "colour" in (await on(database, columns))["sandboxes"]


async def test_a_migration_that_fails_leaves_nothing_of_itself(database: str) -> None:
    def half(connection: Connection) -> None:
        connection.execute(text("CREATE TABLE half (id INTEGER)"))
        raise RuntimeError("the middle of it")

    await on(database, migrate)
    with pytest.raises(RuntimeError, match="the middle of it"):
        await on(database, lambda connection: migrate(connection, (*MIGRATIONS, half)))
    assert "half" not in await on(database, columns)
    assert await on(database, schema_version) == len(MIGRATIONS)


async def test_events_of_before_are_kept_and_their_numbers_never_used_again(database: str) -> None:
    def fill(connection: Connection) -> None:
        connection.execute(
            text(
                "INSERT INTO sandboxes (id, node, state, image, env, labels, limits, ephemeral, created_at, starts)"
                " VALUES ('demo', 'here', 'hibernated', 'host', '{}', '{}', '{}', FALSE, '2026-01-01', 1)"
            )
        )
        for kind in ("created", "started", "stopped"):
            connection.execute(
                text("INSERT INTO events (sandbox_id, kind, message, at) VALUES ('demo', :kind, 'old', '2026-01-01')"),
                {"kind": kind},
            )
        connection.execute(text("DELETE FROM events WHERE kind = 'stopped'"))

    await on(database, lambda connection: migrate(connection, MIGRATIONS[:3]))
    await on(database, fill)
    store = Store(database)
    await store.open()
    try:
        old = await store.events("demo")
        assert [(event.kind, event.by, event.details) for event in old] == [
            ("created", None, {}),
            ("started", None, {}),
        ]
        row = await store.get_sandbox("demo")
        assert row is not None
        assert (row.keep_alive, row.on_idle, row.hibernate_after) == (False, "hibernate", None)
        assert (await store.add_event("demo", "frozen", "")).id == old[-1].id + 2
        await store.delete_sandbox("demo")
        assert [event.kind for event in await store.events("demo")] == ["created", "started", "frozen"]
    finally:
        await store.close()


async def test_stores_that_open_a_new_database_at_once_all_succeed(database: str) -> None:
    stores = [Store(database) for _ in range(8)]
    await asyncio.gather(*(store.open() for store in stores))
    rows = [SandboxRow(id=f"s{n}", node="here", state=State.ACTIVE, image="host") for n in range(len(stores))]
    await asyncio.gather(*(store.insert_sandbox(row) for store, row in zip(stores, rows, strict=True)))
    for store in stores:
        assert len(await store.all_sandboxes("here")) == len(stores)
    await asyncio.gather(*(store.close() for store in stores))
    assert await on(database, versions) == list(range(1, len(MIGRATIONS) + 1))


async def test_a_new_database_that_another_is_using_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "skerry.db"
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    store = Store(f"sqlite:///{path}")
    opening = asyncio.create_task(store.open())
    await asyncio.wait([opening], timeout=0.2)
    assert not opening.done()
    other.execute("COMMIT")
    await opening
    other.close()
    await store.close()


async def test_postgresql_orders_ids_by_their_bytes_whatever_its_locale(postgres: Postgres) -> None:
    database = postgres.create_database()
    await on(database, migrate)
    query = (
        "SELECT collation_name FROM information_schema.columns WHERE table_name = 'sandboxes' AND column_name = 'id'"
    )
    assert await on(database, lambda connection: connection.scalar(text(query))) == "C"
