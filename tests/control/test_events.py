"""What happened to a sandbox: in order, with who and why, bounded, and told to those who follow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest

from skerry.control.actor import actor
from skerry.control.events import TRIM_EVERY, Events
from skerry.control.ledger import Ledger
from skerry.control.open import open_registry
from skerry.control.registry import Registry
from skerry.control.store import Store
from skerry.errors import SandboxNotFoundError, StoreError
from skerry.models import ExecRequest, State, now
from skerry.settings import Settings

LIMIT = 40


@pytest.fixture
async def events(store: Store) -> AsyncIterator[Events]:
    ledger = Ledger()
    ledger.open()
    yield Events(store, ledger, limit=LIMIT, days=2)
    await ledger.close()


async def test_who_asked_is_on_record_unless_somebody_else_did_it(events: Events) -> None:
    events.record("demo", "started", "By nobody in particular.")
    token = actor.set("API key 1")
    events.record(
        "demo", "frozen", "By the one who asked.", took=0.0015, from_state=State.ACTIVE, to_state=State.FROZEN
    )
    events.record("demo", "died", "By itself.", by="server", details={"signal": 9})
    actor.reset(token)
    found = await events.list("demo")
    assert [event.by for event in found] == ["server", "API key 1", "server"]
    assert (found[1].took, found[1].from_state, found[1].to_state) == (1.5, State.ACTIVE, State.FROZEN)
    assert found[2].details == {"signal": 9}


async def test_each_sandbox_keeps_only_its_latest_events(events: Events) -> None:
    for number in range(200):
        events.record("noisy", "exposed", str(number))
    events.record("quiet", "created", "")
    found = await events.list("noisy", limit=1000)
    assert LIMIT <= len(found) <= LIMIT + TRIM_EVERY
    assert found[-1].message == "199"
    assert len(await events.list("quiet")) == 1
    await events.expire()
    assert len(await events.list("noisy", limit=1000)) == LIMIT


async def test_followers_get_each_event_once_and_in_order(events: Events) -> None:
    for number in range(150):
        events.record("busy", "exposed", str(number))

    async def follow() -> list[str]:
        return [event.message async for event in events.follow("busy")]

    followers = [asyncio.create_task(follow()) for _ in range(3)]
    await asyncio.sleep(0.05)
    for number in range(150, 160):
        events.record("busy", "exposed", str(number))
        events.record("other", "exposed", "not ours")
        await asyncio.sleep(0)
    events.record("busy", "destroyed", "160")
    first, *others = await asyncio.gather(*followers)
    assert first[-11:] == [str(number) for number in range(150, 161)]
    assert first == sorted(set(first), key=int)
    assert all(other[-11:] == first[-11:] for other in others)
    assert not events._followers


async def test_one_who_stops_following_is_forgotten(events: Events) -> None:
    events.record("demo", "created", "")
    following = events.follow("demo")
    assert (await anext(following)).kind == "created"
    await following.aclose()
    assert not events._followers


async def test_an_event_that_cannot_be_written_does_not_hold_up_the_next(
    events: Events, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for failure in (StoreError("full"), RuntimeError("never seen before")):

        async def fail(*_: object, failure: Exception = failure, **__: object) -> None:
            raise failure

        with monkeypatch.context() as broken:
            broken.setattr(store, "add_event", fail)
            events.record("demo", "lost", "")
            await events.list("demo")
    events.record("demo", "kept", "")
    assert [event.kind for event in await events.list("demo")] == ["kept"]


async def test_events_of_a_destroyed_sandbox_are_read_by_its_id_until_they_expire(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "home", event_days=2)
    registry = await open_registry(settings)
    async with registry.use("gone") as runtime:
        await runtime.exec(ExecRequest(command="true"))
    await registry.destroy("gone")
    assert [event.kind for event in await registry.events("gone")] == ["created", "started", "destroyed"]
    with pytest.raises(SandboxNotFoundError):
        await registry.events("never-was")
    old = now() - timedelta(days=3)
    await registry._store.add_event("long-gone", "destroyed", "", at=old)
    await registry.close()
    again = await open_registry(settings)
    try:
        assert (await again.events("gone"))[-1].kind == "destroyed"
        with pytest.raises(SandboxNotFoundError):
            await again.events("long-gone")
    finally:
        await again.close()


async def test_a_sandbox_made_anew_goes_on_with_the_history_of_its_name(registry: Registry) -> None:
    for _ in range(2):
        async with registry.use("again"):
            pass
        await registry.destroy("again")
    kinds = [event.kind for event in await registry.events("again")]
    assert kinds == ["created", "started", "destroyed"] * 2


async def test_the_owners_own_function_records_for_others(registry: Registry) -> None:
    async with registry.use("demo"):
        pass
    owner = registry._owners["demo"]
    owner.record("snapshotted", "Snapshot 'first' was made.", took=0.01, details={"snapshot": "first"})
    last = (await registry.events("demo"))[-1]
    assert (last.kind, last.took, last.details, last.by) == ("snapshotted", 10.0, {"snapshot": "first"}, "server")
    assert last.from_state is last.to_state is None
