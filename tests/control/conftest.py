from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from sqlalchemy import make_url

from skerry.control.store import Store
from tests.postgres import Postgres, postgres

__all__ = ["postgres"]


@pytest.fixture(scope="session")
async def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite database as a store makes it of an empty one, to be copied: hundreds of tests begin with that."""
    file = tmp_path_factory.mktemp("migrated") / "skerry.db"
    await _migrate(f"sqlite:///{file}")
    return file


@pytest.fixture(scope="session")
async def migrated_postgres(postgres: Postgres) -> str:
    """The same in PostgreSQL; its name."""
    url = postgres.create_database()
    await _migrate(url)
    return str(make_url(url).database)


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a database, of each kind in turn: empty, or with the tables of the store that a test asks for."""
    ready = "store" in request.fixturenames
    if request.param == "sqlite":
        if ready:
            shutil.copy(request.getfixturevalue("migrated"), tmp_path)
        yield f"sqlite:///{tmp_path}/skerry.db"
        return
    server: Postgres = request.getfixturevalue("postgres")
    url = server.create_database(request.getfixturevalue("migrated_postgres")) if ready else server.create_database()
    yield url
    server.drop_database(url)


async def _migrate(url: str) -> None:
    store = Store(url)
    await store.open()
    await store.close()


@pytest.fixture
async def store(database: str) -> AsyncIterator[Store]:
    store = Store(database)
    await store.open()
    yield store
    await store.close()
