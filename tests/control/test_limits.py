"""Limits: what a sandbox asks for, what it is held to, and that whoever runs into one is told which."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from skerry.control.limits import SandboxLimits, changed, defaults
from skerry.control.open import open_registry
from skerry.control.registry import Registry
from skerry.errors import LifetimeOverError, LimitTooLowError, NoSpaceError
from skerry.limits import TIERS
from skerry.models import (
    BackupRequest,
    CreateContext,
    CreateSandbox,
    CreateSession,
    CreateSnapshot,
    ExecRequest,
    ExecResult,
    ForkSandbox,
    Limits,
    RestoreRequest,
    RollbackSandbox,
    RunCode,
    SleepSandbox,
    StartProcess,
    State,
    UpdateSandbox,
    WaitRequest,
)
from skerry.providers.contract import Capabilities
from skerry.settings import Settings
from tests.providers.users import needs_root, needs_watching

MB = 1 << 20
HOG = "python3 -c 'bytearray(1 << 30)'"


async def make(registry: Registry, id: str, limits: Any) -> None:
    await registry.create(CreateSandbox(id=id, limits=limits))


async def run(registry: Registry, id: str, command: str, **options: Any) -> ExecResult:
    async with registry.use(id) as runtime:
        return await runtime.exec(ExecRequest(command=command, **options))


async def limits_reached(registry: Registry, id: str) -> list[str]:
    return [event.details["limit"] for event in await registry.events(id) if event.kind == "limit_reached"]


# -- asking ------------------------------------------------------------------------------------------------------------


def test_sizes_and_times_are_written_as_people_write_them() -> None:
    found = Limits.model_validate({"memory": "1.5G", "disk": "64 MiB", "lifetime": "2h", "openFiles": 256})
    assert (found.memory, found.disk, found.lifetime, found.open_files) == (1536 * MB, 64 * MB, 7200, 256)
    assert Limits.model_validate({"memoryMb": 512, "cpus": 2}).resolved() == {"memory": 512 * MB, "cpu": 2}


@pytest.mark.parametrize(
    "wrong",
    [
        "huge",
        {"tier": "huge"},
        {"memory": "much"},
        {"memory": 1},
        {"cpu": 0},
        {"cpu": float("nan")},
        {"pids": -1},
        {"lifetime": "soon"},
        {"colour": "red"},
        {"disk": "-5G"},
        7,
    ],
)
def test_nonsense_is_refused(wrong: object) -> None:
    with pytest.raises(ValidationError):
        Limits.model_validate(wrong)


def test_a_tier_can_be_given_with_numbers_of_its_own() -> None:
    assert Limits.model_validate("builder").resolved() == {"tier": "builder", **TIERS["builder"]}
    mixed = Limits.model_validate({"tier": "lite", "memory": "1G"}).resolved()
    assert (mixed["memory"], mixed["cpu"]) == (1 << 30, 1 / 16)


def test_where_nothing_is_said_one_sandbox_cannot_take_the_host() -> None:
    assert defaults(None, 8 << 30) == {"memory": 6 << 30, "pids": 4096}
    assert defaults("none", 8 << 30) == {}
    assert defaults("starter, disk=1G", 8 << 30)["disk"] == 1 << 30
    with pytest.raises(ValidationError):
        Settings(limits="memory=none-of-it")


def test_what_a_sandbox_asks_for_is_over_the_servers_defaults_and_says_what_is_not_held() -> None:
    can = Capabilities("test", unheld={"disk": "There is no pool."})
    rules = SandboxLimits("starter", 1 << 34, lambda: can)
    found = rules.info({"memory": 64 * MB, "openFiles": 100}, Limits(open_files=500))
    assert (found.memory, found.pids, found.cpu) == (64 * MB, 100, 0.5)
    assert found.enforced == {"memory": True, "cpu": True, "pids": True, "openFiles": True, "disk": False}
    assert found.pending == ["openFiles"]


def test_a_change_sets_some_takes_one_away_and_a_tier_replaces_all() -> None:
    asked = Limits.model_validate({"tier": "starter", "tmpfs": "8M"}).resolved()
    after = changed(asked, Limits.model_validate({"memory": "1G", "disk": None}))
    assert (after["memory"], after["pids"], after["tmpfs"]) == (1 << 30, 100, 8 * MB)
    assert not {"disk", "tier"} & after.keys()
    assert changed(asked, Limits.model_validate("lite")) == Limits.model_validate("lite").resolved()


# -- running into them -------------------------------------------------------------------------------------------------


@needs_root
async def test_a_command_that_needs_too_much_memory_is_killed_and_told_why(registry: Registry) -> None:
    await make(registry, "small", {"memory": "64M"})
    found = await run(registry, "small", f"{HOG}; echo after $?")
    assert (found.limit, found.stdout) == ("memory", "after 137\n")
    assert "64 MB" in str(found.limit_message)
    assert (await run(registry, "small", "echo on")).limit is None
    assert await limits_reached(registry, "small") == ["memory"]
    assert b'skerry_limits_reached_total{limit="memory"} 1.0' in await registry.measurements()
    assert (await registry.usage("small")).reached == {"memory": 1}


@needs_root
async def test_the_swarm_dies_before_init_does(registry: Registry) -> None:
    await make(registry, "swarm", {"memory": "48M", "pids": 64})
    many = "for i in $(seq 40); do python3 -c 'import time; x = bytearray(4 << 20); time.sleep(1)' & done; wait"
    assert (await run(registry, "swarm", many)).limit == "memory"
    assert (await run(registry, "swarm", "echo alive")).stdout == "alive\n"
    assert (await registry.get("swarm")).starts == 1


@needs_root
async def test_one_that_may_start_no_more_processes_is_told_so(registry: Registry) -> None:
    await make(registry, "few", {"pids": 24})
    found = await run(registry, "few", "for i in $(seq 40); do sleep 20 & done", timeout=30_000, session=None)
    assert found.limit == "pids"
    assert "24 processes" in str(found.limit_message)
    async with registry.use("few") as runtime:
        request = ExecRequest(command="for i in $(seq 40); do sleep 1 & done; wait", session=None)
        events = [event async for event in runtime.exec_stream(request)]
    assert events[-1].result is not None
    assert events[-1].result["limit"] == "pids"


@needs_root
async def test_a_full_disk_is_named_and_can_be_emptied_again_even_after_a_restart(registry: Registry) -> None:
    await make(registry, "full", {"disk": "32M"})
    found = await run(registry, "full", "head -c 100M /dev/zero >/workspace/big")
    assert (found.limit, found.exit_code) == ("disk", 1)
    assert "32 MB" in str(found.limit_message)
    await registry.sleep("full", SleepSandbox())
    # One that could not even be started could not be helped.
    assert (await run(registry, "full", "rm /workspace/big && echo hello >f && cat f")).stdout == "hello\n"
    other = await run(registry, "other", "head -c 40M /dev/zero >/workspace/big && echo fine")
    assert other.stdout == "fine\n"


@needs_root
@needs_watching
async def test_a_full_disk_is_told_in_every_life_of_a_sandbox_and_to_its_forks(registry: Registry) -> None:
    async def is_full(id: str) -> None:
        found = await run(registry, id, "head -c 64M /dev/zero >/workspace/more")
        assert (found.limit, "No space left on device" in found.stderr) == ("disk", True)
        await run(registry, id, "rm /workspace/more")

    await make(registry, "full", {"disk": "24M"})
    await run(registry, "full", "head -c 4M /dev/urandom >/workspace/kept; cksum /workspace/kept >/workspace/sum")
    taken = await registry.snapshots.create("full", CreateSnapshot())
    await is_full("full")
    await registry.snapshots.fork("full", ForkSandbox(ids=["fork"]))
    await is_full("fork")
    await registry.sleep("full", SleepSandbox())
    await is_full("full")
    await registry.snapshots.rollback("full", RollbackSandbox(snapshot=taken.id))
    await is_full("full")
    async with registry.use("full") as full, registry.use("fork") as fork:
        backup = (await registry.backups.backup(full, "full", BackupRequest(dir="/workspace"))).backup
        await run(registry, "fork", "rm -r /workspace/*")
        await registry.backups.restore(fork, "fork", RestoreRequest(backup=backup.id))
    await is_full("fork")
    for id in ("full", "fork"):
        assert (await run(registry, id, "cksum /workspace/kept | cmp - /workspace/sum")).exit_code == 0


@needs_root
async def test_what_the_file_api_writes_counts_too(registry: Registry) -> None:
    await make(registry, "full", {"disk": "16M"})
    async with registry.use("full") as runtime:

        async def body() -> AsyncIterator[bytes]:
            for _ in range(64):
                yield bytes(MB)

        with pytest.raises(NoSpaceError, match="quota"):
            await runtime.files.write("/workspace/big", body())


@needs_root
async def test_a_process_record_says_which_limit_ended_it(registry: Registry) -> None:
    await make(registry, "small", {"memory": "64M", "disk": "16M"})
    async with registry.use("small") as runtime:
        for id, command in (("hog", f"exec {HOG}"), ("filler", "cat /dev/zero >/workspace/big")):
            await runtime.processes.start(StartProcess(command=command, process_id=id))
            await runtime.processes.wait(id, WaitRequest(until="exit"))
        hog, filler = await runtime.processes.get("hog"), await runtime.processes.get("filler")
    assert (hog.limit, filler.limit) == ("memory", "disk")
    assert "64 MB" in str(hog.error)
    await registry.restart("small")
    async with registry.use("small") as runtime:
        assert (await runtime.processes.get("hog")).limit == "memory"


@needs_root
async def test_code_that_runs_into_a_limit_is_told_so(registry: Registry) -> None:
    await make(registry, "small", {"memory": "300M", "disk": "16M"})
    async with registry.use("small") as runtime:
        await runtime.code.create(CreateContext(id="c", language="python"))
        full = await runtime.code.run(RunCode(code="open('/workspace/x', 'wb').write(bytes(64 << 20))", context="c"))
        assert full.error is not None
        assert (full.error.name, full.error.limit) == ("OSError", "disk")
        dead = await runtime.code.run(RunCode(code="x = bytearray(1 << 30)", context="c"))
        assert dead.error is not None
        assert (dead.error.name, dead.error.limit) == ("ContextDied", "memory")
        assert "300 MB" in dead.error.message


@needs_root
async def test_whoever_runs_beside_a_hog_is_not_blamed_for_it(registry: Registry) -> None:
    await make(registry, "both", {"memory": "64M"})
    async with registry.use("both") as runtime:
        await runtime.sessions.create(CreateSession(id="other"))
    hog, bystander = await asyncio.gather(
        run(registry, "both", f"sleep 0.3; {HOG}"), run(registry, "both", "sleep 1", session="other")
    )
    assert (hog.limit, bystander.limit) == ("memory", None)


@needs_root
async def test_what_is_killed_while_no_command_runs_is_on_record_all_the_same(registry: Registry) -> None:
    await make(registry, "alone", {"memory": "64M"})
    await run(registry, "alone", f"(sleep 0.2; {HOG}) >/dev/null 2>&1 &")
    for _ in range(100):
        await registry.measure("alone")
        if await limits_reached(registry, "alone"):
            break
        await asyncio.sleep(0.05)
    assert await limits_reached(registry, "alone") == ["memory"]


async def test_a_result_and_a_log_are_no_larger_than_they_may_be(registry: Registry) -> None:
    await make(registry, "wordy", {"output": "4K", "log": "64K"})
    found = await run(registry, "wordy", "head -c 10000 /dev/zero | tr '\\0' x; echo no >&2")
    assert (len(found.stdout), found.stdout_truncated, found.stderr) == (4096, 5904, "no\n")
    assert found.limit == "output"
    async with registry.use("wordy") as runtime:
        # In one piece, more than is kept.
        command = "exec python3 -c 'import os; text = os.popen(\"seq 100000\").read(); os.write(1, text.encode())'"
        await runtime.processes.start(StartProcess(command=command, process_id="p"))
        await runtime.processes.wait("p", WaitRequest(until="exit"))
        logs = await runtime.processes.logs("p")
    assert len(logs.stdout) <= 64 * 1024
    assert logs.stdout.endswith("100000\n")


async def test_open_files_and_tmpfs_are_limited_in_every_kind_of_process(registry: Registry) -> None:
    await make(registry, "tight", {"openFiles": 100, "tmpfs": "2M"})
    assert (await run(registry, "tight", "ulimit -Hn; ulimit -Sn; ulimit -c")).stdout == "100\n100\n0\n"
    async with registry.use("tight") as runtime:
        await runtime.sessions.create(CreateSession(id="apart"))
        found = await runtime.code.run(RunCode(code="import resource; print(resource.getrlimit(7))"))
    assert found.stdout == "(100, 100)\n"
    assert (await run(registry, "tight", "ulimit -Hn", session="apart")).stdout == "100\n"
    shm = await run(registry, "tight", "head -c 3M /dev/zero >/dev/shm/x")
    assert (shm.limit, shm.exit_code) == ("tmpfs", 1)


# -- changing them -----------------------------------------------------------------------------------------------------


@needs_root
async def test_limits_change_while_it_runs(registry: Registry) -> None:
    await make(registry, "grows", {"memory": "64M", "disk": "16M", "pids": 20, "output": "1K"})
    assert (await run(registry, "grows", "python3 -c 'bytearray(100 << 20)'")).limit == "memory"
    more = Limits.model_validate({"memory": "256M", "disk": "64M", "pids": 100, "output": None, "openFiles": 80})
    info = await registry.update("grows", UpdateSandbox(limits=more))
    assert (info.limits.memory, info.limits.pids, info.limits.output) == (256 * MB, 100, None)
    assert info.limits.pending == ["openFiles"]
    found = await run(registry, "grows", "python3 -c 'bytearray(100 << 20)' && head -c 40M /dev/zero >f && seq 1000")
    assert (found.limit, found.exit_code, found.stdout_truncated) == (None, 0, 0)
    info = await registry.update("grows", UpdateSandbox(limits=Limits(memory=64 * MB)))
    assert info.limits.memory == 64 * MB
    assert (await run(registry, "grows", "python3 -c 'bytearray(100 << 20)'")).limit == "memory"
    await registry.restart("grows")
    assert (await registry.get("grows")).limits.pending == []
    assert (await run(registry, "grows", "ulimit -n; python3 -c 'bytearray(100 << 20)'")).stdout == "80\n"
    assert "limited" in [event.kind for event in await registry.events("grows")]


@needs_root
async def test_memory_that_is_in_use_is_not_taken_away(registry: Registry) -> None:
    await make(registry, "uses", {"memory": "256M"})
    async with registry.use("uses") as runtime:
        command = "python3 -c 'x = bytearray(100 << 20); print(1, flush=True); import time; time.sleep(60)'"
        await runtime.processes.start(StartProcess(command=command, process_id="p"))
        await runtime.processes.wait("p", WaitRequest(until="log", pattern="1"))
    with pytest.raises(LimitTooLowError, match="32 MB"):
        await registry.update("uses", UpdateSandbox(limits=Limits(memory=32 * MB), keep_alive=True))
    info = await registry.get("uses")
    assert (info.limits.memory, info.keep_alive) == (256 * MB, False)


@needs_root
async def test_a_machine_that_was_started_in_advance_is_held_to_what_was_asked(tmp_path: Path) -> None:
    registry = await open_registry(Settings(home=tmp_path / "home", warm_pool=1))
    try:
        while not registry._pool.ready:
            await asyncio.sleep(0.05)
        await make(registry, "warm", {"memory": "64M", "disk": "16M"})
        assert (await run(registry, "warm", HOG)).limit == "memory"
        assert (await run(registry, "warm", "head -c 32M /dev/zero >f")).limit == "disk"
        while not registry._pool.ready:
            await asyncio.sleep(0.05)
        await make(registry, "shm", {"tmpfs": "2M"})
        assert (await run(registry, "shm", "df --output=size -m /dev/shm | tail -1")).stdout.strip() == "2"
    finally:
        await registry.close()


# -- time --------------------------------------------------------------------------------------------------------------


async def test_one_whose_lifetime_is_over_is_stopped_and_says_so_until_it_gets_more(registry: Registry) -> None:
    await make(registry, "brief", {"lifetime": 1.5})
    await run(registry, "brief", "echo kept >f; sleep 60 >/dev/null 2>&1 &")
    for _ in range(200):
        if (await registry.get("brief")).state == State.HIBERNATED:
            break
        await asyncio.sleep(0.05)
    with pytest.raises(LifetimeOverError, match="has lived"):
        await run(registry, "brief", "true")
    assert "expired" in [event.kind for event in await registry.events("brief")]
    await registry.update("brief", UpdateSandbox(limits=Limits(lifetime=3600)))
    assert (await run(registry, "brief", "cat f")).stdout == "kept\n"


async def test_a_fork_has_the_limits_of_its_sandbox_and_a_life_of_its_own(registry: Registry) -> None:
    await make(registry, "parent", {"memory": "128M", "lifetime": 3600})
    await run(registry, "parent", "true")
    fork = (await registry.snapshots.fork("parent", ForkSandbox(ids=["child"]))).sandboxes[0]
    assert (fork.limits.memory, fork.limits.lifetime) == (128 * MB, 3600)
    assert (await registry.usage("child")).running_seconds == 0


# -- use ---------------------------------------------------------------------------------------------------------------


@needs_root
async def test_what_is_used_is_measured_and_adds_up_over_sleep_and_restarts(registry: Registry) -> None:
    busy = "python3 -c 'import time\nwhile time.process_time() < 0.4: pass'"  # however long that takes
    await run(registry, "used", f"{busy}; head -c 5M /dev/urandom >/workspace/f; sync /workspace/f; sleep 9 &")
    found = await registry.measure("used")
    assert found.now is not None
    assert found.now.cpu_seconds is not None
    assert found.now.cpu_seconds > 0.3
    assert found.now.memory is not None
    assert 1 * MB < found.now.memory < 200 * MB
    assert found.now.memory_peak is not None
    assert found.now.memory_peak >= found.now.memory
    assert found.now.disk is not None
    assert 5 * MB <= found.now.disk < 50 * MB
    assert found.now.processes is not None
    assert found.now.processes >= 3
    await registry.sleep("used", SleepSandbox())
    slept = await registry.measure("used")
    assert slept.now is None
    assert slept.usage.cpu_seconds >= found.now.cpu_seconds
    assert slept.usage.memory_byte_seconds > 0
    assert len(slept.history) == 1
    assert (await registry.measure("used", since=slept.history[0].at)).history == []
    await run(registry, "used", "true")
    again = await registry.usage("used")
    assert again.cpu_seconds > slept.usage.cpu_seconds
    await registry.destroy("used")
    last = (await registry.events("used"))[-1]
    assert last.details["usage"]["cpuSeconds"] > slept.usage.cpu_seconds


async def test_totals_outlive_the_server(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "home")
    registry = await open_registry(settings)
    await run(registry, "used", "timeout 0.3 sh -c 'while :; do :; done'")
    await registry.close()
    registry = await open_registry(settings)
    try:
        found = await registry.usage("used")
        assert found.running_seconds > 0.2
        assert (await registry.get("used")).state == State.HIBERNATED
    finally:
        await registry.close()
