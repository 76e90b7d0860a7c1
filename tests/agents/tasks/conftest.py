"""A server's tasks, teams and schedules, worked on by a scripted agent."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from skerry.agents.schedules import Schedules
from skerry.agents.tasks import Tasks
from skerry.agents.teams import Teams
from skerry.control.open import open_registry
from skerry.control.registry import Registry
from skerry.models import ExecRequest
from skerry.settings import Settings
from tests.agents.tasks.clock import Clock
from tests.agents.tasks.scripted import ScriptedAgent


@pytest_asyncio.fixture(scope="module")
async def registry(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Registry]:
    registry = await open_registry(Settings(home=tmp_path_factory.mktemp("tasks") / "home", pool_size=1 << 28))
    yield registry
    await registry.close()


@pytest.fixture
def agent() -> ScriptedAgent:
    return ScriptedAgent()


@pytest.fixture
async def tasks(registry: Registry, agent: ScriptedAgent) -> AsyncIterator[Tasks]:
    tasks = Tasks(registry, {"scripted": agent})
    await tasks.open()
    yield tasks
    await tasks.close()


@pytest.fixture
async def teams(registry: Registry, tasks: Tasks) -> AsyncIterator[Teams]:
    teams = Teams(registry, tasks)
    await teams.open()
    yield teams
    await teams.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def schedules(registry: Registry, tasks: Tasks, teams: Teams, clock: Clock) -> Schedules:
    """Nothing is looked at but when a test says so."""
    return Schedules(registry, tasks, teams, clock)


async def sh(registry: Registry, sandbox: str | None, command: str) -> str:
    assert sandbox is not None
    async with registry.use(sandbox) as runtime:
        return (await runtime.exec(ExecRequest(command=command, session=None))).stdout
