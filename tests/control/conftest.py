from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from skerry.control.store import Store
from tests.postgres import Postgres, postgres

__all__ = ["postgres"]


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database, of each kind in turn."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/skerry.db"
    server: Postgres = request.getfixturevalue("postgres")
    return server.create_database()


@pytest.fixture
async def store(database: str) -> AsyncIterator[Store]:
    store = Store(database)
    await store.open()
    yield store
    await store.close()
