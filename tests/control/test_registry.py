"""Sandboxes by id: made on first use, the same for everyone, asleep and awake, gone when destroyed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from skerry.control.open import open_registry
from skerry.control.registry import Registry
from skerry.errors import (
    EnvLockedError,
    FilesMissingError,
    ImageNotFoundError,
    InvalidSandboxIdError,
    SandboxBusyError,
    SandboxExistsError,
    SandboxLostError,
    SandboxNotFoundError,
    StoreError,
)
from skerry.models import (
    CreateContext,
    CreateSandbox,
    ExecRequest,
    ExecResult,
    RunCode,
    SetEnv,
    StartProcess,
    StartSandbox,
    State,
    UpdateSandbox,
)
from skerry.settings import Settings
from tests.disks import names
from tests.machines import descriptors


async def run(registry: Registry, id: str, command: str, **options: object) -> ExecResult:
    async with registry.use(id) as runtime:
        return await runtime.exec(ExecRequest(command=command, **options))  # type: ignore[arg-type]


async def test_the_first_use_makes_it_and_the_same_id_is_the_same_machine(registry: Registry) -> None:
    with pytest.raises(SandboxNotFoundError):
        await registry.get("demo")
    await run(registry, "demo", "echo mine >f; X=1")
    assert (await run(registry, " DEMO ", "cat f; echo $X; hostname")).stdout == "mine\n1\ndemo\n"
    info = await registry.get("demo")
    assert (info.state, info.starts) == (State.ACTIVE, 1)


async def test_two_clients_at_once_get_one_machine(registry: Registry) -> None:
    results = await asyncio.gather(*(run(registry, "both", "echo $$", session="default") for _ in range(20)))
    assert len({result.stdout for result in results}) == 1
    assert (await registry.get("both")).starts == 1


async def test_an_impossible_id_is_refused_and_nothing_is_made(registry: Registry) -> None:
    for id in ("", "-a", "a-", "a" * 64, "www", "a.b", "a/b", "../x", "ä"):
        with pytest.raises(InvalidSandboxIdError):
            await run(registry, id, "true")
    assert (await registry.list()).sandboxes == []


async def test_created_with_options_and_only_once(registry: Registry) -> None:
    info = await registry.create(
        CreateSandbox(id="made", env={"A": "1"}, labels={"team": "x"}, sleep_after="5m", limits={"memoryMb": 512})  # type: ignore[arg-type]
    )
    assert (info.state, info.sleep_after, info.labels) == (State.CREATED, 300, {"team": "x"})
    assert info.limits.memory == 512 << 20
    with pytest.raises(SandboxExistsError):
        await registry.create(CreateSandbox(id="made"))
    with pytest.raises(ImageNotFoundError):
        await registry.create(CreateSandbox(id="other", image="nope"))
    assert [s.id for s in (await registry.list()).sandboxes] == ["made"]
    assert (await run(registry, "made", "echo $A")).stdout == "1\n"


async def test_variables_change_before_the_first_start_and_while_it_sleeps_only(registry: Registry) -> None:
    await registry.set_env("env", SetEnv(env={"A": "1", "B": "2"}))
    assert (await run(registry, "env", "echo $A$B")).stdout == "12\n"
    with pytest.raises(EnvLockedError) as error:
        await registry.set_env("env", SetEnv(env={"A": "3"}))
    for way in ("create_session(env=", "exec(", "stop"):
        assert way in (error.value.hint or "")
    await registry.stop("env")
    await registry.set_env("env", SetEnv(env={"A": "3", "B": None}))
    assert (await run(registry, "env", "echo $A$B")).stdout == "3\n"


async def test_stopping_keeps_files_ends_processes_and_the_next_use_wakes_it(registry: Registry) -> None:
    await run(registry, "nap", "echo kept >/workspace/f; echo too >/tmp/g; echo home >~/h; X=gone")
    async with registry.use("nap") as runtime:
        process = await runtime.processes.start(StartProcess(command="sleep 600", process_id="server"))
    assert process.status == "running"
    info = await registry.stop("nap")
    assert (info.state, info.last_stop) == (State.HIBERNATED, "It was stopped on request.")
    assert (
        await run(registry, "nap", "cat /workspace/f /tmp/g ~/h; echo [$X]; pgrep sleep")
    ).stdout == "kept\ntoo\nhome\n[]\n"
    async with registry.use("nap") as runtime:
        past = await runtime.processes.get("server")
    assert past.status == "killed"
    assert past.error == "It was ended by SIGTERM, when the sandbox was put to sleep."
    assert (await registry.get("nap")).starts == 2
    kinds = [event.kind for event in await registry.events("nap")]
    assert kinds == ["created", "started", "hibernated", "woken"]


async def test_an_ephemeral_one_forgets_everything_when_it_stops(registry: Registry) -> None:
    await registry.create(CreateSandbox(id="eph", ephemeral=True))
    await run(registry, "eph", "echo x >f")
    await registry.stop("eph")
    assert (await run(registry, "eph", "cat f")).exit_code == 1


async def test_it_goes_to_sleep_when_nobody_uses_it_and_not_while_a_command_runs(registry: Registry) -> None:
    await registry.create(CreateSandbox(id="idle", sleep_after=1))
    await run(registry, "idle", "sleep 3; echo x >f")
    assert (await registry.get("idle")).state == State.ACTIVE
    async with asyncio.timeout(30):
        while (await registry.get("idle")).state != State.HIBERNATED:
            await asyncio.sleep(0.1)
    assert "Nobody used it" in str((await registry.get("idle")).last_stop)
    assert (await run(registry, "idle", "cat f")).stdout == "x\n"


async def test_destroying_is_final_and_the_id_can_be_used_anew(registry: Registry, tmp_path: Path) -> None:
    await run(registry, "gone", "echo x >f")
    await registry.destroy("gone")
    with pytest.raises(SandboxNotFoundError):
        await registry.get("gone")
    with pytest.raises(SandboxNotFoundError):
        await registry.destroy("gone")
    assert "gone" not in names(tmp_path / "home", "sandboxes")
    assert (await run(registry, "gone", "cat f")).exit_code == 1


async def test_a_command_in_flight_is_told_when_its_sandbox_is_destroyed(registry: Registry) -> None:
    running = asyncio.create_task(run(registry, "flight", "sleep 600"))
    await asyncio.sleep(0.5)
    await registry.destroy("flight")
    with pytest.raises(SandboxLostError):
        await running


async def test_destroy_and_use_at_the_same_time_never_mix_two_lives(registry: Registry) -> None:
    async def use(n: int) -> None:
        try:
            result = await run(registry, "race", f"echo {n} >>log; wc -l <log")
            assert result.exit_code == 0
        except SandboxLostError:
            pass

    async def destroy() -> None:
        try:
            await registry.destroy("race")
        except SandboxNotFoundError:
            pass

    for _ in range(5):
        await asyncio.gather(*(use(n) for n in range(5)), destroy(), *(use(n) for n in range(5)))
    assert (await run(registry, "race", "echo fine", session=None)).stdout == "fine\n"


async def test_a_machine_that_dies_is_reported_and_started_again(registry: Registry) -> None:
    await run(registry, "dies", "echo kept >f")
    owner = registry._owners["dies"]
    assert owner._machine is not None
    await registry.provider.launcher.kill(owner._machine.key)  # type: ignore[attr-defined]
    async with asyncio.timeout(20):
        while (await registry.get("dies")).state != State.HIBERNATED:
            await asyncio.sleep(0.05)
    assert "ended unexpectedly" in str((await registry.get("dies")).last_stop)
    assert (await run(registry, "dies", "cat f")).stdout == "kept\n"


async def test_a_wake_without_its_files_is_an_error_and_never_an_empty_workspace(registry: Registry) -> None:
    await run(registry, "lost", "echo x >f")
    await registry.stop("lost")
    await registry.provider.forget("lost")
    for _ in range(2):  # and stays one
        with pytest.raises(FilesMissingError, match="files of sandbox 'lost' are missing") as error:
            await run(registry, "lost", "true")
    for way in ("backup", "fresh", "destroy"):
        assert way in str(error.value.hint)
    info = await registry.get("lost")
    assert (info.state, info.last_stop) == (State.FAILED, error.value.message)
    assert [event.kind for event in await registry.events("lost")].count("failed") == 1
    await registry.destroy("lost")
    assert (await run(registry, "lost", "echo new")).stdout == "new\n"


async def test_a_sandbox_whose_files_are_missing_starts_over_an_empty_disk_if_told_so(registry: Registry) -> None:
    await run(registry, "lost", "echo x >f")
    await registry.stop("lost")
    await registry.provider.forget("lost")
    with pytest.raises(FilesMissingError):
        await registry.start("lost", StartSandbox())
    assert (await registry.start("lost", StartSandbox(fresh=True))).state is State.ACTIVE
    assert (await run(registry, "lost", "ls")).stdout == ""
    last = (await registry.events("lost"))[-1]
    assert (last.kind, last.from_state) == ("woken", State.FAILED)
    assert "empty disk" in last.message


async def test_files_that_are_there_are_kept_also_when_a_fresh_start_would_do(registry: Registry) -> None:
    await run(registry, "there", "echo x >f")
    await registry.stop("there")
    await registry.start("there", StartSandbox(fresh=True))
    assert (await run(registry, "there", "cat f")).stdout == "x\n"


async def test_a_caller_who_gives_up_during_the_start_leaves_a_whole_machine(registry: Registry) -> None:
    for delay in (0.0, 0.005, 0.01, 0.015, 0.02):
        id = f"given-up-{int(delay * 1000)}"
        starting = asyncio.create_task(run(registry, id, "echo first"))
        await asyncio.sleep(delay)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        assert (await run(registry, id, "echo whole")).stdout == "whole\n"
        assert (await registry.get(id)).starts == 1
        await registry.destroy(id)


async def test_listing_filters_and_pages(registry: Registry) -> None:
    for n in range(5):
        await registry.create(CreateSandbox(id=f"list-{n}", labels={"odd": str(n % 2)}))
    await run(registry, "list-3", "true")
    assert [s.id for s in (await registry.list(labels={"odd": "1"})).sandboxes] == ["list-1", "list-3"]
    assert [s.id for s in (await registry.list(state=State.ACTIVE)).sandboxes] == ["list-3"]
    page = await registry.list(limit=2, prefix="list-")
    ids = [s.id for s in page.sandboxes]
    while page.next_cursor:
        page = await registry.list(limit=2, prefix="list-", cursor=page.next_cursor)
        ids += [s.id for s in page.sandboxes]
    assert ids == [f"list-{n}" for n in range(5)]


async def test_labels_and_idle_time_can_change_at_any_time(registry: Registry) -> None:
    await run(registry, "upd", "true")
    info = await registry.update("upd", UpdateSandbox(labels={"a": "b"}, sleep_after="never"))
    assert (info.labels, info.sleep_after) == ({"a": "b"}, None)
    assert (await registry.get("upd")).labels == {"a": "b"}


async def test_after_a_restart_of_the_server_files_are_there_and_the_loss_of_processes_is_said(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "home")
    first = await open_registry(settings)
    await run(first, "demo", "echo kept >f")
    async with first.use("demo") as runtime:
        await runtime.processes.start(StartProcess(command="sleep 600", process_id="web"))
    await first.close()
    second = await open_registry(settings)
    try:
        info = await second.get("demo")
        assert (info.state, info.last_stop) == (State.HIBERNATED, "The server was stopped.")
        assert (await run(second, "demo", "cat f")).stdout == "kept\n"
        async with second.use("demo") as runtime:
            assert (await runtime.processes.get("web")).status == "killed"
    finally:
        await second.close()


async def test_two_processes_may_share_a_home_but_not_a_running_sandbox(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "home")
    one, two = await open_registry(settings), await open_registry(settings)
    try:
        await run(one, "shared", "echo x >f")
        with pytest.raises(SandboxBusyError, match="another process"):
            await run(two, "shared", "true")
        assert (await two.get("shared")).state == State.ACTIVE
        assert (await run(two, "other", "echo fine")).stdout == "fine\n"
        await one.stop("shared")
        assert (await run(two, "shared", "cat f")).stdout == "x\n"
    finally:
        await one.close()
        await two.close()


async def test_a_server_that_cannot_open_its_store_leaves_nothing_behind(tmp_path: Path) -> None:
    home = tmp_path / "home"
    before = await descriptors()
    with pytest.raises(StoreError):
        await open_registry(Settings(home=home, database_url="postgresql://nobody@127.0.0.1:1/none"))
    assert await descriptors(before) <= before
    second = await open_registry(Settings(home=home))  # would wait for ever for a home that is still taken
    await second.close()


async def test_a_warm_machine_becomes_the_sandbox_that_is_asked_for(tmp_path: Path) -> None:
    registry = await open_registry(Settings(home=tmp_path / "home", warm_pool=2))
    try:
        async with asyncio.timeout(30):
            while registry._pool.ready < 2:
                await asyncio.sleep(0.05)
        assert (await run(registry, "warm", "hostname; pwd; echo x >f")).stdout == "warm\n/workspace\n"
        await registry.create(CreateSandbox(id="warm-env", env={"A": "1"}))
        assert (await run(registry, "warm-env", "echo $A; hostname")).stdout == "1\nwarm-env\n"
        await registry.stop("warm")
        assert (await run(registry, "warm", "cat f")).stdout == "x\n"
        async with asyncio.timeout(30):
            while registry._pool.ready < 2:
                await asyncio.sleep(0.05)
    finally:
        await registry.close()
    assert names(tmp_path / "home", "sandboxes") == ["warm", "warm-env"]


async def test_contexts_outlive_a_stop_and_say_that_their_state_is_gone(registry: Registry) -> None:
    async with registry.use("thinker") as runtime:
        await runtime.code.create(CreateContext(id="mine", language="python", env={"A": "1"}))
        await runtime.code.create(CreateContext(id="other"))
        await runtime.code.run(RunCode(code="x = 1", context="mine"))
        await runtime.code.run(RunCode(code="x = 1"))
        await runtime.code.delete("other")
    await registry.stop("thinker")
    async with registry.use("thinker") as runtime:
        assert [(known.id, known.status) for known in runtime.code.list()] == [
            ("mine", "ended"),
            ("default-python", "ended"),
        ]
        for context in ("mine", None):
            again = await runtime.code.run(RunCode(code="import os; os.environ.get('A')", context=context))
            assert again.text == ("'1'" if context else None)
            assert "stopped and started again" in again.notices[0]
            assert (await runtime.code.run(RunCode(code="1", context=context))).notices == []
