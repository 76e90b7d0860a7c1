from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from skerry.agents import muster
from skerry.agents.contract import Setup
from skerry.agents.task_models import CreateTeam, TeamInfo
from skerry.agents.tasks import Tasks
from skerry.agents.teams import Teams
from skerry.control.registry import Registry
from skerry.errors import (
    InvalidRequestError,
    NotFoundError,
    QuotaExceededError,
    SandboxNotFoundError,
    StoreError,
    TeamNotFoundError,
)
from skerry.models import CreateSandbox, CreateSnapshot, SandboxInfo, State
from skerry.runtime.runtime import Runtime
from tests.agents.tasks.conftest import sh
from tests.agents.tasks.scripted import ScriptedAgent, ScriptedRunning, script
from tests.agents.tasks.test_tasks import events

PREPARE = "git init -q && date +%N > born && git add -A && git -c user.name=a -c user.email=a@b commit -qm 1"


def asked(*members: tuple[str, list[dict[str, Any]]], **options: Any) -> CreateTeam:
    agents = [{"role": role, "message": script(*steps)} for role, steps in members]
    return CreateTeam.model_validate({"agents": agents, "agent": "scripted", "afterwards": "keep", **options})


async def done(teams: Teams, *members: tuple[str, list[dict[str, Any]]], **options: Any) -> TeamInfo:
    return await teams.wait((await teams.create(asked(*members, **options))).team_id)


async def test_each_has_a_sandbox_of_its_own_and_one_that_fails_fails_alone(teams: Teams, registry: Registry) -> None:
    team = await done(
        teams,
        ("writer", [{"say": "written"}, {"run": "echo w > w"}, {"cost": 1}]),
        ("breaker", [{"fail": "model_failed"}]),
        ("reader", [{"say": "read"}, {"cost": 0.5}]),
    )
    assert [agent.role for agent in team.agents] == ["writer", "breaker", "reader"]
    assert [agent.sandbox_id for agent in team.agents] == [f"team-{team.team_id}-agent-{place}" for place in range(3)]
    assert [agent.status for agent in team.agents] == ["completed", "failed", "completed"]
    assert [agent.response for agent in team.agents] == ["written", None, "read"]
    assert (team.status, team.cost, team.tokens.input) == ("partial", 1.5, 20)
    assert team.agents[1].error_code == "model_failed"
    assert team.agents[0].diff is not None
    assert [file.path for file in team.agents[0].diff.files] == ["w"]
    assert all(agent.id.startswith("task-") for agent in team.agents)


async def test_no_agent_is_started_before_all_have_their_machines(
    teams: Teams, registry: Registry, agent: ScriptedAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    labels = {"all": "together"}
    start = agent.start

    async def counted(runtime: Runtime, setup: Setup) -> ScriptedRunning:
        found.append(len((await registry.list(state=State.ACTIVE, labels=labels)).sandboxes))
        return await start(runtime, setup)

    monkeypatch.setattr(agent, "start", counted)
    await done(teams, *((f"agent {number}", [{"say": "x"}]) for number in range(4)), labels=labels)
    assert found == [4] * 4


async def test_one_that_gets_no_machine_is_not_waited_for(
    teams: Teams, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(muster, "PATIENCE", 600.0)
    create = registry.create

    async def refused(request: CreateSandbox) -> SandboxInfo:
        if str(request.id).endswith("agent-1"):
            raise QuotaExceededError("There are too many.")
        return await create(request)

    monkeypatch.setattr(registry, "create", refused)
    team = await done(teams, ("a", [{"say": "x"}]), ("b", [{"say": "x"}]))
    assert [each.status for each in team.agents] == ["completed", "failed"]


async def test_members_that_name_no_model_have_that_of_the_team(teams: Teams, agent: ScriptedAgent) -> None:
    request = asked(("a", [{"say": "x"}]), ("b", [{"say": "y"}]), model="house/usual")
    own = [request.agents[0], request.agents[1].model_copy(update={"model": "house/own"})]
    team = await teams.wait((await teams.create(request.model_copy(update={"agents": own}))).team_id)
    assert [each.model for each in team.agents] == ["house/usual", "house/own"]
    assert {prompt.model for _, prompt in agent.prompts} == {"house/usual", "house/own"}


async def test_more_than_may_work_at_a_time_are_not_all_said_to(
    teams: Teams, tasks: Tasks, registry: Registry, agent: ScriptedAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "settings", registry.settings.model_copy(update={"task_slots": 2}))
    monkeypatch.setattr(tasks, "_slots", asyncio.Semaphore(2))
    members = [(f"agent {number}", [{"hang": True}]) for number in range(3)]
    team = await teams.create(asked(*members, prepare="true"))
    await agent.hanging.wait()
    assert sorted(each.status for each in (await teams.get(team.team_id)).agents) == ["pending", "running", "running"]
    assert {each.status for each in (await teams.cancel(team.team_id)).agents} == {"cancelled"}


async def test_sandboxes_that_cannot_all_be_made_are_made_one_by_one(
    teams: Teams, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = registry.create

    async def refused(request: CreateSandbox) -> SandboxInfo:
        if str(request.id).endswith("agent-1"):
            raise QuotaExceededError("There are too many.")
        return await create(request)

    async def refused_all(snapshot: str, requests: Sequence[CreateSandbox]) -> list[SandboxInfo]:
        assert [str(request.id)[-1] for request in requests] == ["0", "1"]
        raise QuotaExceededError("There are too many.")

    monkeypatch.setattr(registry, "create", refused)
    monkeypatch.setattr(registry, "create_from", refused_all)
    team = await done(teams, ("a", [{"say": "x"}]), ("b", [{"say": "x"}]), prepare="true")
    assert [each.status for each in team.agents] == ["completed", "failed"]
    assert team.agents[1].error_code == QuotaExceededError.code


async def test_what_they_begin_with_is_made_once(teams: Teams, registry: Registry) -> None:
    work = [{"run": "cat born; git log --oneline | wc -l; echo mine >> mine"}]
    team = await done(teams, *((f"agent {number}", work) for number in range(4)), prepare=PREPARE)
    assert team.shared
    born = {await sh(registry, agent.sandbox_id, "cat /home/user/workspace/born") for agent in team.agents}
    assert len(born) == 1
    for agent in team.agents:
        assert (await events(teams._tasks, agent.id))[0].message == "Preparing, once for all of the team."
        assert agent.diff is not None
        assert ([file.path for file in agent.diff.files], agent.diff.error) == (["mine"], None)
    await _settled(teams)
    assert await registry.snapshots.list_() == []
    with pytest.raises(SandboxNotFoundError):
        await registry.get(f"team-{team.team_id}-base")


async def test_without_sharing_each_is_prepared_by_itself(teams: Teams, registry: Registry) -> None:
    team = await done(teams, ("a", [{"say": "x"}]), ("b", [{"say": "x"}]), prepare=PREPARE, shared=False)
    assert not team.shared
    born = {await sh(registry, agent.sandbox_id, "cat /home/user/workspace/born") for agent in team.agents}
    assert len(born) == 2


async def test_a_snapshot_that_was_prepared_before_is_used_and_kept(
    teams: Teams, tasks: Tasks, registry: Registry
) -> None:
    await sh(registry, "prepared", "mkdir -p /home/user/workspace; echo ready > /home/user/workspace/state")
    snapshot = await registry.snapshots.create("prepared", CreateSnapshot(name="prepared"))
    team = await done(teams, ("a", [{"run": "cat state > copy"}]), ("b", [{"say": "x"}]), snapshot="prepared")
    assert await sh(registry, team.agents[0].sandbox_id, "cat /home/user/workspace/copy") == "ready\n"
    again = await tasks.wait((await tasks.retry(team.agents[0].id)).id)
    assert again.diff is not None
    assert [(file.path, file.additions) for file in again.diff.files] == [("copy", 1)]
    assert await sh(registry, again.sandbox_id, "cat /home/user/workspace/copy") == "ready\n"
    await _settled(teams)
    assert (await registry.snapshots.get("prepared")).id == snapshot.id
    await registry.snapshots.delete("prepared", force=True)


async def test_what_cannot_be_prepared_fails_them_all_with_the_reason(
    teams: Teams, registry: Registry, agent: ScriptedAgent
) -> None:
    team = await done(teams, ("a", [{"say": "x"}]), ("b", [{"say": "x"}]), prepare="exit 7")
    assert [each.error_code for each in team.agents] == ["setup_failed"] * 2
    assert team.status == "failed"
    assert agent.started == []
    with pytest.raises(SandboxNotFoundError):
        await registry.get(f"team-{team.team_id}-base")


async def test_a_team_that_breaks_leaves_none_of_its_agents_waiting(
    teams: Teams, registry: Registry, agent: ScriptedAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: Any, **__: Any) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr("skerry.agents.teams.furnish", broken)
    team = await done(teams, ("a", [{"say": "x"}]), ("b", [{"say": "x"}]), prepare="true")
    assert [(each.status, each.error_code) for each in team.agents] == [("failed", "internal_error")] * 2
    with pytest.raises(SandboxNotFoundError):
        await registry.get(f"team-{team.team_id}-base")


async def test_a_snapshot_that_was_made_and_not_written_down_is_not_left(
    teams: Teams, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = registry.tasks.update_team

    async def forgetful(id: str, **changes: Any) -> None:
        if changes["step"] == "running":
            raise StoreError("The database went away.")
        await write(id, **changes)

    monkeypatch.setattr(registry.tasks, "update_team", forgetful)
    team = await done(teams, ("a", [{"say": "x"}]), ("b", [{"say": "x"}]), prepare="true")
    assert [agent.error_code for agent in team.agents] == ["store_unavailable"] * 2
    await _settled(teams)
    assert [each for each in await registry.snapshots.list_() if each.labels.get("team") == team.team_id] == []


async def test_cancelling_a_team_cancels_all_that_work(teams: Teams, agent: ScriptedAgent) -> None:
    begun = await teams.create(asked(("a", [{"hang": True}]), ("b", [{"hang": True}])))
    await agent.hanging.wait()
    team = await teams.cancel(begun.team_id)
    assert (team.status, [each.status for each in team.agents]) == ("cancelled", ["cancelled"] * 2)


async def test_cancelling_a_team_ends_what_it_is_prepared_with(
    teams: Teams, tasks: Tasks, registry: Registry, agent: ScriptedAgent
) -> None:
    begun = await teams.create(asked(("a", [{"say": "x"}]), ("b", [{"say": "x"}]), prepare="touch begun; sleep 1000"))
    first, second = (each.id for each in (await teams.get(begun.team_id)).agents)
    while not (await registry.list(prefix=f"team-{begun.team_id}-base")).sandboxes:
        await asyncio.sleep(0.02)
    while "begun" not in await sh(registry, f"team-{begun.team_id}-base", "ls /home/user/workspace || true"):
        await asyncio.sleep(0.02)
    assert (await tasks.cancel(first)).status == "cancelled"
    assert [each.status for each in (await teams.get(begun.team_id)).agents] == ["cancelled", "pending"]
    team = await teams.cancel(begun.team_id)
    assert (team.status, [each.error_code for each in team.agents]) == ("cancelled", ["cancelled"] * 2)
    assert (await events(tasks, second))[-1].type == "error"
    await _settled(teams)
    with pytest.raises(SandboxNotFoundError):
        await registry.get(f"team-{begun.team_id}-base")
    assert agent.started == []


async def test_a_team_whose_server_ended_goes_on_and_its_snapshot_goes(
    registry: Registry, agent: ScriptedAgent
) -> None:
    tasks = Tasks(registry, {"scripted": agent})
    teams = Teams(registry, tasks)
    await tasks.open()
    begun = await teams.create(asked(("a", [{"hang": True}]), ("b", [{"hang": True}]), prepare=PREPARE))
    await agent.hanging.wait()
    await teams.close()
    await tasks.close()
    assert len(await registry.snapshots.list_()) == 1
    tasks = Tasks(registry, {"scripted": agent})
    teams = Teams(registry, tasks)
    await tasks.open()
    await teams.open()
    try:
        team = await teams.cancel(begun.team_id)
        assert team.status == "cancelled"
        await _settled(teams)
        assert await registry.snapshots.list_() == []
    finally:
        await teams.close()
        await tasks.close()


async def test_a_team_that_makes_no_sense_is_refused(teams: Teams, tasks: Tasks) -> None:
    with pytest.raises(InvalidRequestError):
        await teams.create(asked(("a", [{"say": "x"}]), agent="nobody"))
    before = (await tasks.list(1)).total
    for odd in ({"image": "no-such"}, {"snapshot": "no-such"}, {"toolboxes": ["no-such"]}, {"env": {"A=B": "x"}}):
        with pytest.raises((InvalidRequestError, NotFoundError)):
            await teams.create(asked(("a", [{"say": "x"}]), ("b", [{"say": "x"}]), **odd))
    assert (await tasks.list(1)).total == before
    with pytest.raises(TeamNotFoundError):
        await teams.get("nothing")


async def _settled(teams: Teams) -> None:
    for task in list(teams._running.values()):
        await task
