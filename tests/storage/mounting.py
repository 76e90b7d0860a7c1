"""A sandbox with a fresh part of a bucket mounted in it, for each kind of bucket."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import pytest_asyncio

from skerry.control.open import open_registry
from skerry.control.registry import Registry
from skerry.models import ExecRequest, ExecResult, MountBucket, MountInfo
from skerry.settings import Settings
from skerry.storage.buckets import Bucket
from tests.s3 import bucket_table

_numbers = itertools.count(1)


@dataclass
class Place:
    """``bucket`` is seen as others see it: from below the prefix that is mounted."""

    registry: Registry
    id: str
    bucket: Bucket

    async def mount(self, path: str = "/persist", **more: object) -> MountInfo:
        request = {"bucket": "test", "mountPath": path, "prefix": self.prefix, **more}
        return await self.registry.mounts.mount(self.id, MountBucket.model_validate(request))

    @property
    def prefix(self) -> str:
        return f"/tests/{self.id}/"

    async def sh(self, command: str, **more: object) -> ExecResult:
        async with self.registry.use(self.id) as runtime:
            return await runtime.exec(ExecRequest.model_validate({"command": command, **more}))

    async def out(self, command: str, **more: object) -> str:
        result = await self.sh(command, **more)
        assert result.exit_code == 0, result.stderr
        return result.stdout

    async def keys(self) -> list[str]:
        return sorted([item.key async for item in self.bucket.list()])

    async def kinds(self) -> list[str]:
        return [event.kind for event in await self.registry.events(self.id, limit=1000)]


@pytest_asyncio.fixture(scope="module", params=["directory", "s3"])
async def mounting_registry(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Registry]:
    place = tmp_path_factory.mktemp("mounting")
    table = bucket_table(request.param, place, request)
    registry = await open_registry(Settings(home=place / "home", buckets=table, mount_timeout=3.0))
    yield registry
    await registry.close()


@pytest_asyncio.fixture
async def place(mounting_registry: Registry) -> AsyncIterator[Place]:
    id = f"mounts-{next(_numbers)}"
    registry = mounting_registry
    bucket = registry.mounts.buckets.open("test").within(f"tests/{id}")
    yield Place(registry, id, bucket)
    await registry.destroy(id)


@pytest_asyncio.fixture
async def mounted(place: Place) -> Place:
    await place.mount()
    return place
