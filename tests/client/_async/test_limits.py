"""Limits and usage in the SDK."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from skerry import AsyncSandbox, InvalidRequestError, SandboxExistsError, State


def name() -> str:
    return f"sdk-{secrets.token_hex(4)}"


async def test_a_tier_is_asked_for_by_name_and_numbers_go_before_it(home: Path) -> None:
    async with AsyncSandbox(name(), home=home, limits={"tier": "builder", "memory": "1G"}, ephemeral=True) as sandbox:
        limits = (await sandbox.info()).limits
        assert (limits.tier, limits.memory, limits.cpu, limits.pids) == ("builder", 1 << 30, 1, 256)
        assert limits.enforced.keys() == {"memory", "cpu", "pids", "disk"}
    async with AsyncSandbox(name(), home=home, limits="lite", ephemeral=True) as sandbox:
        assert (await sandbox.info()).limits.memory == 256 << 20


async def test_one_that_has_other_limits_is_not_silently_used(home: Path) -> None:
    id = name()
    async with AsyncSandbox(id, home=home, limits="starter", ephemeral=True) as sandbox:
        await sandbox.start()
        async with AsyncSandbox(id, home=home, limits={"memory": "512M", "pids": 100}) as same:
            assert (await same.exec("echo same")).stdout == "same\n"
        async with AsyncSandbox(id, home=home, limits="power") as other:
            with pytest.raises(SandboxExistsError, match="limits"):
                await other.exec("true")


async def test_nonsense_is_refused_and_changes_nothing(home: Path) -> None:
    async with AsyncSandbox(name(), home=home, limits={"memory": "128M"}, ephemeral=True) as sandbox:
        await sandbox.start()
        for wrong in ("gigantic", {"memory": "lots"}, {"pids": 1}, {"speed": 3}):
            with pytest.raises(InvalidRequestError):
                await sandbox.update(limits=wrong)
        assert (await sandbox.info()).limits.memory == 128 << 20
    with pytest.raises(InvalidRequestError, match="gigantic"):
        await AsyncSandbox.create(name(), home=home, limits="gigantic")


async def test_limits_change_and_usage_is_told_without_waking_anybody(home: Path) -> None:
    async with AsyncSandbox(name(), home=home, ephemeral=True) as sandbox:
        await sandbox.exec("echo $((6 * 7))")
        assert (await sandbox.update(limits={"output": "1K", "log": None})).limits.output == 1024
        assert (await sandbox.exec("seq 10000")).limit == "output"
        found = await sandbox.metrics()
        assert found.now is not None
        assert found.usage.running_seconds > 0
        await sandbox.stop()
        asleep = await sandbox.metrics(since=found.now.at)
        assert (asleep.now, asleep.state) == (None, State.HIBERNATED)
        assert asleep.usage.running_seconds >= found.usage.running_seconds
        assert all(sample.at > found.now.at for sample in asleep.history)
