from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from skerry.control import allowances
from skerry.control.account_rows import UsageRow
from skerry.control.accounts import Accounts
from skerry.control.actor import Caller, caller
from skerry.control.open import open_registry
from skerry.control.registry import Registry
from skerry.control.store import SandboxRow, Store
from skerry.errors import QuotaExceededError, RateLimitedError
from skerry.models import CreateSandbox, ForkSandbox, KeyScope, Limits, Quotas, State, now
from skerry.settings import Settings


@contextmanager
def asking(owner: str) -> Iterator[None]:
    token = caller.set(Caller(f"key of {owner}", owner, KeyScope.USE))
    try:
        yield
    finally:
        caller.reset(token)


@pytest.fixture
async def registry(tmp_path: Path) -> AsyncIterator[Registry]:
    registry = await open_registry(Settings(home=tmp_path / "home", api_keys=("admin",), pool_size=0))
    yield registry
    await registry.close()


async def bound(registry: Registry, owner: str = "ada", **quotas: Any) -> None:
    await Accounts(registry).set_quotas(owner, Quotas(**quotas))


async def outcomes(*work: Any) -> list[Any]:
    return await asyncio.gather(*work, return_exceptions=True)


async def test_fifty_at_once_never_make_more_than_the_quota(registry: Registry) -> None:
    await bound(registry, sandboxes=7)
    with asking("ada"):
        made = await outcomes(*(registry.create(CreateSandbox()) for _ in range(50)))
        refused = [one for one in made if isinstance(one, QuotaExceededError)]
        assert len(refused) == 43
        assert len((await registry.list(limit=100)).sandboxes) == 7
        assert refused[0].details == {"quota": "sandboxes", "limit": 7, "used": 7, "until": None}
        assert "7 sandboxes" in refused[0].message
        await registry.destroy((await registry.list()).sandboxes[0].id)
        await registry.create(CreateSandbox())
    with asking("bea"):
        await registry.create(CreateSandbox())  # who has no bound


async def test_one_that_is_there_can_be_used_at_the_quota_and_no_new_one_made_by_using_it(registry: Registry) -> None:
    await bound(registry, sandboxes=1, creates_per_minute=1)
    with asking("ada"):
        id = (await registry.create(CreateSandbox(id="there"))).id
        for _ in range(3):
            await registry.stop(id)
            async with registry.use(id):
                pass
        with pytest.raises(RateLimitedError):
            async with registry.use(id.replace("there", "another")):
                pass
        with pytest.raises(RateLimitedError):
            await registry.snapshots.fork(id, ForkSandbox(count=1))


async def test_a_fork_of_many_is_refused_whole(registry: Registry) -> None:
    await bound(registry, sandboxes=3)
    with asking("ada"):
        id = (await registry.create(CreateSandbox(id="trunk"))).id
        with pytest.raises(QuotaExceededError):
            await registry.snapshots.fork(id, ForkSandbox(count=3))
        assert [box.id for box in (await registry.list()).sandboxes] == [id]
        assert len((await registry.snapshots.fork(id, ForkSandbox(count=2))).sandboxes) == 2


async def test_no_more_run_at_once_than_may(registry: Registry) -> None:
    await bound(registry, running=2)
    with asking("ada"):
        ids = [(await registry.create(CreateSandbox(id=f"r{number}"))).id for number in range(6)]
        started = await outcomes(*(registry.start(id) for id in ids))
        running = [one for one in started if not isinstance(one, Exception)]
        refused = [one for one in started if isinstance(one, QuotaExceededError)]
        assert (len(running), len(refused)) == (2, 4)
        assert refused[0].details["quota"] == "running"
        waiting = next(id for id in ids if id not in {one.id for one in running})
        assert (await registry.get(waiting)).state == State.CREATED
        await registry.stop(running[0].id)
        assert (await registry.start(waiting)).state == State.ACTIVE


async def test_the_memory_of_those_that_run_is_bounded(registry: Registry) -> None:
    await bound(registry, memory_mb=1000)
    with asking("ada"):
        large = (await registry.create(CreateSandbox(id="large", limits=Limits(memory=600 << 20)))).id
        small = (await registry.create(CreateSandbox(id="small", limits=Limits(memory=300 << 20)))).id
        unsaid = (await registry.create(CreateSandbox(id="unsaid"))).id
        await registry.start(large)
        with pytest.raises(QuotaExceededError, match="1000 MB of memory and has 600, and this one takes 512"):
            await registry.start(unsaid)
        await registry.start(small)


async def test_disk_is_bounded_by_what_sandboxes_may_have(registry: Registry) -> None:
    await bound(registry, disk_mb=1000)
    with asking("ada"):
        made = await outcomes(*(registry.create(CreateSandbox(limits=Limits(disk=350 << 20))) for _ in range(10)))
        assert [type(one) for one in made if isinstance(one, Exception)] == [QuotaExceededError] * 8
        with pytest.raises(QuotaExceededError) as caught:
            await registry.create(CreateSandbox(limits=Limits(disk=400 << 20)))
        assert caught.value.details["quota"] == "disk_mb"
        await registry.create(CreateSandbox(limits=Limits(disk=300 << 20)))


async def test_creates_are_paced_and_it_is_said_when_the_next_may_come(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allowances, "MINUTE", 5.0)
    await bound(registry, creates_per_minute=3)
    with asking("ada"):
        made = await outcomes(*(registry.create(CreateSandbox()) for _ in range(10)))
        refused = [one for one in made if isinstance(one, RateLimitedError)]
        assert len(refused) == 7
        assert refused[0].status == 429
        wait = refused[0].retry_after
        assert wait is not None
        assert 0 < wait <= 5
        await asyncio.sleep(wait)
        await registry.create(CreateSandbox())


@pytest.mark.parametrize("period", ["day", "month"])
async def test_whoever_has_used_up_its_time_starts_nothing_until_the_period_ends(
    registry: Registry, period: str
) -> None:
    await bound(registry, **{f"cpu_seconds_{period}": 100.0})
    with asking("ada"):
        id = (await registry.create(CreateSandbox(id="busy"))).id
        await registry.start(id)
        await registry.accounts.add_usage(UsageRow("ada", now().date(), cpu_seconds=100.0))
        await registry.collector.collect()
        info = await registry.get(id)
        assert info.state == State.HIBERNATED
        assert "seconds of CPU" in (info.last_stop or "")
        with pytest.raises(QuotaExceededError) as caught:
            await registry.start(id)
    until = caught.value.details["until"]
    assert until > now().isoformat()
    if period == "day":
        assert until[:10] == (now() + timedelta(days=1)).date().isoformat()
    await bound(registry)
    with asking("ada"):
        assert (await registry.start(id)).state == State.ACTIVE


async def test_what_was_refused_for_another_reason_does_not_count_as_made(registry: Registry) -> None:
    await bound(registry, creates_per_minute=2, sandboxes=1)
    with asking("ada"):
        await registry.create(CreateSandbox(id="one"))
        for _ in range(3):
            with pytest.raises(QuotaExceededError):
                await registry.create(CreateSandbox())


async def test_the_settings_bound_everyone_but_the_local_owner(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "home", api_keys=("admin",), pool_size=0, quota_sandboxes=1)
    registry = await open_registry(settings)
    try:
        for _ in range(3):
            await registry.create(CreateSandbox())
        with asking("ada"):
            await registry.create(CreateSandbox())
            with pytest.raises(QuotaExceededError):
                await registry.create(CreateSandbox())
        await bound(registry, sandboxes=2)
        with asking("ada"):
            await registry.create(CreateSandbox())
    finally:
        await registry.close()


async def test_several_servers_on_one_store_hold_to_one_quota(database: str) -> None:
    stores = [Store(database) for _ in range(4)]
    try:
        for store in stores:
            await store.open()
        await stores[0].accounts.add_owner("ada")

        async def make(number: int) -> None:
            row = SandboxRow(id=f"s{number}", node="n", state=State.CREATED, image="host", owner="ada")
            await stores[number % 4].insert_sandbox(row, most=10)

        made = await outcomes(*(make(number) for number in range(50)))
        assert [type(one) for one in made if one is not None] == [QuotaExceededError] * 40
        assert len(await stores[0].list_sandboxes(limit=100)) == 10
    finally:
        for store in stores:
            await store.close()
