from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from skerry.control.session_rows import ArtifactRow, EventRow, MessageRow, ParticipantRow, SessionRow, SessionRows
from skerry.control.store import Store
from skerry.errors import InvalidRequestError
from skerry.models import now


@pytest.fixture
async def rows(store: Store) -> SessionRows:
    await add(store.sessions, "sess-1")
    return store.sessions


async def add(rows: SessionRows, id: str, **fields: Any) -> None:
    creator = ParticipantRow(id=f"part-{id}", session_id=id, user="ann", role="owner")
    await rows.insert(SessionRow(id=id, node="here", **fields), creator)


def message(id: str, session: str = "sess-1") -> MessageRow:
    return MessageRow(id=id, session_id=session, content=f"do {id}", attachments=[{"type": "file"}])


def event(id: str, type: str = "tool_call", about: str = "m1", **data: Any) -> EventRow:
    return EventRow("sess-1", id, type, about, data)


async def test_of_too_many_events_the_oldest_go_and_one_stands_for_them(rows: SessionRows) -> None:
    added = [await rows.add_event(event(f"e{n}", about=f"m{n % 2}", n=n)) for n in range(20)]
    numbers = [each.number for each in added if each is not None]
    assert await rows.weigh_events("sess-1") == (20, sum(len(f'{{"n": {n}}}') for n in range(20)))
    assert (await rows.trim_events("sess-1", 5, 10**6))[0] == 6
    kept = await rows.events("sess-1", limit=100)
    assert [each.number for each in kept] == numbers[14:]
    assert (kept[0].type, kept[0].data) == ("trimmed", {"events": 15})
    # A cursor from after it is as good as before; one from before it is told of it, whatever is asked for.
    assert [each.number for each in await rows.events("sess-1", after=numbers[14], limit=2)] == numbers[15:17]
    assert [each.type for each in await rows.events("sess-1", limit=9, message="m1")] == ["trimmed", *["tool_call"] * 3]
    assert [each.type for each in await rows.events("sess-1", limit=9, type="token")] == ["trimmed"]
    # By their bytes, and what was trimmed before is counted.
    await rows.trim_events("sess-1", 100, 2 * len('{"n": 19}'))
    kept = await rows.events("sess-1", limit=100)
    assert [each.number for each in kept] == numbers[17:]
    assert kept[0].data == {"events": 18}
    assert await rows.trim_events("sess-1", 100, 10**6) == await rows.weigh_events("sess-1")
    assert await rows.events("sess-1", limit=100) == kept


async def test_the_last_prompts_are_found_oldest_first(rows: SessionRows) -> None:
    for number in range(4):
        await rows.add_message(message(f"m{number}"))
    assert [each.id for each in await rows.last_messages("sess-1", 2)] == ["m2", "m3"]


async def test_a_session_comes_back_as_it_was_kept(rows: SessionRows) -> None:
    await rows.update("sess-1", settings={"env": {"A": "1"}}, spawned_at=1.5, sandbox_status="ready", sandbox_id="box")
    found = await rows.get("sess-1")
    assert found is not None
    assert (found.settings, found.spawned_at, found.sandbox_id) == ({"env": {"A": "1"}}, 1.5, "box")
    assert await rows.by_sandbox("box") == found
    assert await rows.get("nothing") is None
    with pytest.raises(InvalidRequestError):
        await rows.get("a\0b")


async def test_prompts_are_taken_one_at_a_time_and_in_order(rows: SessionRows) -> None:
    assert [await rows.add_message(message(f"m{number}")) for number in range(3)] == [1, 2, 3]
    taken = await asyncio.gather(*(rows.take_next("sess-1") for _ in range(5)))
    assert [each.id for each in taken if each is not None] == ["m0"]
    found = await rows.processing("sess-1")
    assert found is not None
    assert (found.id, found.attachments) == ("m0", [{"type": "file"}])
    assert await rows.waiting("sess-1") == 2
    await rows.finish("m0", "completed", None)
    following = await rows.take_next("sess-1")
    assert following is not None
    assert following.id == "m1"
    await rows.finish("m1", "failed", "It broke.")
    kept = await rows.messages("sess-1", 0, 10)
    assert [(each.status, each.error) for each in kept] == [
        *[("completed", None), ("failed", "It broke.")],
        ("pending", None),
    ]


async def test_an_event_that_is_sent_twice_is_there_once(rows: SessionRows) -> None:
    first = await rows.add_event(event("e1", callId="c"))
    assert first is not None
    assert await rows.add_event(event("e1", callId="c")) is None
    second = await rows.add_event(event("e2", about="m2"))
    assert second is not None
    assert second.number > first.number
    assert [each.id for each in await rows.events("sess-1", limit=10)] == ["e1", "e2"]
    assert [each.id for each in await rows.events("sess-1", after=first.number, limit=10)] == ["e2"]
    assert [each.id for each in await rows.events("sess-1", limit=10, message="m2")] == ["e2"]
    assert [each.id for each in await rows.last_events("sess-1", 1)] == ["e2"]


async def test_of_each_text_the_longest_is_kept(rows: SessionRows) -> None:
    said = ["It", "It is", "It", "It is four", "Done", "Done.", "It is"]
    for number, content in enumerate(said):
        await rows.add_event(event(f"t{number}", "token", content=content))
    kept = await rows.events("sess-1", limit=10)
    assert [each.data["content"] for each in kept] == ["It is four", "Done."]


async def test_who_joins_twice_is_there_once(rows: SessionRows) -> None:
    one = await rows.join(ParticipantRow(id="p1", session_id="sess-1", user="bea"))
    two = await rows.join(ParticipantRow(id="p2", session_id="sess-1", user="bea", name="Bea", sealed="x"))
    three = await rows.join(ParticipantRow(id="p3", session_id="sess-1", user="bea"))
    assert one.id == two.id == three.id == "p1"
    assert (three.name, three.sealed) == ("Bea", "x")
    assert "'x'" not in repr(three)
    assert {each.user for each in await rows.participants("sess-1")} == {"ann", "bea"}


async def test_a_token_is_good_for_its_session_and_its_time(rows: SessionRows) -> None:
    await add(rows, "sess-2")
    await rows.set_token("part-sess-1", "digest", now() + timedelta(hours=1))
    assert await rows.by_token("sess-1", "digest", now()) is not None
    assert await rows.by_token("sess-2", "digest", now()) is None
    assert await rows.by_token("sess-1", "digest", now() + timedelta(hours=2)) is None


async def test_what_a_server_has_to_look_after(rows: SessionRows) -> None:
    await add(rows, "sess-2", sandbox_status="ready")
    await add(rows, "sess-3", sandbox_status="stopped")
    await add(rows, "sess-4", sandbox_status="stopped")
    await rows.add_message(message("m4", "sess-4"))
    assert {each.id for each in await rows.unsettled("here", ["ready"])} == {"sess-2", "sess-4"}
    assert await rows.unsettled("elsewhere", ["ready"]) == []


async def test_a_deleted_session_takes_all_with_it(rows: SessionRows) -> None:
    await rows.add_message(message("m1"))
    await rows.add_event(event("e1"))
    await rows.add_artifact(ArtifactRow("a1", "sess-1", "pr", "http://forge/1", {"number": 1}))
    assert [each.metadata for each in await rows.artifacts("sess-1")] == [{"number": 1}]
    await rows.delete("sess-1")
    assert await rows.get("sess-1") is None
    assert await rows.messages("sess-1", 0, 10) == []
    assert await rows.events("sess-1", limit=10) == []
    assert await rows.artifacts("sess-1") == []
    assert await rows.participants("sess-1") == []


async def test_sessions_are_listed_by_owner_and_page(rows: SessionRows) -> None:
    for number in range(2, 6):
        await add(rows, f"sess-{number}", owner="bea" if number == 5 else "local")
    found = await rows.list("local", None, None, 2)
    assert [each.id for each in found] == ["sess-4", "sess-3"]
    assert [each.id for each in await rows.list("local", None, "sess-3", 10)] == ["sess-2", "sess-1"]
    assert [each.id for each in await rows.list("bea", "created", None, 10)] == ["sess-5"]
    assert await rows.list("bea", "archived", None, 10) == []
