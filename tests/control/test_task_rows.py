from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from skerry.control.schedule_rows import Occurrence, ScheduleRow
from skerry.control.store import Store
from skerry.control.task_rows import TaskRow, TeamRow
from skerry.errors import InvalidRequestError
from skerry.models import now

NOON = datetime(2026, 3, 1, 12, 0, 0, 123456, tzinfo=UTC)


def task(id: str = "task-1", **fields: Any) -> TaskRow:
    values = {"node": "here", "message": "do it", "provider": "local", "agent": "opencode", "created_at": NOON} | fields
    return TaskRow(id=id, **values)


async def test_a_task_is_kept_as_it_is(store: Store) -> None:
    row = task(base={"tree": "x", "commit": None}, patch=b"\0\xff", tokens={"input": 3}, artifacts=[{"path": "a"}])
    await store.tasks.insert(row)
    assert await store.tasks.get("task-1") == row
    assert await store.tasks.get("task-1", "somebody") is None
    changed = await store.tasks.update("task-1", status="running", response="with a NUL \0 in it")
    assert changed is not None
    assert changed.response == "with a NUL \ufffd in it"


async def test_what_has_ended_is_not_opened_again(store: Store) -> None:
    await store.tasks.insert(task(status="completed"))
    assert await store.tasks.update("task-1", unless_ended=True, status="failed") is None
    assert (await store.tasks.get("task-1")).status == "completed"  # type: ignore[union-attr]
    assert not await store.tasks.adopt("task-1", None, "me")


async def test_a_task_is_taken_over_by_one_only(store: Store) -> None:
    await store.tasks.insert(task(status="running", runner="dead"))
    taken = await asyncio.gather(*(store.tasks.adopt("task-1", "dead", f"runner-{number}") for number in range(8)))
    assert sum(taken) == 1
    assert [row.id for row in await store.tasks.open_of("here", but="somebody")] == ["task-1"]
    assert await store.tasks.open_of("there", but="somebody") == []
    keeper = (await store.tasks.get("task-1")).runner  # type: ignore[union-attr]
    assert await store.tasks.open_of("here", but=keeper or "") == []


async def test_what_a_server_left_open_that_nobody_hears_of_is_found(store: Store) -> None:
    for node in ("here", "there", "quiet"):
        await store.tasks.insert(task(f"{node}-open", node=node, status="running"))
        await store.tasks.insert(task(f"{node}-ended", node=node, status="completed"))
    late = NOON + timedelta(hours=3)
    await store.tasks.insert(task("quiet-new", node="quiet", created_at=late))
    await store.introduce("quiet", "http://quiet", None)
    await store.seen("quiet", NOON)
    await store.seen("there", NOON)
    await store.seen("there", late)
    await store.seen("here", NOON)
    assert await store.tasks.abandoned("here", NOON + timedelta(hours=2)) == ["quiet-open"]
    assert await store.tasks.abandoned("here", NOON - timedelta(hours=2)) == []
    assert await store.server("quiet") == ("http://quiet", None)


async def test_what_no_database_holds_is_refused_and_what_an_agent_says_is_kept_without(store: Store) -> None:
    for odd in ({"user_id": "a\0b"}, {"message": "\ud800"}, {"request": {"labels": {"a": "\0"}}}):
        with pytest.raises(InvalidRequestError):
            await store.tasks.insert(task(**odd))
    with pytest.raises(InvalidRequestError):
        await store.tasks.get("task-\0")
    with pytest.raises(InvalidRequestError):
        await store.schedules.insert(schedule(name="\0"))
    await store.tasks.insert(task())
    said = {"content": "\ud83d", "event": {"output": "a\0b", "args": ["\0"], "cost": 0.5}}
    await store.tasks.add_events("task-1", [("tool_call", NOON, said)])
    (event,) = await store.tasks.events("task-1")
    assert event.data == {"content": "?", "event": {"output": "a\ufffdb", "args": ["\ufffd"], "cost": 0.5}}


async def test_of_a_workers_sandbox_the_latest_word_counts(store: Store) -> None:
    async def known() -> list[tuple[str, datetime]]:
        return [(row.status, row.created_at) for row in await store.workers.list()]

    later = NOON + timedelta(hours=1)
    assert await store.workers.put("cf", NOON, {"status": "running", "user_id": "u"})
    assert not await store.workers.put("cf", NOON - timedelta(hours=1), {"status": "stopped"})
    await store.workers.delete("cf", NOON - timedelta(hours=1))
    assert await known() == [("running", NOON)]
    await store.workers.delete("cf", later)
    assert not await store.workers.put("cf", NOON, {"status": "stopped"})
    assert await known() == []
    assert await store.workers.put("cf", later, {"status": "running"})
    assert await known() == [("running", later)]
    assert [row.user_id for row in await store.workers.list()] == [None]


async def test_a_team_is_there_with_all_its_tasks_or_not_at_all(store: Store) -> None:
    await store.tasks.insert(task("task-0"))
    members = [task(f"task-{number}", team_id="team", place=2 - number) for number in range(3)]
    with pytest.raises(IntegrityError):
        await store.tasks.insert(*members, team=TeamRow("team", "here", {}))
    assert await store.tasks.team("team") is None
    await store.tasks.insert(*members[1:], team=TeamRow("team", "here", {"agents": []}))
    found = await store.tasks.team("team")
    assert found is not None
    assert [row.id for row in found[1]] == ["task-2", "task-1"]


async def test_events_have_a_cursor_and_go_with_their_task(store: Store) -> None:
    await store.tasks.insert(task(completed_at=NOON, status="failed"))
    await store.tasks.add_events("task-1", [("start", NOON, {}), ("chunk", NOON, {"content": "x"}), ("done", NOON, {})])
    first, second, third = await store.tasks.events("task-1")
    assert [event.type for event in await store.tasks.events("task-1", first.id)] == ["chunk", "done"]
    assert second.data == {"content": "x"}
    assert await store.tasks.events("task-1", third.id) == []
    await store.tasks.keep("task-1", "out/a.bin", b"\0a")
    await store.tasks.keep("task-1", "out/a.bin", b"\0b")
    assert await store.tasks.artifact("task-1", "out/a.bin") == b"\0b"
    await store.tasks.expire(NOON)
    assert await store.tasks.get("task-1") is not None
    await store.tasks.expire(NOON + timedelta(seconds=1))
    assert await store.tasks.get("task-1") is None
    assert await store.tasks.events("task-1") == []
    assert await store.tasks.artifact("task-1", "out/a.bin") is None
    await store.tasks.add_events("task-1", [("done", NOON, {})])  # of a task that is forgotten: nothing


async def test_the_latest_come_first_and_are_counted(store: Store) -> None:
    for number in range(5):
        moment = NOON + timedelta(minutes=number)
        await store.tasks.insert(task(f"task-{number}", created_at=moment, owner="ada" if number % 2 else "local"))
    rows, total = await store.tasks.list("local", limit=2)
    assert ([row.id for row in rows], total) == (["task-4", "task-2"], 3)
    rows, _ = await store.tasks.list("local", limit=2, offset=2)
    assert [row.id for row in rows] == ["task-0"]
    assert (await store.tasks.list("ada", limit=10, status="failed"))[1] == 0
    assert await store.tasks.count("here") == {"pending": 5}


async def test_what_was_spent_is_told_by_owner_and_time(store: Store) -> None:
    await store.tasks.insert(task(owner="ada", status="completed", cost=0.5, tokens={"input": 7}, completed_at=NOON))
    (spent,) = await store.tasks.spent("ada", NOON, NOON + timedelta(days=1))
    assert (spent.cost, spent.tokens, spent.completed_at) == (0.5, {"input": 7}, NOON)
    assert await store.tasks.spent("bob", NOON, NOON + timedelta(days=1)) == []


async def test_a_wish_reaches_the_process_that_works_on_it(store: Store) -> None:
    await store.tasks.insert(task(status="running", runner="me"))
    assert await store.tasks.to_cancel("me") == []
    await store.tasks.update("task-1", cancel=True)
    assert (await store.tasks.to_cancel("me"), await store.tasks.to_cancel("you")) == (["task-1"], [])


# -- schedules ---------------------------------------------------------------------------------------------------------


def schedule(**fields: Any) -> ScheduleRow:
    values = {"name": "s", "cron": "@daily", "timezone": "UTC", "kind": "task", "request": {"message": "x"}}
    return ScheduleRow(id="sched-1", **(values | {"next_at": NOON, "created_at": NOON} | fields))


async def test_each_time_is_claimed_once_and_its_task_with_it(store: Store) -> None:
    await store.schedules.insert(schedule())
    assert await store.schedules.next_due(NOON - timedelta(seconds=1)) == NOON
    assert await store.schedules.next_due(NOON) is None
    (row,) = await store.schedules.due(NOON)

    async def claim(number: int) -> bool:
        async def put(connection: AsyncConnection) -> None:
            await store.tasks.insert_in(connection, task(f"task-{number}", schedule_id="sched-1"))

        occurrence = Occurrence(NOON, "started", f"task-{number}")
        return await store.schedules.advance(row, NOON + timedelta(days=1), [occurrence], put)

    claimed = await asyncio.gather(*(claim(number) for number in range(6)))
    assert sum(claimed) == 1
    assert (await store.tasks.list(None, limit=10, schedule="sched-1"))[1] == 1
    (run,) = await store.schedules.runs("sched-1", None, 10)
    assert (run.outcome, run.due_at, run.status) == ("started", NOON, "pending")
    assert await store.schedules.due(NOON) == []
    assert await store.tasks.running("sched-1")


async def test_what_cannot_be_put_down_claims_nothing(store: Store) -> None:
    await store.schedules.insert(schedule())
    (row,) = await store.schedules.due(NOON)

    async def fail(connection: AsyncConnection) -> None:
        raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError):
        await store.schedules.advance(row, None, [Occurrence(NOON, "started")], fail)
    assert await store.schedules.due(NOON) == [row]
    assert list(await store.schedules.runs("sched-1", None, 10)) == []


async def test_a_paused_one_is_not_due_and_history_is_bounded(store: Store) -> None:
    await store.schedules.insert(schedule(paused=True))
    assert await store.schedules.due(NOON) == []
    assert await store.schedules.next_due(NOON - timedelta(seconds=1)) is None
    row = await store.schedules.update("sched-1", paused=False)
    for day in range(4):
        assert row is not None
        due = NOON + timedelta(days=day)

        async def nothing(connection: AsyncConnection) -> None:
            return None

        await store.schedules.advance(row, due + timedelta(days=1), [Occurrence(due, "skipped", reason="x")], nothing)
        row = await store.schedules.get("sched-1", "local")
    await store.schedules.trim("sched-1", 2)
    runs = await store.schedules.runs("sched-1", None, 10)
    assert [run.due_at.day for run in runs] == [4, 3]
    assert [run.due_at.day for run in await store.schedules.runs("sched-1", runs[0].id, 10)] == [3]
    await store.schedules.delete("sched-1")
    assert list(await store.schedules.runs("sched-1", None, 10)) == []


# -- workers -----------------------------------------------------------------------------------------------------------


async def test_a_later_word_of_a_worker_counts(store: Store) -> None:
    later = now()
    assert await store.workers.put("cf", later, {"status": "running", "user_id": "ada"})
    assert not await store.workers.put("cf", later - timedelta(seconds=1), {"status": "sleeping"})
    (row,) = await store.workers.list(["ada"])
    assert (row.status, row.updated_at) == ("running", later)
    assert await store.workers.list(["bob"]) == []
    await store.workers.delete("cf", later)
    assert await store.workers.list(["ada"]) == []
