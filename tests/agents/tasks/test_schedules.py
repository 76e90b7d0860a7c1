from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from skerry.agents.schedules import Schedules
from skerry.agents.task_models import CreateSchedule, ScheduleRun, UpdateSchedule
from skerry.agents.tasks import Tasks
from skerry.agents.teams import Teams
from skerry.control.actor import Caller, caller
from skerry.control.registry import Registry
from skerry.errors import InvalidRequestError, NotFoundError, ScheduleNotFoundError
from skerry.models import KeyScope, now
from tests.agents.tasks.clock import Clock
from tests.agents.tasks.scripted import ScriptedAgent, script


def asked(cron: str = "0 9 * * *", **options: Any) -> CreateSchedule:
    task = {"message": script({"say": "good morning"}), "agent": "scripted", "afterwards": "destroy"}
    return CreateSchedule.model_validate({"name": "morning", "cron": cron, "task": task, **options})


async def outcomes(schedules: Schedules, id: str) -> list[tuple[str, str, str | None]]:
    """When it was due and what became of it, oldest first."""
    runs = (await schedules.history(id)).runs
    return [(f"{run.due_at:%d %H:%M}", run.outcome, run.reason) for run in reversed(runs)]


async def test_a_task_is_begun_when_it_is_due_and_not_before(schedules: Schedules, tasks: Tasks, clock: Clock) -> None:
    info = await schedules.create(asked(timezone="Europe/Berlin"))
    assert f"{info.next_at:%d %H:%M}" == "03 08:00"
    clock.set("2026-03-03 07:59:59")
    await schedules.look()
    assert await outcomes(schedules, info.id) == []
    clock.set("2026-03-03 08:00")
    await schedules.look()
    await schedules.look()
    assert await outcomes(schedules, info.id) == [("03 08:00", "started", None)]
    run = (await schedules.history(info.id)).runs[0]
    assert run.task_id is not None
    task = await tasks.wait(run.task_id)
    assert (task.status, task.response, task.schedule_id) == ("completed", "good morning", info.id)
    assert (await schedules.history(info.id)).runs[0].status == "completed"
    assert f"{(await schedules.get(info.id)).next_at:%d %H:%M}" == "04 08:00"
    await schedules.delete(info.id)


async def pages(schedules: Schedules, id: str) -> list[list[ScheduleRun]]:
    found, cursor = [], None
    while True:
        page = await schedules.history(id, cursor, 200)
        found.append(page.runs)
        if (cursor := page.next_cursor) is None:
            return found


@pytest.mark.parametrize(
    ("missed", "expected"),
    [
        ("skip", ["skipped", "skipped", "skipped"]),
        ("once", ["skipped", "skipped", "started"]),
        ("all", ["started", "started", "started"]),
    ],
)
async def test_times_that_passed_while_no_server_ran_are_treated_as_wished(
    schedules: Schedules, tasks: Tasks, clock: Clock, missed: str, expected: list[str]
) -> None:
    info = await schedules.create(asked(missed=missed, overlap="allow"))
    clock.set("2026-03-04 12:00")
    await schedules.look()
    assert [outcome for _, outcome, _ in await outcomes(schedules, info.id)] == expected
    for run in (await schedules.history(info.id)).runs:
        if run.task_id is not None:
            await tasks.wait(run.task_id)
    assert f"{(await schedules.get(info.id)).next_at:%d %H:%M}" == "05 09:00"
    await schedules.delete(info.id)


async def test_years_of_missed_minutes_are_not_all_made_up_for(
    schedules: Schedules, tasks: Tasks, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skerry.agents.schedules.MOST_MISSED", 2)
    info = await schedules.create(asked("* * * * *", missed="all", overlap="allow"))
    clock.set("2026-03-04 12:00:30")
    await schedules.look()
    runs = (await schedules.history(info.id)).runs
    assert [(f"{run.due_at:%d %H:%M}", run.outcome) for run in reversed(runs)][-3:] == [
        ("04 11:58", "skipped"),
        ("04 11:59", "started"),
        ("04 12:00", "started"),
    ]
    # Those that are not made up for are on record all the same, as far as any are.
    assert len(runs) == 50
    everything = [run for page in await pages(schedules, info.id) for run in page]
    assert len(everything) == 1000
    assert {run.outcome for run in everything[2:]} == {"skipped"}
    await asyncio.gather(*(tasks.wait(run.task_id) for run in runs if run.task_id))
    await schedules.delete(info.id)


async def test_a_run_that_has_not_ended_is_not_begun_again(
    schedules: Schedules, tasks: Tasks, clock: Clock, agent: ScriptedAgent
) -> None:
    task = {"message": script({"hang": True}), "agent": "scripted", "afterwards": "destroy"}
    info = await schedules.create(asked(task=task))
    clock.set("2026-03-02 09:00")
    await schedules.look()
    await agent.hanging.wait()
    clock.set("2026-03-03 09:00")
    await schedules.look()
    assert await outcomes(schedules, info.id) == [
        ("02 09:00", "started", None),
        ("03 09:00", "skipped", "The run before has not ended."),
    ]
    await tasks.cancel((await schedules.history(info.id)).runs[-1].task_id or "")
    await schedules.delete(info.id)


async def test_a_paused_schedule_does_nothing_and_makes_up_for_nothing(schedules: Schedules, clock: Clock) -> None:
    info = await schedules.create(asked(missed="all"))
    paused = await schedules.update(info.id, UpdateSchedule(paused=True))
    assert paused.next_at is None
    clock.set("2026-03-05 12:00")
    await schedules.look()
    again = await schedules.update(info.id, UpdateSchedule(paused=False))
    await schedules.look()
    assert await outcomes(schedules, info.id) == []
    assert f"{again.next_at:%d %H:%M}" == "06 09:00"
    moved = await schedules.update(info.id, UpdateSchedule(cron="30 10 * * *", name="later"))
    assert (f"{moved.next_at:%d %H:%M}", moved.name) == ("06 10:30", "later")
    await schedules.delete(info.id)


async def test_servers_on_one_store_run_each_time_once(
    registry: Registry, tasks: Tasks, teams: Teams, clock: Clock
) -> None:
    servers = [Schedules(registry, tasks, teams, clock) for _ in range(5)]
    info = await servers[0].create(asked("*/10 * * * *", missed="all", overlap="allow"))
    for moment in ("09:00", "09:10", "09:20"):
        clock.set(f"2026-03-02 {moment}")
        await asyncio.gather(*(server.look() for server in servers))
    runs = (await servers[0].history(info.id)).runs
    assert [f"{run.due_at:%H:%M}" for run in reversed(runs)] == ["09:00", "09:10", "09:20"]
    assert (await tasks.list(50, schedule=info.id)).total == 3
    await asyncio.gather(*(tasks.wait(run.task_id or "") for run in runs))
    await servers[0].delete(info.id)


async def test_a_team_can_be_scheduled_too(schedules: Schedules, teams: Teams, clock: Clock) -> None:
    members = [{"role": role, "message": script({"say": role})} for role in ("reader", "writer")]
    team = {"agents": members, "agent": "scripted", "afterwards": "destroy"}
    info = await schedules.create(asked(task=None, team=team))
    assert info.message == "reader, writer"
    clock.set("2026-03-02 09:00")
    await schedules.look()
    run = (await schedules.history(info.id)).runs[0]
    assert run.team_id is not None
    assert [agent.response for agent in (await teams.wait(run.team_id)).agents] == ["reader", "writer"]
    await schedules.delete(info.id)


async def test_the_history_says_what_became_of_all_of_a_team(schedules: Schedules, teams: Teams, clock: Clock) -> None:
    members = [{"role": "one", "message": script({"say": "x"})}, {"role": "two", "message": script({"fail": "x"})}]
    team = {"agents": members, "agent": "scripted", "afterwards": "destroy"}
    info = await schedules.create(asked(task=None, team=team))
    clock.set("2026-03-02 09:00")
    await schedules.look()
    run = (await schedules.history(info.id)).runs[0]
    assert (await teams.wait(run.team_id or "")).status == "partial"
    assert (await schedules.history(info.id)).runs[0].status == "partial"
    await schedules.delete(info.id)


async def test_a_schedule_fires_by_the_real_clock(registry: Registry, tasks: Tasks, teams: Teams) -> None:
    schedules = Schedules(registry, tasks, teams)
    info = await schedules.create(asked("* * * * *"))
    # Due in a moment, and not at the next full minute, which tests cannot wait for.
    await registry.schedules.update(info.id, next_at=now() + timedelta(seconds=0.3))
    schedules.open()
    try:
        async with asyncio.timeout(20):
            while not (runs := (await schedules.history(info.id)).runs):
                await asyncio.sleep(0.05)
        assert (await tasks.wait(runs[0].task_id or "")).response == "good morning"
    finally:
        await schedules.close()
        await schedules.delete(info.id)


async def test_one_that_cannot_be_read_any_more_holds_up_no_other(
    schedules: Schedules, registry: Registry, tasks: Tasks, clock: Clock
) -> None:
    odd, other, good = [await schedules.create(asked()) for _ in range(3)]
    await registry.schedules.update(odd.id, request={"message": "x", "colour": "red"})
    newer = registry.vault.seal('[{}, null, null, null, "more"]', f"task/{other.id}")
    await registry.schedules.update(other.id, secrets=newer)
    clock.set("2026-03-02 09:00")
    await schedules.look()
    runs = (await schedules.history(odd.id)).runs
    assert [(run.outcome, run.reason) for run in runs] == [("failed", "colour: Extra inputs are not permitted.")]
    (run,) = (await schedules.history(other.id)).runs
    assert run.outcome == "failed"
    assert "of another version of Skerry" in (run.reason or "")
    (run,) = (await schedules.history(good.id)).runs
    assert run.task_id is not None
    await tasks.wait(run.task_id)
    for each in (odd, other, good):
        await registry.schedules.delete(each.id)


async def test_one_that_cannot_be_seen_to_is_tried_again_and_not_without_a_pause(
    registry: Registry, tasks: Tasks, teams: Teams, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedules = Schedules(registry, tasks, teams)
    odd, good = await schedules.create(asked()), await schedules.create(asked())
    # Of a server that knows more zones than this one.
    await registry.schedules.update(odd.id, timezone="Mars/Olympus", next_at=now() - timedelta(seconds=5))
    looks, look = 0, schedules.look

    async def counted() -> None:
        nonlocal looks
        looks += 1
        await look()

    monkeypatch.setattr(schedules, "look", counted)
    schedules.open()
    try:
        await asyncio.sleep(0.5)
        assert looks == 1
        monkeypatch.setattr("skerry.agents.schedules.POLL", 0.1)
        await schedules.update(good.id, UpdateSchedule(missed="skip"))
        await registry.schedules.update(good.id, next_at=now() + timedelta(seconds=0.2))
        async with asyncio.timeout(20):
            while not (runs := (await schedules.history(good.id)).runs):
                await asyncio.sleep(0.05)
        await tasks.wait(runs[0].task_id or "")
    finally:
        await schedules.close()
        for each in (odd, good):
            await registry.schedules.delete(each.id)


async def test_one_can_be_run_out_of_its_turn(schedules: Schedules, tasks: Tasks) -> None:
    info = await schedules.create(asked())
    run = await schedules.run_now(info.id)
    assert (await tasks.wait(run.task_id or "")).status == "completed"
    assert (await schedules.get(info.id)).next_at == info.next_at
    await schedules.delete(info.id)


async def test_secrets_of_a_schedule_are_kept_sealed_and_reach_the_door(
    schedules: Schedules, tasks: Tasks, registry: Registry, clock: Clock
) -> None:
    task = {
        "message": script({"say": "x"}),
        "agent": "scripted",
        "afterwards": "keep",
        "egress": "allowlist",
        "secrets": {"api.test": {"value": "sk-very-secret"}},
    }
    info = await schedules.create(asked(task=task))
    assert "sk-very-secret" not in str(info)
    assert "sk-very-secret" not in str(await registry.schedules.get(info.id, "local"))
    clock.set("2026-03-02 09:00")
    await schedules.look()
    done = await tasks.wait((await schedules.history(info.id)).runs[0].task_id or "")
    assert done.status == "completed", done.error
    assert "api.test" in (await registry.egress(done.sandbox_id or "")).secrets
    await schedules.delete(info.id)


@pytest.mark.parametrize(
    "options",
    [
        {"cron": "61 * * * *"},
        {"timezone": "Mars/Base"},
        {"task": {"message": "x", "agent": "nobody"}},
        {"task": {"message": "x", "agent": "scripted", "image": "no-such"}},
        {"task": None, "team": {"agents": [{"role": "a", "message": "x"}], "agent": "scripted", "snapshot": "no-such"}},
    ],
)
async def test_what_makes_no_sense_is_refused(schedules: Schedules, options: dict[str, Any]) -> None:
    before = await schedules.list()
    with pytest.raises((InvalidRequestError, NotFoundError)):
        await schedules.create(asked(**options))
    assert await schedules.list() == before


async def test_another_owners_schedule_is_not_there(schedules: Schedules) -> None:
    info = await schedules.create(asked())
    token = caller.set(Caller("mallory", owner="mallory", scope=KeyScope.USE))
    try:
        with pytest.raises(ScheduleNotFoundError):
            await schedules.get(info.id)
        assert await schedules.list() == []
    finally:
        caller.reset(token)
    await schedules.delete(info.id)
