"""A server with keys, and people who share it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.conftest import ServerProcess

ADMIN = "an-admin-key-of-the-settings"


class People:
    """Clients of one server: each with a key of its own."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.admin = self.client(ADMIN)
        self._clients = [self.admin]

    def client(self, key: str, **headers: str) -> httpx.AsyncClient:
        bearer = {"Authorization": f"Bearer {key}", **headers}
        return httpx.AsyncClient(base_url=self.server.url, headers=bearer, timeout=60)

    async def key(self, **wanted: Any) -> dict[str, Any]:
        made = await self.admin.post("/v1/keys", json=wanted)
        assert made.status_code == 201, made.text
        found: dict[str, Any] = made.json()
        return found

    async def someone(self, owner: str, **wanted: Any) -> httpx.AsyncClient:
        client = self.client((await self.key(owner=owner, **wanted))["key"])
        self._clients.append(client)
        return client

    async def close(self) -> None:
        for client in self._clients:
            await client.aclose()


@asynccontextmanager
async def shared_by(server: ServerProcess) -> AsyncIterator[People]:
    people = People(server)
    try:
        yield people
    finally:
        await people.close()


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    home: Path = tmp_path_factory.mktemp("keyed")
    process = ServerProcess(home, api_keys=[ADMIN], usage_every=0.3, price_cpu_hour=3600.0, pool_size=1 << 28)
    yield process
    assert process.stop() == 0


@pytest.fixture
async def people(keyed: ServerProcess) -> AsyncIterator[People]:
    async with shared_by(keyed) as people:
        yield people
