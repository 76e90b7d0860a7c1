from __future__ import annotations

import asyncio
import random
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from skerry.control.store import SandboxRow, Store
from skerry.errors import InvalidRequestError, SandboxExistsError, SandboxNotFoundError
from skerry.models import ProcessInfo, ProcessStatus, State, now

NOON = datetime(2026, 3, 1, 12, 0, 0, 123456, tzinfo=UTC)


def sandbox(id: str = "demo", **fields: Any) -> SandboxRow:
    values: dict[str, Any] = {"node": "here", "state": State.ACTIVE, "image": "host", "created_at": NOON} | fields
    return SandboxRow(id=id, **values)


def process(id: str = "p1", **fields: Any) -> ProcessInfo:
    values: dict[str, Any] = {"command": "sleep 9", "status": ProcessStatus.RUNNING, "start_time": NOON} | fields
    return ProcessInfo(id=id, **values)


async def ids(store: Store, **filters: Any) -> list[str]:
    return [row.id for row in await store.list_sandboxes(**filters)]


# -- sandboxes ---------------------------------------------------------------------------------------------------------


async def test_a_sandbox_comes_back_as_it_was_stored(store: Store) -> None:
    row = sandbox(
        env={"TOKEN": "ключ 🔑", "EMPTY": ""},
        labels={"team": "a"},
        limits={"memory_mb": 512, "cpus": 1.5, "pids": None},
        sleep_after=90.5,
        ephemeral=True,
        started_at=NOON + timedelta(microseconds=1),
        last_active_at=NOON + timedelta(days=1),
        starts=3,
        last_stop="It was idle.",
    )
    await store.insert_sandbox(row)
    assert await store.get_sandbox("demo") == row


async def test_a_sandbox_with_nothing_set_comes_back_with_nothing_set(store: Store) -> None:
    row = sandbox()
    await store.insert_sandbox(row)
    assert await store.get_sandbox("demo") == row


async def test_an_unknown_sandbox_is_none(store: Store) -> None:
    assert await store.get_sandbox("nobody") is None


async def test_an_id_can_be_taken_only_once(store: Store) -> None:
    await store.insert_sandbox(sandbox(image="first"))
    with pytest.raises(SandboxExistsError):
        await store.insert_sandbox(sandbox(image="second"))
    row = await store.get_sandbox("demo")
    assert row is not None
    assert row.image == "first"


async def test_of_many_who_take_an_id_at_once_one_gets_it(store: Store) -> None:
    results = await asyncio.gather(*(store.insert_sandbox(sandbox()) for _ in range(20)), return_exceptions=True)
    assert results.count(None) == 1
    assert sum(isinstance(result, SandboxExistsError) for result in results) == 19


async def test_update_changes_what_is_named_and_returns_the_whole(store: Store) -> None:
    await store.insert_sandbox(sandbox(env={"A": "1"}, labels={"x": "y"}, sleep_after=5.0))
    row = await store.update_sandbox("demo", state=State.HIBERNATED, labels={"z": "w"}, sleep_after=None, starts=7)
    assert row == sandbox(state=State.HIBERNATED, env={"A": "1"}, labels={"z": "w"}, starts=7)
    assert await store.get_sandbox("demo") == row


async def test_updating_an_unknown_sandbox_is_not_found(store: Store) -> None:
    with pytest.raises(SandboxNotFoundError):
        await store.update_sandbox("nobody", starts=1)


@pytest.mark.parametrize("changes", [{"colour": "red"}, {"id": "other"}, {}])
async def test_update_refuses_what_is_no_column(store: Store, changes: dict[str, str]) -> None:
    await store.insert_sandbox(sandbox())
    with pytest.raises(TypeError):
        await store.update_sandbox("demo", **changes)


async def test_times_are_utc_both_ways(store: Store) -> None:
    there = timezone(timedelta(hours=5, minutes=30))
    await store.insert_sandbox(sandbox(started_at=NOON.astimezone(there)))
    row = await store.get_sandbox("demo")
    assert row is not None
    assert row.started_at == NOON
    assert row.started_at is not None
    assert row.started_at.utcoffset() == timedelta(0)


async def test_a_time_without_a_zone_is_refused(store: Store) -> None:
    with pytest.raises(Exception, match="without a time zone"):
        await store.insert_sandbox(sandbox(created_at=datetime(2026, 1, 1)))


@pytest.mark.parametrize(
    "fields", [{"env": {"A": "a\0b"}}, {"labels": {"\ud800": ""}}, {"limits": {"cpus": float("inf")}}]
)
async def test_what_one_database_could_not_hold_is_refused_by_both(store: Store, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        await store.insert_sandbox(sandbox(**fields))
    await store.insert_sandbox(sandbox())
    with pytest.raises(InvalidRequestError):
        await store.update_sandbox("demo", **fields)


# -- lists -------------------------------------------------------------------------------------------------------------


async def test_pages_follow_each_other_by_id_without_gap_or_overlap(store: Store) -> None:
    names = ["a", "a-b", "a_b", "ab", "a0", "b", "z9", "0"]
    for name in random.sample(names, len(names)):
        await store.insert_sandbox(sandbox(name))
    seen: list[str] = []
    while page := await ids(store, limit=3, after=seen[-1] if seen else None):
        assert len(page) <= 3
        seen += page
    assert seen == sorted(names)


async def test_a_page_goes_on_after_an_id_that_is_gone(store: Store) -> None:
    for name in "abc":
        await store.insert_sandbox(sandbox(name))
    await store.delete_sandbox("b")
    assert await ids(store, after="b") == ["c"]


async def test_lists_are_filtered_by_state_and_image(store: Store) -> None:
    await store.insert_sandbox(sandbox("a", state=State.ACTIVE, image="host"))
    await store.insert_sandbox(sandbox("b", state=State.HIBERNATED, image="host"))
    await store.insert_sandbox(sandbox("c", state=State.ACTIVE, image="h%st"))
    assert await ids(store, state=State.ACTIVE) == ["a", "c"]
    assert await ids(store, image="host") == ["a", "b"]
    assert await ids(store, image="h%st") == ["c"]
    assert await ids(store, state=State.HIBERNATED, image="h%st") == []
    assert await store.count_by_image("host") == 2
    assert await store.count_by_image("none") == 0


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        ("a_", ["a_1", "a_2"]),
        ("a", ["a-1", "a1", "a_1", "a_2"]),
        ("%", []),
        ("_", []),
        ("a%", []),
        ("A", []),
        ("a_1x", []),
        ("\\", []),
        ("é", []),
        ("", ["a-1", "a1", "a_1", "a_2", "b_1"]),
    ],
)
async def test_a_prefix_is_taken_literally(store: Store, prefix: str, expected: list[str]) -> None:
    for name in ("a_1", "a_2", "a-1", "a1", "b_1"):
        await store.insert_sandbox(sandbox(name))
    assert await ids(store, prefix=prefix) == expected


async def test_labels_must_all_match(store: Store) -> None:
    await store.insert_sandbox(sandbox("a", labels={"team": "red", "tier": "1"}))
    await store.insert_sandbox(sandbox("b", labels={"team": "red", "tier": "2"}))
    await store.insert_sandbox(sandbox("c"))
    assert await ids(store, labels={"team": "red"}) == ["a", "b"]
    assert await ids(store, labels={"team": "red", "tier": "2"}) == ["b"]
    assert await ids(store, labels={"team": "red", "tier": "3"}) == []
    assert await ids(store, labels={"team": "Red"}) == []
    assert await ids(store, labels={}) == ["a", "b", "c"]


@pytest.mark.parametrize("text", ['a"b', "a.b", "a\\b", "$", "a'b", "é🔑", "%", "[0]", "", "1", "true", "null", "a\nb"])
async def test_labels_may_be_any_text(store: Store, text: str) -> None:
    await store.insert_sandbox(sandbox("a", labels={text: text}))
    await store.insert_sandbox(sandbox("b", labels={"x" + text: text}))
    assert await ids(store, labels={text: text}) == ["a"]
    assert await ids(store, labels={text: text + "x"}) == []


@pytest.mark.parametrize("filters", [{"prefix": "\0"}, {"image": "\0"}, {"after": "\0"}, {"labels": {"a": "\0"}}])
async def test_a_filter_that_is_no_text_is_refused(store: Store, filters: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError):
        await ids(store, **filters)


async def test_a_node_sees_all_of_its_own(store: Store) -> None:
    for number in range(120):
        await store.insert_sandbox(sandbox(f"s{number:03}", node="here" if number % 2 else "there"))
    mine = await store.all_sandboxes("here")
    assert [row.id for row in mine] == [f"s{number:03}" for number in range(1, 120, 2)]


# -- events ------------------------------------------------------------------------------------------------------------


async def test_events_are_numbered_upwards_and_read_from_where_one_was(store: Store) -> None:
    await store.insert_sandbox(sandbox())
    await store.insert_sandbox(sandbox("other"))
    made = [await store.add_event("demo", "started", f"number {n}") for n in range(5)]
    await store.add_event("other", "started", "not ours")
    assert [event.id for event in made] == sorted({event.id for event in made})
    assert await store.events("demo", 0, 100) == made
    assert await store.events("demo", made[1].id, 2) == made[2:4]
    assert await store.events("demo", made[-1].id, 100) == []
    assert made[0].at.utcoffset() == timedelta(0)


@pytest.mark.parametrize("after", [-1, -(2**70), 2**63 - 1, 2**70])
async def test_events_after_any_number_can_be_asked_for(store: Store, after: int) -> None:
    await store.insert_sandbox(sandbox())
    event = await store.add_event("demo", "started", "")
    assert await store.events("demo", after, 100) == ([event] if after < 0 else [])


async def test_an_event_number_is_never_used_again(store: Store) -> None:
    await store.insert_sandbox(sandbox())
    first = await store.add_event("demo", "started", "")
    await store.delete_sandbox("demo")
    await store.insert_sandbox(sandbox())
    assert (await store.add_event("demo", "started", "")).id > first.id


async def test_an_event_says_who_why_and_how_long(store: Store) -> None:
    more = {"by": "idle timer", "took": 1.5, "from_state": State.ACTIVE, "to_state": State.FROZEN}
    made = await store.add_event("demo", "frozen", "Nobody used it.", details={"processes": 3}, **more)
    assert await store.events("demo") == [made]
    assert (made.by, made.took, made.details) == ("idle timer", 1.5, {"processes": 3})
    assert (made.from_state, made.to_state) == (State.ACTIVE, State.FROZEN)


async def test_only_the_latest_events_are_kept(store: Store) -> None:
    for name in ("demo", "other"):
        for n in range(6):
            await store.add_event(name, "started", str(n))
    await store.trim_events("demo", 4)
    assert [event.message for event in await store.events("demo")] == ["2", "3", "4", "5"]
    await store.expire_events(now() - timedelta(days=1), 2)
    for name in ("demo", "other"):
        assert [event.message for event in await store.events(name)] == ["4", "5"]


async def test_events_of_sandboxes_that_are_gone_expire_and_those_of_others_do_not(store: Store) -> None:
    await store.insert_sandbox(sandbox())
    old = now() - timedelta(days=3)
    for name in ("demo", "gone"):
        await store.add_event(name, "started", "", at=old)
        await store.add_event(name, "hibernated", "")
    await store.expire_events(now() - timedelta(days=2), 100)
    assert [event.kind for event in await store.events("demo")] == ["started", "hibernated"]
    assert [event.kind for event in await store.events("gone")] == ["hibernated"]


# -- processes ---------------------------------------------------------------------------------------------------------


async def test_a_process_comes_back_with_every_field(store: Store) -> None:
    await store.insert_sandbox(sandbox())
    info = ProcessInfo(
        id="web",
        pid=42,
        command="serve",
        status=ProcessStatus.FAILED,
        start_time=NOON,
        end_time=NOON + timedelta(seconds=1),
        exit_code=-9,
        session_id="default",
        error="It ran out of memory.",
        limit="memory",
    )
    assert ProcessInfo.model_fields.keys() == info.model_fields_set, "a field is missing in this test"
    await store.save_process("demo", info, starts=1)
    assert await store.processes("demo") == [info]


async def test_saving_a_process_again_replaces_it(store: Store) -> None:
    await store.insert_sandbox(sandbox())
    await store.save_process("demo", process(status=ProcessStatus.STARTING), starts=1)
    later = process(pid=7, status=ProcessStatus.COMPLETED, exit_code=0, end_time=NOON)
    await store.save_process("demo", later, starts=2)
    assert await store.processes("demo") == [later]
    plain = process()
    await store.save_process("demo", plain, starts=3)
    assert await store.processes("demo") == [plain]


async def test_processes_are_listed_oldest_first_and_by_sandbox(store: Store) -> None:
    await store.insert_sandbox(sandbox())
    await store.insert_sandbox(sandbox("other"))
    await store.save_process("demo", process("late", start_time=NOON + timedelta(seconds=5)), 1)
    await store.save_process("demo", process("early"), 1)
    await store.save_process("other", process("early"), 1)
    assert [info.id for info in await store.processes("demo")] == ["early", "late"]
    assert [info.id for info in await store.processes("other")] == ["early"]


async def test_a_process_of_no_sandbox_is_not_found(store: Store) -> None:
    with pytest.raises(SandboxNotFoundError):
        await store.save_process("nobody", process(), 1)


async def test_ending_processes_kills_only_those_alive_in_that_sandbox(store: Store) -> None:
    await store.insert_sandbox(sandbox())
    await store.insert_sandbox(sandbox("other"))
    for status in ProcessStatus:
        await store.save_process("demo", process(status.value, status=status), 1)
    await store.save_process("other", process(), 1)

    assert await store.end_processes("demo", "The machine stopped.") == 2
    after = {info.id: info for info in await store.processes("demo")}
    for name in ("running", "starting"):
        assert after[name].status is ProcessStatus.KILLED
        assert after[name].error == "The machine stopped."
        assert after[name].end_time is not None
    for name in ("completed", "failed", "killed", "error"):
        assert after[name] == process(name, status=ProcessStatus(name))
    assert (await store.processes("other"))[0].status is ProcessStatus.RUNNING
    assert await store.end_processes("demo", "again") == 0


async def test_processes_are_deleted_by_id_or_all(store: Store) -> None:
    await store.insert_sandbox(sandbox())
    await store.insert_sandbox(sandbox("other"))
    for name in ("a", "b", "c", "d"):
        await store.save_process("demo", process(name), 1)
    await store.save_process("other", process("a"), 1)
    assert await store.delete_processes("demo", []) == 0
    assert await store.delete_processes("demo", ["a", "c", "nothing", *(f"x{n}" for n in range(1200))]) == 2
    assert [info.id for info in await store.processes("demo")] == ["b", "d"]
    assert await store.delete_processes("demo", None) == 2
    assert await store.processes("demo") == []
    assert len(await store.processes("other")) == 1


async def test_what_a_sandbox_said_is_recorded_even_if_it_is_no_text(store: Store) -> None:
    await store.insert_sandbox(sandbox())
    event = await store.add_event("demo", "failed", "a\0b\ud800c")
    assert event.message == "a\ufffdb?c"
    await store.save_process("demo", process(command="x\0", error="\udcff"), 1)
    [info] = await store.processes("demo")
    assert (info.command, info.error) == ("x\ufffd", "?")
    await store.end_processes("demo", "\0")
    row = await store.update_sandbox("demo", last_stop="bad \0")
    assert row.last_stop == "bad \ufffd"


async def test_deleting_a_sandbox_deletes_its_processes_and_keeps_its_events(store: Store) -> None:
    for name in ("demo", "other"):
        await store.insert_sandbox(sandbox(name))
        await store.add_event(name, "started", "")
        await store.save_process(name, process(), 1)
    assert await store.delete_sandbox("demo") is True
    assert await store.delete_sandbox("demo") is False
    assert await store.get_sandbox("demo") is None
    await store.insert_sandbox(sandbox())
    assert await store.processes("demo") == []
    assert len(await store.processes("other")) == 1
    assert len(await store.events("demo", 0, 10)) == len(await store.events("other", 0, 10)) == 1
