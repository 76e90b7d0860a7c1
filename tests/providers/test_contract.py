"""What every provider promises: each has these tests run with a ``provider`` of its own. What it says that it cannot do
it must refuse."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from secrets import token_hex

import pytest

from skerry.errors import (
    FreezeFailedError,
    ImageNotFoundError,
    ProviderAbsentError,
    SandboxBusyError,
    SandboxExistsError,
    SnapshotNotFoundError,
    UnsupportedError,
)
from skerry.models import ExecRequest, Limits
from skerry.providers.contract import Machine, Provider, Spec
from tests.machines import nobody

Say = Callable[[str], Awaitable[str]]


@pytest.fixture
async def id(provider: Provider) -> AsyncIterator[str]:
    """Of a machine that is forgotten afterwards, as are its copy and its snapshots."""
    id = f"promise-{token_hex(4)}"
    yield id
    for one in (id, f"{id}-copy"):
        await provider.forget(one)
    for snapshot in await provider.snapshots():
        await provider.remove_snapshot(snapshot)


@asynccontextmanager
async def started(provider: Provider, id: str) -> AsyncIterator[tuple[Machine, Say]]:
    machine = await provider.start(Spec(id=id, image="host"), nobody)
    runtime = machine.runtime(machine.portal, env={}, on_process=nobody)

    async def say(command: str) -> str:
        return (await runtime.exec(ExecRequest(command=command))).stdout

    try:
        yield machine, say
    finally:
        await runtime.close()
        await machine.stop()
        await machine.stop()  # which changes nothing


async def test_files_are_made_on_first_use_stay_when_it_stops_and_go_when_it_is_forgotten(
    provider: Provider, id: str
) -> None:
    assert not await provider.exists(id)
    async with started(provider, id) as (_, say):
        assert await say("pwd; ls -A; echo kept > file") == "/workspace\n"
    assert await provider.exists(id)
    async with started(provider, id) as (_, say):
        assert await say("cat /workspace/file") == "kept\n"
    for _ in range(2):
        await provider.forget(id)
        assert not await provider.exists(id)
    async with started(provider, id) as (_, say):
        assert await say("pwd; ls -A") == "/workspace\n"


async def test_who_runs_a_machine_has_it_alone(provider: Provider, id: str) -> None:
    async with started(provider, id) as (_, say):
        with pytest.raises(SandboxBusyError):
            await provider.require_idle(id)
        with pytest.raises(SandboxBusyError):
            await provider.start(Spec(id=id, image="host"), nobody)
        assert await say("echo unharmed") == "unharmed\n"
    await provider.require_idle(id)


async def test_one_that_was_started_in_advance_takes_the_name_it_turns_out_to_have(provider: Provider, id: str) -> None:
    before = f".warm-{token_hex(4)}"
    async with started(provider, before) as (machine, say):
        await say("echo mine > /workspace/file")
        await provider.rename(machine, id)
        with pytest.raises(SandboxBusyError):
            await provider.require_idle(id)
    assert not await provider.exists(before)
    async with started(provider, id) as (_, say):
        assert await say("cat /workspace/file") == "mine\n"


async def test_it_lives_where_it_is_said_to_and_nowhere_else(provider: Provider, id: str) -> None:
    name = provider.capabilities().name
    for asked in (None, name):
        await provider.place(id, asked)
        assert provider.place_of(id) == name
    with pytest.raises(ProviderAbsentError, match="no provider 'elsewhere'"):
        await provider.place(id, "elsewhere")


async def test_images_are_listed_and_one_that_is_not_there_is_missed_before_anything_is_made(
    provider: Provider, id: str
) -> None:
    assert "host" in [image.name for image in await provider.images()]
    await provider.require_image("host")
    for name in ("no-such-image", "../escape", "A B"):
        with pytest.raises(ImageNotFoundError):
            await provider.require_image(name)


async def test_limits_are_held_or_said_not_to_be(provider: Provider, id: str) -> None:
    can = provider.capabilities()
    assert {*can.unheld} <= {"memory", "cpu", "pids", "open_files", "disk", "tmpfs", "output", "log", "lifetime"}
    assert all(can.unheld.values())
    async with started(provider, id) as (machine, say):
        await machine.limit(Limits(memory=1 << 30, pids=300))
        assert await say("echo fine") == "fine\n"
        assert machine.met().memory == 0
        assert (machine.measure().memory is None) is ("memory" in can.unheld or can.freeze == "none")
    assert machine.measure().met.memory == 0


async def test_it_freezes_or_says_that_it_cannot(provider: Provider, id: str) -> None:
    async with started(provider, id) as (machine, say):
        if provider.capabilities().freeze == "none":
            with pytest.raises(FreezeFailedError):
                await machine.freeze()
        else:
            await machine.freeze()
            waiting = asyncio.create_task(say("echo awake"))
            await asyncio.sleep(0.1)
            assert not waiting.done()
            await machine.thaw()
            assert await waiting == "awake\n"
        await machine.thaw()
        assert await say("echo goes on") == "goes on\n"


async def test_what_it_has_not_is_refused(provider: Provider, id: str) -> None:
    can = provider.capabilities()
    if not can.toolboxes:
        with pytest.raises(UnsupportedError):
            await provider.require_toolbox("opencode")
    if can.snapshots == "none":
        for refused in (
            lambda: provider.snapshot(id, "first"),
            lambda: provider.clone("first", id),
            lambda: provider.restore("first", id, nobody),
        ):
            with pytest.raises(UnsupportedError):
                await refused()
        assert await provider.snapshots() == set()
    if not can.mounts:
        async with started(provider, id) as (machine, _):
            with pytest.raises(UnsupportedError):
                await machine.mount("/workspace/bucket", read_only=True)


async def test_a_snapshot_is_copied_rolled_back_to_and_removed(provider: Provider, id: str) -> None:
    if provider.capabilities().snapshots == "none":
        return  # and refused, as above
    async with started(provider, id) as (machine, say):
        await say("echo one > /workspace/file")
        await provider.snapshot(id, "first", machine)
        assert await provider.snapshots() == {"first"}
        await say("echo two > /workspace/file; echo more > /workspace/other")
        await provider.clone("first", f"{id}-copy")
        with pytest.raises(SandboxExistsError):
            await provider.clone("first", f"{id}-copy")
        for missing in (lambda: provider.clone("none", "nobody"), lambda: provider.restore("none", id, nobody)):
            with pytest.raises(SnapshotNotFoundError):
                await missing()
        assert await say("cat /workspace/file") == "two\n"
        await provider.restore("first", id, machine.stop)
    for _ in range(2):
        await provider.remove_snapshot("first")
        assert await provider.snapshots() == set()
    # Whatever was made of it does not need it any more.
    for one in (id, f"{id}-copy"):
        async with started(provider, one) as (_, say):
            assert await say("cat /workspace/file; ls /workspace") == "one\nfile\n"
