"""Real sandboxes for tests: one provider for the whole run, a fresh machine for each test that asks."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from skerry.control.open import open_registry
from skerry.control.registry import Registry
from skerry.models import ExecRequest, ExecResult
from skerry.providers.contract import Spec
from skerry.providers.local import pool
from skerry.providers.local.machine import LocalMachine
from skerry.providers.local.provider import LocalProvider
from skerry.runtime.runtime import Runtime
from skerry.settings import Settings

# There are hundreds of homes in a run, and each has a pool, which grows if need be.
pool.START = 1 << 30
os.environ.setdefault("SKERRY_POOL_SIZE", "1G")

_numbers = itertools.count(1)

# As in a server: what is here once all tests are known stays, and is not to be looked through again and again.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
    gc.set_threshold(20_000, 20, 50)


async def descriptors(at_most: int | None = None) -> int:
    """How many this process has open; given a bound, waits for work in the background (deletions, the next command's
    FIFOs) to get below it."""
    for _ in range(100):
        await asyncio.sleep(0.05)
        count = len(os.listdir("/proc/self/fd"))
        if at_most is None or count <= at_most:
            break
    return count


def read_inside(launcher: int, path: str) -> str | None:
    """A file of a sandbox, read from outside, which wakes nothing; of the first of this launcher that has it."""
    for monitor in _children(launcher):
        for first in _children(monitor):
            try:
                return Path(f"/proc/{first}/root{path}").read_text()
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
    return None


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


async def nobody(*_: object) -> None:
    return None


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest_asyncio.fixture(scope="session")
async def provider(home: Path) -> AsyncIterator[LocalProvider]:
    provider = LocalProvider(Settings(home=home))
    await provider.open()
    if provider.seed is not None:
        await provider.seed.open()  # not in the middle of some test, which would wonder where its descriptor comes from
    yield provider
    await provider.close()


@pytest_asyncio.fixture
async def machine(provider: LocalProvider) -> AsyncIterator[LocalMachine]:
    id = f"test-{next(_numbers)}"
    machine = await provider.start(Spec(id=id, image="host"), nobody)
    yield machine
    await machine.stop()
    await provider.forget(id)


@pytest_asyncio.fixture
async def runtime(machine: LocalMachine) -> AsyncIterator[Runtime]:
    runtime = Runtime(machine.portal, env={"GREETING": "hello"}, on_process=nobody)
    yield runtime
    await runtime.close()


@pytest.fixture
def sh(runtime: Runtime) -> Callable[..., Awaitable[ExecResult]]:
    async def sh(command: str, **options: object) -> ExecResult:
        return await runtime.exec(ExecRequest(command=command, **options))  # type: ignore[arg-type]

    return sh


@pytest_asyncio.fixture
async def registry(tmp_path: Path) -> AsyncIterator[Registry]:
    registry = await open_registry(Settings(home=tmp_path / "home"))
    yield registry
    await registry.close()
