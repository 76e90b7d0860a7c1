"""What the store withstands: a server that is killed, others beside it, requests that give up, a database that goes."""

from __future__ import annotations

import asyncio
import random
import signal
import stat
import sys
import traceback
from asyncio.subprocess import PIPE, Process
from pathlib import Path

import pytest

from skerry.control.database import database_url
from skerry.control.store import SandboxRow, Store
from skerry.errors import StoreError
from skerry.models import State
from tests.postgres import Postgres

WRITER = """
import asyncio, itertools, sys
from skerry.control.store import SandboxRow, Store
from skerry.models import ProcessInfo, ProcessStatus, State, now

async def main(url, name, count):
    store = Store(url)
    await store.open()
    for number in range(count) if count else itertools.count():
        id = f"{name}-{number:05}"
        await store.insert_sandbox(SandboxRow(id=id, node=name, state=State.STARTING, image="host"))
        await store.update_sandbox(id, state=State.ACTIVE, starts=number)
        await store.add_event(id, "started", id)
        info = ProcessInfo(id="p", command=id, status=ProcessStatus.RUNNING, start_time=now())
        await store.save_process(id, info, number)
        print(id, flush=True)
    await store.close()

asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
"""

OPENER = """
import asyncio, sys
from skerry.control.store import Store
print("ready", flush=True)
asyncio.run(Store(sys.argv[1]).open())
"""


async def child(script: str, *arguments: str) -> Process:
    return await asyncio.create_subprocess_exec(sys.executable, "-c", script, *arguments, stdout=PIPE)


def sandbox(id: str) -> SandboxRow:
    return SandboxRow(id=id, node="here", state=State.ACTIVE, image="host")


async def test_what_was_acknowledged_survives_a_killed_writer(database: str) -> None:
    for name in ("first", "second", "third"):
        writer = await child(WRITER, database, name, "0")
        assert writer.stdout is not None
        acknowledged = [(await writer.stdout.readline()).decode().strip() for _ in range(random.randint(5, 40))]
        writer.send_signal(signal.SIGKILL)
        acknowledged += (await writer.stdout.read()).decode().split()
        assert await writer.wait() == -signal.SIGKILL

        store = Store(database)
        await store.open()
        for id in acknowledged:
            row = await store.get_sandbox(id)
            assert row is not None
            assert (row.state, row.starts) == (State.ACTIVE, int(id[-5:]))
            assert [event.message for event in await store.events(id)] == [id]
            assert [info.command for info in await store.processes(id)] == [id]
        await store.insert_sandbox(sandbox(f"after-{name}"))
        await store.close()


async def test_a_migration_that_was_killed_is_done_again(database: str) -> None:
    for _ in range(6):
        opener = await child(OPENER, database)
        assert opener.stdout is not None
        await opener.stdout.readline()
        await asyncio.sleep(random.uniform(0, 0.03))
        if opener.returncode is None:
            opener.send_signal(signal.SIGKILL)
        await opener.wait()
    store = Store(database)
    await store.open()
    await store.insert_sandbox(sandbox("demo"))
    await store.close()


async def test_processes_that_write_at_once_wait_for_each_other(database: str) -> None:
    writers = [await child(WRITER, database, name, "100") for name in ("a", "b", "c")]
    answers = await asyncio.gather(*(writer.communicate() for writer in writers))
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    assert [len(out.split()) for out, _ in answers] == [100, 100, 100]
    store = Store(database)
    await store.open()
    for name in ("a", "b", "c"):
        assert [row.starts for row in await store.all_sandboxes(name)] == list(range(100))
    await store.close()


async def test_reads_do_not_wait_for_a_writer_elsewhere(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/skerry.db"
    store, other = Store(url), Store(url)
    await store.open()
    await other.open()
    await store.insert_sandbox(sandbox("demo"))
    async with other._writer.connect() as holder:
        await holder.exec_driver_sql("BEGIN IMMEDIATE")
        write = asyncio.create_task(store.update_sandbox("demo", starts=1))
        row = await store.get_sandbox("demo")
        assert row is not None
        assert row.starts == 0
        assert not write.done()
        await holder.exec_driver_sql("COMMIT")
    assert (await write).starts == 1
    await store.close()
    await other.close()


async def test_requests_that_are_cancelled_leave_the_store_usable(store: Store) -> None:
    async def use(number: int) -> None:
        await store.insert_sandbox(sandbox(f"s{number}"))
        await store.add_event(f"s{number}", "started", "")
        await store.list_sandboxes()

    for number in range(60):
        task = asyncio.create_task(use(number))
        await asyncio.sleep(random.uniform(0, 0.003))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await asyncio.gather(*(use(number) for number in range(100, 140)))
    rows = await store.list_sandboxes(prefix="s1", limit=100)
    assert {f"s{number}" for number in range(100, 140)} <= {row.id for row in rows}


async def test_many_callers_at_once_are_all_served(store: Store) -> None:
    await asyncio.gather(*(store.insert_sandbox(sandbox(f"s{number}")) for number in range(200)))
    rows = await asyncio.gather(*(store.get_sandbox(f"s{number}") for number in range(200)))
    assert all(rows)


async def test_connections_that_the_server_cut_are_made_again(postgres: Postgres) -> None:
    store = Store(postgres.create_database())
    await store.open()
    await asyncio.gather(*(store.insert_sandbox(sandbox(f"s{number}")) for number in range(8)))
    postgres.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND datname LIKE 'test%'"
    )
    await asyncio.gather(*(store.insert_sandbox(sandbox(f"t{number}")) for number in range(8)))
    assert len(await store.all_sandboxes("here")) == 16
    await store.close()


async def test_a_closed_store_can_be_opened_again(database: str) -> None:
    store = Store(database)
    for number in range(2):
        await store.open()
        await store.insert_sandbox(sandbox(f"s{number}"))
        await store.close()


# -- the file and the URL ----------------------------------------------------------------------------------------------


async def test_the_file_of_sqlite_is_private_and_its_directory_is_made(tmp_path: Path) -> None:
    path = tmp_path / "new" / "deep" / "skerry.db"
    store = Store(f"sqlite:///{path}")
    await store.open()
    await store.insert_sandbox(sandbox("demo"))
    files = list(path.parent.iterdir())
    assert {file.name for file in files} >= {"skerry.db", "skerry.db-wal"}
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    await store.close()


async def test_sqlite_runs_with_a_log_and_keeps_references(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path}/skerry.db")
    await store.open()
    for engine in (store._writer, store._reader):
        async with engine.connect() as connection:
            settings = [
                (await connection.exec_driver_sql(f"PRAGMA {name}")).scalar()
                for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
            ]
        assert settings == ["wal", 1, 1, 60_000]
    await store.close()


@pytest.mark.parametrize(
    ("written", "used"),
    [
        ("sqlite:////var/x.db", "sqlite+aiosqlite:////var/x.db"),
        ("sqlite:///x.db", "sqlite+aiosqlite:///x.db"),
        ("sqlite+aiosqlite:////var/x.db", "sqlite+aiosqlite:////var/x.db"),
        ("postgres://u:p%40w@h:1/d", "postgresql+asyncpg://u:p%40w@h:1/d"),
        ("postgresql://u:p@h/d", "postgresql+asyncpg://u:p@h/d"),
        ("postgresql+asyncpg://u:p@h/d", "postgresql+asyncpg://u:p@h/d"),
        ("postgres://u:p@h/d?sslmode=require", "postgresql+asyncpg://u:p@h/d?ssl=require"),
    ],
)
def test_urls_are_rewritten_for_the_driver(written: str, used: str) -> None:
    assert database_url(written).render_as_string(hide_password=False) == used


@pytest.mark.parametrize(
    "url",
    ["", "hunter2", "mysql://u:hunter2@h/d", "postgresql+psycopg2://u:hunter2@h/d", "sqlite://", "sqlite:///:memory:"],
)
def test_a_url_that_cannot_be_used_is_explained(url: str) -> None:
    with pytest.raises(StoreError, match="Write it as sqlite:") as caught:
        Store(url)
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:hunter2@127.0.0.1:1/d",
        "postgresql://u:hunter2@127.0.0.1:99999/d",
        "postgresql://u:p@ss:hunter2@h:port/d",
        "postgresql://u:hunter2@host.invalid/d",
        "postgresql://u:hunter2@127.0.0.1:1/d?bogus=hunter2",
        "postgresql://u@127.0.0.1:1/d?password=hunter2",
        "postgresql://u:hunter2@127.0.0.1:1/d?sslmode=bogus",
        "postgresql://u:hunter2@127.0.0.1:1/d?host=/nowhere",
    ],
)
async def test_a_password_is_never_shown(url: str) -> None:
    shown = ""
    with pytest.raises(StoreError) as caught:  # noqa: PT012
        store = Store(url)
        shown = repr(store) + store.address
        await store.open()
    shown += "".join(traceback.format_exception(caught.value)) + repr(caught.value) + str(caught.value.to_wire())
    assert "hunter2" not in shown


async def test_a_wrong_password_is_refused_without_showing_it(postgres: Postgres) -> None:
    store = Store(postgres.url("postgres", password="hunter2"))
    with pytest.raises(StoreError, match="password authentication failed") as caught:
        await store.open()
    assert "hunter2" not in "".join(traceback.format_exception(caught.value)) + repr(store)
    assert postgres.password not in repr(Store(postgres.url("postgres")))


async def test_an_error_does_not_show_what_a_sandbox_keeps_secret(store: Store) -> None:
    async with store._writer.connect() as connection:
        await connection.exec_driver_sql("DROP TABLE mounts")
        await connection.exec_driver_sql("DROP TABLE exposures")
        await connection.exec_driver_sql("DROP TABLE contexts")
        await connection.exec_driver_sql("DROP TABLE processes")
        await connection.exec_driver_sql("DROP TABLE events")
        await connection.exec_driver_sql("DROP TABLE sandboxes")
    row = sandbox("demo")
    row.env = {"TOKEN": "hunter2"}
    with pytest.raises(StoreError) as caught:
        await store.insert_sandbox(row)
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("content", [b"this is not a database, but it is long enough to be read as one" * 20])
async def test_a_file_that_is_no_database_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(StoreError, match="not a database"):
        await Store(f"sqlite:///{path}").open()
    assert path.read_bytes() == content
