from __future__ import annotations

import asyncio
from datetime import date, timedelta
from pathlib import Path

import pytest

from skerry.control.account_rows import UsageRow
from skerry.control.actor import Caller, caller
from skerry.control.open import open_registry
from skerry.control.store import Store
from skerry.errors import InvalidRequestError
from skerry.models import CreateSandbox, ExecRequest, KeyScope, Limits, now
from skerry.settings import Settings

BURN = "python3 -c 'import time\nwhile time.process_time() < 1.0: pass'"
MEMORY = "python3 -c 'import time; held = bytearray(100 << 20); time.sleep(30)' & sleep 0.7"


async def test_what_a_sandbox_uses_is_on_its_owners_account(tmp_path: Path) -> None:
    settings = Settings(
        home=tmp_path / "home", api_keys=("admin",), pool_size=0, usage_every=0.1, price_cpu_hour=3600.0, currency="XTS"
    )
    registry = await open_registry(settings)
    try:
        token = caller.set(Caller("key", "ada", KeyScope.USE))
        id = (await registry.create(CreateSandbox(id="busy", limits=Limits(disk_mb=64)))).id
        async with registry.use(id) as runtime:
            assert (await runtime.exec(ExecRequest(command=BURN))).exit_code == 0
            await runtime.exec(ExecRequest(command=MEMORY))
        await asyncio.sleep(1.5)
        await registry.stop(id)
        caller.reset(token)
        report = await registry.collector.report("ada")
        (today,) = report.days
        assert today.day == now().date()
        assert 1.0 <= today.cpu_seconds < 5.0
        assert today.memory_byte_seconds > 20 << 20
        assert today.disk_byte_seconds > 64 << 20
        assert (report.currency, report.prices["cpuHour"]) == ("XTS", 3600.0)
        assert report.total.cost == pytest.approx(today.cpu_seconds, abs=0.001)
        await registry.collector.collect()  # what it took to end
        before = (await registry.collector.report("ada")).total.cpu_seconds
        await registry.collector.collect()
        assert (await registry.collector.report("ada")).total.cpu_seconds == before  # nothing is counted twice
        assert (await registry.collector.report("local")).total.cpu_seconds == 0
        with pytest.raises(InvalidRequestError):
            await registry.collector.report("ada", date(2026, 2, 1), date(2026, 1, 1))
    finally:
        await registry.close()


async def test_a_short_life_between_two_looks_is_counted_too(tmp_path: Path) -> None:
    registry = await open_registry(Settings(home=tmp_path / "home", pool_size=0, usage_every=3600))
    try:
        async with registry.use("brief") as runtime:
            await runtime.exec(ExecRequest(command=BURN))
        await registry.destroy("brief")
        assert (await registry.collector.report("local")).total.cpu_seconds >= 1.0
    finally:
        await registry.close()


async def test_usage_adds_up_day_by_day_whoever_adds(store: Store) -> None:
    today = now().date()
    yesterday = today - timedelta(days=1)
    rows = [UsageRow("ada", day, 1.5, 2.0, 3.0, 2**40) for day in (today, yesterday) for _ in range(20)]
    await asyncio.gather(*(store.accounts.add_usage(row) for row in rows))
    await store.accounts.add_usage(UsageRow("bea", today, 1.0))
    found = await store.accounts.usage("ada", yesterday, today)
    assert found == [UsageRow("ada", day, 30.0, 40.0, 60.0, 20 * 2**40) for day in (yesterday, today)]
    assert await store.accounts.usage("ada", yesterday, yesterday) == found[:1]
