"""Tasks and teams in containers, on a server whose own sandboxes are this machine's."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from skerry.agents.availability import provider_for, providers
from skerry.agents.task_models import CreateTask, CreateTeam
from skerry.agents.tasks import Tasks
from skerry.agents.teams import Teams
from skerry.control.open import open_registry
from skerry.control.registry import Registry
from skerry.errors import ConflictError, ProviderNotConfiguredError, ProviderUnreachableError
from skerry.models import CreateSandbox
from skerry.settings import Settings
from tests.agents.tasks.scripted import ScriptedAgent, script

SEEN = {"run": "test -e /.dockerenv && echo yes > container || echo yes > machine"}


@pytest.fixture(scope="module")
async def registry(settings: dict[str, object]) -> AsyncIterator[Registry]:
    home = Path(tempfile.mkdtemp(prefix="skerry-docker-tasks-"))
    both = {**settings, "provider": "local", "providers": ("docker",), "pool_size": 1 << 28}
    registry = await open_registry(Settings(home=home, **both))  # type: ignore[arg-type]
    yield registry
    await registry.close()
    shutil.rmtree(home)


@pytest.fixture
async def tasks(registry: Registry) -> AsyncIterator[Tasks]:
    tasks = Tasks(registry, {"scripted": ScriptedAgent()})
    await tasks.open()
    yield tasks
    await tasks.close()


async def test_a_task_runs_where_it_was_asked_to(registry: Registry, tasks: Tasks) -> None:
    found = providers(registry)
    assert {name for name, one in found.items() if one.available} == {"local", "docker"}
    for provider, written in (("docker", "container"), ("local", "machine"), (None, "machine")):
        request = {"message": script(SEEN), "agent": "scripted", "afterwards": "destroy", "provider": provider}
        row = await tasks.create(CreateTask.model_validate(request))
        task = await tasks.wait(row.id)
        assert (task.status, task.provider) == ("completed", provider or "local")
        assert task.diff is not None
        assert [file.path for file in task.diff.files] == [written]
    with pytest.raises(ProviderNotConfiguredError, match="Cloudflare worker URL not configured"):
        await tasks.create(CreateTask.model_validate({"message": "[]", "agent": "scripted", "provider": "cloudflare"}))


async def test_a_task_in_a_sandbox_that_is_there_runs_where_that_is(registry: Registry, tasks: Tasks) -> None:
    for id, place, other in (("there", "docker", "local"), ("here", "local", "docker")):
        await registry.create(CreateSandbox(id=id, provider=place))
        request = {"message": script(SEEN), "agent": "scripted", "sandboxId": id}
        with pytest.raises(ConflictError, match="not with this: provider"):
            await tasks.create(CreateTask.model_validate({**request, "provider": other}))
        task = await tasks.wait((await tasks.create(CreateTask.model_validate(request))).id)
        assert (task.status, task.provider) == ("completed", place)
        await registry.destroy(id)


async def test_what_is_said_of_an_engine_that_has_gone(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    away = registry.settings.model_copy(update={"docker_socket": "/nowhere/docker.sock"})
    monkeypatch.setattr(registry, "settings", away)
    assert providers(registry)["docker"].reason == "No Docker Engine answers at /nowhere/docker.sock."
    with pytest.raises(ProviderUnreachableError):
        provider_for(registry, "docker")


async def test_a_team_of_containers_costs_one_preparation(registry: Registry, tasks: Tasks) -> None:
    teams = Teams(registry, tasks)
    await teams.open()
    prepare = "git init -q && date +%N > born && git add -A && git -c user.name=a -c user.email=a@b commit -qm 1"
    request = {
        "agents": [{"role": str(number), "message": script(SEEN, {"run": "cat born"})} for number in range(2)],
        "agent": "scripted",
        "afterwards": "destroy",
        "provider": "docker",
        "prepare": prepare,
    }
    team = await teams.wait((await teams.create(CreateTeam.model_validate(request))).team_id)
    assert team.shared
    for agent in team.agents:
        assert agent.diff is not None
        assert [file.path for file in agent.diff.files] == ["container"]
    await teams.close()
