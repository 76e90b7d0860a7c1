"""One database, SQLite or PostgreSQL, and how statements are run in it.

Every operation is one statement in autocommit mode, or a few in one transaction (``_together``). So each is atomic,
nothing is left half done by a server that is killed, and what a method has returned from is in the database.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import sqlite3
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import URL, Executable, Row, event, make_url
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from skerry.control.migrations import migrate
from skerry.errors import InvalidRequestError, StoreError

_DRIVERS = {
    "sqlite": "sqlite+aiosqlite",
    "sqlite+aiosqlite": "sqlite+aiosqlite",
    "postgres": "postgresql+asyncpg",
    "postgresql": "postgresql+asyncpg",
    "postgresql+asyncpg": "postgresql+asyncpg",
}
_BUSY_SECONDS = 60

T = TypeVar("T")


class Database:
    def __init__(self, url: str) -> None:
        self._url = database_url(url)
        self._sqlite = self._url.get_backend_name() == "sqlite"
        self._writer, self._reader = _sqlite_engines(self._url) if self._sqlite else _postgres_engines(self._url)
        self._running: set[asyncio.Task[Any]] = set()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.address!r})"

    @property
    def address(self) -> str:
        """Where the database is, without password and options: fit for logs."""
        return self._url.set(query={}).render_as_string(hide_password=True)

    async def open(self) -> None:
        """Connect and migrate. Any number of processes may open the same new database at once."""
        try:
            await self._finish(self._migrate())
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        if self._running:
            await asyncio.wait(self._running)
        await self._writer.dispose()
        await self._reader.dispose()

    async def _migrate(self) -> None:
        # A URL's option that the driver does not know is a TypeError, a port beyond 65535 an OverflowError.
        with _reported(f"The database {self.address} cannot be opened", TypeError, OverflowError):
            if self._sqlite:
                _make_private_file(Path(str(self._url.database)))
                await _write_ahead(self._writer)
            async with self._writer.connect() as connection:
                await connection.run_sync(migrate)

    async def _read(self, statement: Executable) -> Sequence[Row[Any]]:
        return await self._finish(_run(self._reader, statement))

    async def _write(self, statement: Executable) -> Sequence[Row[Any]]:
        return await self._finish(_run(self._writer, statement))

    async def _together(self, work: Callable[[AsyncConnection], Awaitable[T]]) -> T:
        """What ``work`` does, all of it or nothing."""
        return await self._finish(self._transaction(work))

    async def _transaction(self, work: Callable[[AsyncConnection], Awaitable[T]]) -> T:
        with _reported("The database could not be used"):
            async with self._writer.connect() as connection:
                if not self._sqlite:
                    connection = await connection.execution_options(isolation_level="READ COMMITTED")
                    async with connection.begin():
                        return await work(connection)
                await connection.exec_driver_sql("BEGIN IMMEDIATE")
                try:
                    done = await work(connection)
                    await connection.exec_driver_sql("COMMIT")
                except BaseException:
                    with suppress(DBAPIError):  # some errors, a full disk for one, have rolled it back already
                        await connection.exec_driver_sql("ROLLBACK")
                    raise
                return done

    async def _finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Let a statement end even if its caller gives up: one that is cut off would keep SQLite's write lock."""
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)

    def _upsert(self, table: Any) -> Any:
        return sqlite.insert(table) if self._sqlite else postgresql.insert(table)


def database_url(url: str) -> URL:
    """A URL as people write it, with the driver Skerry uses. The error never shows the URL: it may hold a password."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        raise StoreError("The database URL cannot be read.", hint=_URL_HINT) from None
    if parsed.drivername not in _DRIVERS:
        raise StoreError(f"Skerry cannot use a database of kind {parsed.drivername!r}.", hint=_URL_HINT)
    parsed = parsed.set(drivername=_DRIVERS[parsed.drivername])
    if parsed.get_backend_name() == "sqlite" and parsed.database in (None, "", ":memory:"):
        raise StoreError("The SQLite database needs a file.", hint=_URL_HINT)
    if "sslmode" in parsed.query:  # libpq's name for what asyncpg calls ssl
        mode = parsed.normalized_query["sslmode"][-1]
        parsed = parsed.difference_update_query(["sslmode"]).update_query_dict({"ssl": mode})
    return parsed


_SURROGATES = re.compile("[\ud800-\udfff]")
_URL_HINT = "Write it as sqlite:////absolute/path.db or postgresql://user:password@host:5432/name."


def _sqlite_engines(url: URL) -> tuple[AsyncEngine, AsyncEngine]:
    if sqlite3.sqlite_version_info < (3, 35):
        raise StoreError(
            f"SQLite {sqlite3.sqlite_version} is too old.", hint="Use a Python built with SQLite 3.35 or newer."
        )

    def engine(connections: int) -> AsyncEngine:
        made = _engine(
            url,
            pool_size=connections,
            max_overflow=0,
            pool_timeout=2 * _BUSY_SECONDS,
            connect_args={"timeout": _BUSY_SECONDS},
        )
        event.listen(made.sync_engine, "connect", _prepare_sqlite)
        return made

    # SQLite has one writer at a time. One connection for it makes writers queue here, in order, instead of sleeping
    # on each other's locks; readers never wait for it.
    return engine(1), engine(2)


def _postgres_engines(url: URL) -> tuple[AsyncEngine, AsyncEngine]:
    try:
        engine = _engine(url, pool_size=8, max_overflow=8, pool_pre_ping=True)
    except ModuleNotFoundError as error:
        raise StoreError(
            "PostgreSQL needs the asyncpg package.", hint="Install it with: pip install 'skerry[postgres]'."
        ) from error
    return engine, engine


def _engine(url: URL, **options: Any) -> AsyncEngine:
    return create_async_engine(
        url,
        isolation_level="AUTOCOMMIT",
        skip_autocommit_rollback=True,
        pool_reset_on_return=None,
        hide_parameters=True,  # an error must not carry a sandbox's environment into a log
        **options,
    )


def _prepare_sqlite(connection: Any, _record: object) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA foreign_keys = ON")
    # In a write-ahead log a commit survives the death of the process; only a power cut may take the last ones.
    cursor.execute("PRAGMA synchronous = NORMAL")
    cursor.close()


async def _write_ahead(engine: AsyncEngine) -> None:
    """Switch a database to a write-ahead log, once. SQLite does not wait for others here, so this does."""
    deadline = time.monotonic() + _BUSY_SECONDS
    while True:
        try:
            async with engine.connect() as connection:
                await connection.exec_driver_sql("PRAGMA journal_mode = WAL")
            return
        except DBAPIError as error:
            if "locked" not in str(error.orig) or time.monotonic() > deadline:
                raise
        await asyncio.sleep(0.02)


def _make_private_file(path: Path) -> None:
    """SQLite would make it readable for everyone, and it holds the environments of sandboxes."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))


async def _run(engine: AsyncEngine, statement: Executable) -> Sequence[Row[Any]]:
    with _reported("The database could not be used"):
        async with engine.connect() as connection:
            result = await connection.execute(statement)
            return result.all() if result.returns_rows else []


@contextmanager
def _reported(what: str, *more: type[Exception]) -> Iterator[None]:
    kinds: tuple[type[Exception], ...] = (DBAPIError, PoolTimeoutError, OSError, *more)
    try:
        yield
    except IntegrityError:
        raise
    except kinds as error:
        reason = str(error.orig if isinstance(error, DBAPIError) else error).partition("\n")[0]
        raise StoreError(
            f"{what}: {reason.rstrip('.')}.", hint="Look at the database and at SKERRY_DATABASE_URL."
        ) from error


def clean(text: str) -> str:
    """What a sandbox said must be recorded, even where it is no text a database takes."""
    return text.replace("\0", "\ufffd").encode(errors="replace").decode()


def cleaned(value: Any) -> Any:
    """The same of all text in something."""
    match value:
        case str():
            return clean(value)
        case Mapping():
            return {name: cleaned(part) for name, part in value.items()}
        case list() | tuple():
            return [cleaned(part) for part in value]
        case _:
            return value


def storable(values: dict[str, Any]) -> dict[str, Any]:
    """Refuse what PostgreSQL cannot hold, on SQLite too: a program must not break when its database changes."""
    for name, value in values.items():
        if name == "last_stop" and value is not None:
            values = values | {name: clean(value)}
        elif not _fits(value):
            raise InvalidRequestError(f"{name!r} has a NUL character, broken Unicode or an infinite number in it.")
    return values


def _fits(value: Any) -> bool:
    match value:
        case str():
            return "\0" not in value and (value.isascii() or _SURROGATES.search(value) is None)
        case float():
            return math.isfinite(value)
        case Mapping():
            return all(_fits(part) for pair in value.items() for part in pair)
        case list() | tuple():
            return all(_fits(part) for part in value)
        case _:
            return True
