from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from skerry.providers.contract import Spec
from skerry.providers.local.provider import LocalProvider
from skerry.runtime.runtime import Runtime
from skerry.storage.backups import Backups
from skerry.storage.buckets import Buckets
from tests.machines import nobody


@pytest_asyncio.fixture
async def other(provider: LocalProvider) -> AsyncIterator[Runtime]:
    """Another sandbox than ``runtime``."""
    id = "test-other"
    machine = await provider.start(Spec(id=id, image="host"), nobody)
    runtime = Runtime(machine.portal, env={}, on_process=nobody)
    yield runtime
    await runtime.close()
    await machine.stop()
    await provider.forget(id)


@pytest_asyncio.fixture
async def backups(buckets: Buckets, tmp_path: Path) -> AsyncIterator[Backups]:
    backups = Backups(buckets, None, tmp_path / "home")
    yield backups
    await backups.close()
