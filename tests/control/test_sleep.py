"""Frozen, hibernated and awake again: what stays, what is told, and what wakes it."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from skerry.control.open import open_registry
from skerry.control.registry import Registry
from skerry.errors import FreezeFailedError, InvalidRequestError, SandboxLostError, SandboxNotFoundError
from skerry.models import (
    CreateSandbox,
    CreateSession,
    ExecRequest,
    ExecResult,
    ProcessStatus,
    RunCode,
    SandboxInfo,
    SleepSandbox,
    Stage,
    StartProcess,
    State,
    UpdateSandbox,
    WaitRequest,
)
from skerry.settings import Settings
from tests import warm
from tests.machines import descriptors, read_inside

FREEZE = SleepSandbox(stage="freeze")
COUNTER = "i=0; while :; do i=$((i+1)); echo $i >/tmp/n.new; mv /tmp/n.new /tmp/n; sleep 0.001; done"
STAGES: tuple[Stage, ...] = ("freeze", "hibernate")


async def run(registry: Registry, id: str, command: str, **options: object) -> ExecResult:
    async with registry.use(id) as runtime:
        return await runtime.exec(ExecRequest(command=command, **options))  # type: ignore[arg-type]


async def until(registry: Registry, id: str, state: State) -> SandboxInfo:
    async with asyncio.timeout(30):
        while (info := await registry.get(id)).state is not state:
            await asyncio.sleep(0.02)
    return info


async def kinds(registry: Registry, id: str) -> list[str]:
    return [event.kind for event in await registry.events(id, limit=1000)]


async def begin(
    registry: Registry, id: str, command: str, first: str = "true", **options: object
) -> asyncio.Task[ExecResult]:
    """A command that is known to run inside, and to have done what is to be done first."""
    await run(registry, id, "rm -f /tmp/begun", session=None)
    running = asyncio.create_task(run(registry, id, f"{first}; touch /tmp/begun; {command}", **options))
    while (await run(registry, id, "test -e /tmp/begun", session=None)).exit_code:
        pass
    return running


def count_of(registry: Registry) -> int:
    """What the counter inside has reached, read from outside: asking inside would wake it."""
    return int(read_inside(registry.provider.launcher._process.pid, "/tmp/n") or 0)  # type: ignore[attr-defined]


@asynccontextmanager
async def counting(registry: Registry, id: str) -> AsyncIterator[None]:
    async with registry.use(id) as runtime:
        await runtime.processes.start(StartProcess(command=COUNTER, process_id="counter"))
        while (await runtime.exec(ExecRequest(command="test -s /tmp/n"))).exit_code:
            pass
    yield


# -- freeze ------------------------------------------------------------------------------------------------------------


async def test_a_frozen_process_stands_still_and_goes_on_where_it_was(registry: Registry) -> None:
    async with counting(registry, "still"):
        info = await registry.sleep("still", FREEZE)
        assert (info.state, info.starts, info.last_stop) == (State.FROZEN, 1, "It was frozen on request.")
        frozen_at = count_of(registry)
        await asyncio.sleep(0.3)
        assert count_of(registry) == frozen_at
        assert int((await run(registry, "still", "cat /tmp/n")).stdout) >= frozen_at
        while count_of(registry) <= frozen_at:
            await asyncio.sleep(0.01)
        async with registry.use("still") as runtime:
            assert (await runtime.processes.get("counter")).status is ProcessStatus.RUNNING
        assert (await registry.get("still")).starts == 1


async def test_sessions_variables_and_code_outlive_a_freeze(registry: Registry) -> None:
    await run(registry, "mind", "cd /tmp; X=kept")
    async with registry.use("mind") as runtime:
        await runtime.sessions.create(CreateSession(id="apart"))
        await runtime.exec(ExecRequest(command="Y=too", session="apart"))
        await runtime.code.run(RunCode(code="z = 42"))
    await registry.sleep("mind", FREEZE)
    assert (await run(registry, "mind", "echo $PWD $X")).stdout == "/tmp kept\n"
    assert (await run(registry, "mind", "echo $Y", session="apart")).stdout == "too\n"
    async with registry.use("mind") as runtime:
        assert (await runtime.code.run(RunCode(code="z"))).text == "42"


async def test_isolated_sessions_are_frozen_too(registry: Registry) -> None:
    async with registry.use("both") as runtime:
        await runtime.sessions.create(CreateSession(id="apart"))
        await runtime.processes.start(StartProcess(command=COUNTER, session="apart"))
        while (await runtime.exec(ExecRequest(command="test -s /tmp/n"))).exit_code:
            pass
    await registry.sleep("both", FREEZE)
    frozen_at = count_of(registry)
    await asyncio.sleep(0.3)
    assert count_of(registry) == frozen_at
    await registry.wake("both")
    while count_of(registry) <= frozen_at:
        await asyncio.sleep(0.01)


async def test_what_is_under_way_when_it_is_frozen_ends_after_it_was_thawed(registry: Registry) -> None:
    running = await begin(registry, "under-way", "sleep 0.5; echo done", timeout=5000)
    await registry.sleep("under-way", FREEZE)
    done, _ = await asyncio.wait([running], timeout=1.0)
    assert not done
    await registry.wake("under-way")
    assert (await running).stdout == "done\n"


async def test_no_time_passes_for_a_command_while_it_is_frozen(registry: Registry) -> None:
    async with registry.use("clock") as runtime:
        await runtime.code.run(RunCode(code="import time"))
        limited = [
            await begin(registry, "clock", "sleep 1.5; echo in time", timeout=3000, session=session)
            for session in ("default", None)
        ]
        process = await runtime.processes.start(StartProcess(command="sleep 1.5", timeout=3000))
        code = asyncio.create_task(runtime.code.run(RunCode(code="time.sleep(1.5); 1", timeout=3000)))
        waiting = asyncio.create_task(runtime.processes.wait(process.id, WaitRequest(timeout=3000)))
        while runtime.code.list()[0].status != "running":
            await asyncio.sleep(0.01)
        await registry.sleep("clock", FREEZE)
        await asyncio.sleep(3.5)
        assert not any(task.done() for task in (*limited, code, waiting))
        await registry.wake("clock")
        assert [(await task).stdout for task in limited] == ["in time\n"] * 2
        assert (await code).text == "1"
        assert (await waiting).exit_code == 0


async def test_time_that_runs_out_after_a_freeze_still_runs_out(registry: Registry) -> None:
    running = await begin(registry, "late", "sleep 60", timeout=700)
    await registry.sleep("late", FREEZE)
    await asyncio.sleep(1.0)
    await registry.wake("late")
    assert (await running).timed_out


async def test_sessions_that_are_made_while_it_is_frozen_and_thawed_get_their_machine(registry: Registry) -> None:
    async def make(number: int) -> str:
        async with registry.use("made") as runtime:
            return (await runtime.sessions.create(CreateSession(id=f"s{number}"))).id

    async def freeze() -> None:
        await registry.sleep("made", FREEZE)

    await run(registry, "made", "true")
    for round in range(3):
        made = [asyncio.create_task(make(3 * round + number)) for number in range(3)]
        for _ in range(4):
            await asyncio.sleep(0.005)
            await freeze()
            await asyncio.sleep(0.02)
            await registry.wake("made")
        async with asyncio.timeout(20):
            await asyncio.gather(*made)
    assert (await run(registry, "made", "echo fine", session="s8")).stdout == "fine\n"


async def test_a_session_that_is_asked_for_just_before_a_freeze_does_not_keep_it_from_being_destroyed(
    registry: Registry,
) -> None:
    async def make() -> None:
        async with registry.use("stuck") as runtime:
            await runtime.sessions.create(CreateSession(id="late"))

    await run(registry, "stuck", "true")
    for delay in (0.0, 0.002, 0.004, 0.008):
        making = asyncio.create_task(make())
        await asyncio.sleep(delay)
        async with asyncio.timeout(10):
            await registry.sleep("stuck", FREEZE)
            await registry.destroy("stuck")
            await asyncio.gather(making, return_exceptions=True)
            await run(registry, "stuck", "true")


async def test_freezing_twice_waking_twice_and_freezing_what_sleeps_deeper_change_nothing(registry: Registry) -> None:
    assert (await registry.create(CreateSandbox(id="calm"))).state is State.CREATED
    assert (await registry.sleep("calm", FREEZE)).state is State.CREATED
    assert (await registry.sleep("calm", SleepSandbox())).state is State.CREATED
    await registry.wake("calm")
    for _ in range(2):
        assert (await registry.sleep("calm", FREEZE)).state is State.FROZEN
    for _ in range(2):
        assert (await registry.wake("calm")).state is State.ACTIVE
    for request in (SleepSandbox(), FREEZE, SleepSandbox()):
        assert (await registry.sleep("calm", request)).state is State.HIBERNATED
    assert await kinds(registry, "calm") == ["created", "started", "frozen", "thawed", "hibernated"]


async def test_sleep_wake_and_touch_make_no_sandbox(registry: Registry) -> None:
    for change in (registry.sleep("nobody", FREEZE), registry.wake("nobody"), registry.renew("nobody")):
        with pytest.raises(SandboxNotFoundError):
            await change
    assert (await registry.list()).sandboxes == []


async def test_a_sandbox_that_cannot_be_frozen_says_so_and_goes_on(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with counting(registry, "hot"):
        machine = registry._owners["hot"]._machine
        assert machine is not None
        group = registry.provider.group(machine.key)  # type: ignore[attr-defined]
        monkeypatch.setattr("skerry.providers.local.cgroups.FREEZE_SECONDS", -1.0)
        monkeypatch.setattr("skerry.providers.local.cgroups.os.pread", lambda *_: b"frozen 0")
        with pytest.raises(FreezeFailedError, match="did not stand still"):
            await registry.sleep("hot", FREEZE)
        monkeypatch.undo()
        assert "frozen 0" in (group.directory / "cgroup.events").read_text()
        assert (await registry.get("hot")).state is State.ACTIVE
        before = count_of(registry)
        while count_of(registry) <= before:
            await asyncio.sleep(0.01)
        assert (await run(registry, "hot", "echo fine")).stdout == "fine\n"


# -- the end of a frozen one -------------------------------------------------------------------------------------------


async def test_a_frozen_sandbox_can_be_destroyed_and_leaves_nothing(registry: Registry) -> None:
    async with counting(registry, "ice"):
        machine = registry._owners["ice"]._machine
        assert machine is not None
        group = registry.provider.group(machine.key)  # type: ignore[attr-defined]
        assert group.directory.is_dir()
        await registry.sleep("ice", FREEZE)
        async with asyncio.timeout(10):
            await registry.destroy("ice")
        assert not group.directory.exists()
        assert (await run(registry, "ice", "ls /tmp")).stdout == ""


async def test_a_frozen_sandbox_hibernates_politely(registry: Registry) -> None:
    async with registry.use("both") as runtime:
        script = "trap 'echo bye >/workspace/said; exit 0' TERM; touch /tmp/ready; while :; do sleep 0.01; done"
        await runtime.processes.start(StartProcess(command=script))
        while (await runtime.exec(ExecRequest(command="test -e /tmp/ready"))).exit_code:
            pass
    await registry.sleep("both", FREEZE)
    assert (await registry.sleep("both", SleepSandbox(grace=20))).state is State.HIBERNATED
    assert (await run(registry, "both", "cat said")).stdout == "bye\n"


async def test_a_command_in_a_frozen_sandbox_is_told_when_it_is_destroyed(registry: Registry) -> None:
    running = await begin(registry, "flight", "sleep 600")
    await registry.sleep("flight", FREEZE)
    await registry.destroy("flight")
    with pytest.raises(SandboxLostError):
        await running


async def test_a_caller_who_leaves_a_frozen_sandbox_leaves_nothing_behind(registry: Registry) -> None:
    await run(registry, "left", "true")
    before = await descriptors()
    running = await begin(registry, "left", "sleep 600")
    await registry.sleep("left", FREEZE)
    running.cancel()
    await asyncio.sleep(0.1)
    await registry.wake("left")
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (await run(registry, "left", "pgrep sleep")).exit_code == 1
    assert (await registry.get("left")).active_operations == 0
    assert await descriptors(before) <= before


async def test_a_machine_that_dies_while_it_is_frozen_is_reported(registry: Registry) -> None:
    await run(registry, "dies", "echo kept >f")
    await registry.sleep("dies", FREEZE)
    machine = registry._owners["dies"]._machine
    assert machine is not None
    await registry.provider.launcher.kill(machine.key)  # type: ignore[attr-defined]
    await until(registry, "dies", State.HIBERNATED)
    assert (await kinds(registry, "dies"))[-1] == "died"
    assert (await run(registry, "dies", "cat f")).stdout == "kept\n"


_SERVER = """
import asyncio, sys
from pathlib import Path
from skerry.control.open import open_registry
from skerry.models import ExecRequest, SleepSandbox
from skerry.settings import Settings

async def main():
    registry = await open_registry(Settings(home=Path(sys.argv[1])))
    async with registry.use("ice") as runtime:
        await runtime.exec(ExecRequest(command="echo kept >f; sleep 600 &"))
    await registry.sleep("ice", SleepSandbox(stage="freeze"))
    machine = registry._owners["ice"]._machine
    launcher = registry.provider.launcher._process.pid
    print(registry.provider.group(machine.key).directory, launcher, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize("launcher_too", [False, True])
async def test_a_frozen_sandbox_ends_with_its_server_however_that_ends(tmp_path: Path, launcher_too: bool) -> None:
    home = tmp_path / "home"
    with warm.Popen(_SERVER, str(home), stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        directory, launcher = server.stdout.readline().split()
        inside = [int(pid) for pid in (Path(directory) / "cgroup.procs").read_text().split()]
        assert len(inside) >= 3
        # The launcher first: then nobody is left who could clean up.
        if launcher_too:
            os.kill(int(launcher), signal.SIGKILL)
        server.kill()
    async with asyncio.timeout(20):
        while any(alive(pid) for pid in inside):
            await asyncio.sleep(0.02)
        while not launcher_too and Path(directory).exists():
            await asyncio.sleep(0.02)
    registry = await open_registry(Settings(home=home))
    try:
        assert not Path(directory).exists()
        info = await registry.get("ice")
        assert (info.state, await kinds(registry, "ice")) == (
            State.HIBERNATED,
            ["created", "started", "frozen", "died"],
        )
        assert (await run(registry, "ice", "cat f; pgrep sleep")).stdout == "kept\n"
    finally:
        await registry.close()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


# -- hibernate ---------------------------------------------------------------------------------------------------------


async def test_processes_hear_sigterm_and_have_time_to_write_their_state(registry: Registry) -> None:
    async with registry.use("grace") as runtime:
        for name, trap in {"polite": "sleep 0.3; echo saved >/workspace/state; exit 0", "fails": "exit 3"}.items():
            script = f"trap '{trap}' TERM; touch /tmp/{name}; while :; do sleep 0.01; done"
            await runtime.processes.start(StartProcess(command=script, process_id=name))
        await runtime.processes.start(StartProcess(command="sleep 600", process_id="plain"))
        while (await runtime.exec(ExecRequest(command="test -e /tmp/polite -a -e /tmp/fails"))).exit_code:
            pass
    await registry.sleep("grace", SleepSandbox(grace="20s"))
    assert (await run(registry, "grace", "cat state")).stdout == "saved\n"
    async with registry.use("grace") as runtime:
        past = {info.id: info for info in await runtime.processes.list()}
    assert [(past[id].status, past[id].exit_code) for id in ("polite", "fails", "plain")] == [
        (ProcessStatus.COMPLETED, 0),
        (ProcessStatus.FAILED, 3),
        (ProcessStatus.KILLED, 143),
    ]
    assert "ended by itself after SIGTERM" in str(past["polite"].error)
    event = next(event for event in await registry.events("grace") if event.kind == "hibernated")
    assert event.details == {"ended": ["polite", "fails", "plain"], "killed": []}


async def test_one_that_will_not_end_is_killed_when_its_time_is_up_and_the_record_says_so(registry: Registry) -> None:
    async with registry.use("rude") as runtime:
        script = "trap '' TERM; touch /tmp/ready; while :; do sleep 0.01; done"
        await runtime.processes.start(StartProcess(command=script, process_id="rude"))
        while (await runtime.exec(ExecRequest(command="test -e /tmp/ready"))).exit_code:
            pass
    await registry.sleep("rude", SleepSandbox(grace=0.3))
    async with registry.use("rude") as runtime:
        past = await runtime.processes.get("rude")
    assert (past.status, past.exit_code) == (ProcessStatus.KILLED, None)
    assert "did not end in the time" in str(past.error)
    event = next(event for event in await registry.events("rude") if event.kind == "hibernated")
    assert event.details == {"ended": [], "killed": ["rude"]}
    assert event.took is not None
    assert event.took >= 300


async def test_isolated_sessions_hear_sigterm_too(registry: Registry) -> None:
    async with registry.use("apart") as runtime:
        await runtime.sessions.create(CreateSession(id="apart"))
        script = "trap 'echo bye >/workspace/said; exit 0' TERM; touch /tmp/ready; while :; do sleep 0.01; done"
        await runtime.processes.start(StartProcess(command=script, session="apart"))
        while (await runtime.exec(ExecRequest(command="test -e /tmp/ready"))).exit_code:
            pass
    await registry.sleep("apart", SleepSandbox(grace=20))
    assert (await run(registry, "apart", "cat said")).stdout == "bye\n"


async def test_without_grace_nothing_is_asked(registry: Registry) -> None:
    async with registry.use("quick") as runtime:
        script = "trap 'echo bye >/workspace/said; exit 0' TERM; touch /tmp/ready; while :; do sleep 0.01; done"
        await runtime.processes.start(StartProcess(command=script))
        while (await runtime.exec(ExecRequest(command="test -e /tmp/ready"))).exit_code:
            pass
    await registry.sleep("quick", SleepSandbox(grace=0))
    assert (await run(registry, "quick", "cat said")).exit_code == 1


async def test_a_command_in_progress_hears_sigterm_and_is_answered(registry: Registry) -> None:
    plain = await begin(registry, "working", "sleep 600", session=None)
    heard = await begin(registry, "working", "while :; do sleep 0.01; done", "trap 'echo bye; exit 7' TERM")
    await registry.sleep("working", SleepSandbox(grace=20))
    assert (await plain).exit_code == 143
    assert ((await heard).exit_code, (await heard).stdout) == (7, "bye\n")


async def test_an_open_terminal_does_not_use_up_the_grace(registry: Registry) -> None:
    async with registry.use("shell") as runtime:
        await runtime.terminals.of_session()
    async with asyncio.timeout(10):
        await registry.sleep("shell", SleepSandbox(grace=3600))


async def test_a_closing_server_is_polite_as_well(tmp_path: Path) -> None:
    registry = await open_registry(Settings(home=tmp_path / "home"))
    async with registry.use("polite") as runtime:
        script = "trap 'echo bye >/workspace/said; exit 0' TERM; touch /tmp/ready; while :; do sleep 0.01; done"
        await runtime.processes.start(StartProcess(command=script))
        while (await runtime.exec(ExecRequest(command="test -e /tmp/ready"))).exit_code:
            pass
    await registry.sleep("polite", FREEZE)
    await registry.close()
    again = await open_registry(Settings(home=tmp_path / "home"))
    try:
        assert (await run(again, "polite", "cat said")).stdout == "bye\n"
    finally:
        await again.close()


@pytest.mark.parametrize("grace", ["soon", -1, "1y"])
async def test_a_grace_that_is_no_duration_is_refused_and_nothing_changes(
    registry: Registry, grace: str | float
) -> None:
    await run(registry, "same", "true")
    with pytest.raises(InvalidRequestError):
        await registry.sleep("same", SleepSandbox(grace=grace))
    assert (await registry.get("same")).state is State.ACTIVE


# -- again and again ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
async def test_fifty_times_asleep_and_awake_and_every_file_is_the_same(registry: Registry, stage: Stage) -> None:
    await run(
        registry, "often", "mkdir -p tree/a/b; for n in $(seq 40); do head -c $((n * 997)) /dev/urandom >tree/$n; done"
    )
    await run(
        registry, "often", "ln tree/1 tree/a/hard; ln -s ../1 tree/a/soft; chmod 4755 tree/2; mkfifo tree/a/b/fifo"
    )
    digest = "find . -type f -print0 | sort -z | xargs -0 sha256sum; find . -printf '%p %y %m %l %n %s\\n' | sort"
    before = await run(registry, "often", digest)
    assert before.stdout.count("\n") > 80
    own = hashlib.sha256(b"").hexdigest()
    for number in range(50):
        await registry.sleep("often", SleepSandbox(stage=stage))
        data = os.urandom(1000)
        async with registry.use("often") as runtime:
            await runtime.files.write("/tmp/own", data)
        own = hashlib.sha256(data).hexdigest()
        assert (await run(registry, "often", "sha256sum </tmp/own")).stdout.split()[0] == own, number
    assert (await run(registry, "often", digest)).stdout == before.stdout
    assert (await registry.get("often")).starts == (1 if stage == "freeze" else 51)


@pytest.mark.parametrize("stage", STAGES)
async def test_a_hundred_requests_at_once_wake_it_once(registry: Registry, stage: Stage) -> None:
    await run(registry, "crowd", "echo x >f")
    for _ in range(3):
        await registry.sleep("crowd", SleepSandbox(stage=stage))
        seen = len(await registry.events("crowd", limit=1000))
        results = await asyncio.gather(*(run(registry, "crowd", "cat f", session=None) for _ in range(100)))
        assert {result.stdout for result in results} == {"x\n"}
        woken = [event.kind for event in (await registry.events("crowd", limit=1000))[seen:]]
        assert woken == ["thawed" if stage == "freeze" else "woken"]


async def test_sleep_and_use_at_the_same_time_lose_nothing(registry: Registry) -> None:
    async def sleep(n: int) -> None:
        await registry.sleep("race", SleepSandbox(stage=STAGES[n % 2], grace=5))

    async def use(n: int) -> str | None:
        try:
            return (await run(registry, "race", f"echo {n} >>log; echo {n}", session=None)).stdout
        except SandboxLostError:
            return None  # it was put to sleep just then

    await run(registry, "race", "true")
    for _ in range(5):
        await asyncio.gather(*(use(n) for n in range(8)), *(sleep(n) for n in range(4)), *(use(n) for n in range(8)))
    assert (await run(registry, "race", "echo fine")).stdout == "fine\n"
    assert (await registry.get("race")).active_operations == 0


# -- idleness ----------------------------------------------------------------------------------------------------------


async def test_idleness_freezes_where_that_is_chosen_and_hibernates_later(registry: Registry) -> None:
    await registry.create(CreateSandbox(id="steps", sleep_after=1, on_idle="freeze", hibernate_after=1))
    await run(registry, "steps", "echo x >f; sleep 600 &")
    frozen = await until(registry, "steps", State.FROZEN)
    assert frozen.last_stop == "Nobody used it for 1 seconds."
    assert frozen.sleeps_in is None
    assert frozen.hibernates_in is not None
    assert frozen.hibernates_in <= 1
    info = await until(registry, "steps", State.HIBERNATED)
    assert (info.hibernates_in, info.last_stop) == (None, "It was frozen for 1 seconds.")
    assert (await run(registry, "steps", "cat f")).stdout == "x\n"
    events = await registry.events("steps")
    assert [(event.kind, event.by) for event in events[2:4]] == [("frozen", "idle timer"), ("hibernated", "idle timer")]
    assert (events[2].from_state, events[2].to_state) == (State.ACTIVE, State.FROZEN)


async def test_a_frozen_sandbox_stays_so_unless_told_when_to_hibernate(registry: Registry) -> None:
    await registry.create(CreateSandbox(id="stays", sleep_after=0.5, on_idle="freeze"))
    await run(registry, "stays", "true")
    await until(registry, "stays", State.FROZEN)
    await asyncio.sleep(2.5)
    assert (await registry.get("stays")).state is State.FROZEN
    await registry.update("stays", UpdateSandbox(hibernate_after=0.1))
    await until(registry, "stays", State.HIBERNATED)


async def test_one_that_is_kept_alive_does_not_sleep_by_itself_until_that_is_taken_back(registry: Registry) -> None:
    info = await registry.create(CreateSandbox(id="alive", sleep_after=0.2, keep_alive=True))
    assert info.keep_alive
    await run(registry, "alive", "true")
    assert (await registry.get("alive")).sleeps_in is None
    await asyncio.sleep(2.5)
    assert (await registry.get("alive")).state is State.ACTIVE
    await registry.update("alive", UpdateSandbox(keep_alive=False))
    await until(registry, "alive", State.HIBERNATED)


async def test_a_background_process_alone_does_not_keep_it_awake(registry: Registry) -> None:
    await registry.create(CreateSandbox(id="behind", sleep_after=0.5))
    async with registry.use("behind") as runtime:
        await runtime.processes.start(StartProcess(command="while :; do echo tick; sleep 0.05; done"))
    await until(registry, "behind", State.HIBERNATED)


async def test_the_time_that_is_left_grows_shorter_and_touching_renews_it(registry: Registry) -> None:
    await registry.create(CreateSandbox(id="left", sleep_after=3600))
    assert (await registry.get("left")).sleeps_in is None
    await run(registry, "left", "true")
    left = []
    for _ in range(5):
        info = await registry.get("left")
        assert info.sleeps_in is not None
        assert info.sleeps_at is not None
        left.append(info.sleeps_in)
        await asyncio.sleep(0.02)
    assert left == sorted(left, reverse=True)
    assert len(set(left)) == 5
    assert (await registry.renew("left")).sleeps_in == pytest.approx(3600, abs=left[0] - left[-1])
    async with registry.use("left"):
        await asyncio.sleep(0.1)
        info = await registry.get("left")
        assert (info.sleeps_in, info.active_operations) == (3600, 1)
    await registry.sleep("left", FREEZE)
    assert (await registry.renew("left")).state is State.FROZEN


async def test_touching_again_and_again_keeps_it_awake(registry: Registry) -> None:
    await registry.create(CreateSandbox(id="kept", sleep_after=2))
    await run(registry, "kept", "true")
    for _ in range(10):
        await asyncio.sleep(0.4)
        await registry.renew("kept")
    assert (await registry.get("kept")).starts == 1
    assert (await registry.get("kept")).state is State.ACTIVE
    await until(registry, "kept", State.HIBERNATED)


async def test_a_changed_idle_time_counts_from_when_it_was_last_used(registry: Registry) -> None:
    await run(registry, "changed", "true")
    await asyncio.sleep(0.5)
    info = await registry.update("changed", UpdateSandbox(sleep_after="1h"))
    assert info.sleeps_in is not None
    assert 3590 < info.sleeps_in <= 3599.5
    assert (await registry.update("changed", UpdateSandbox(sleep_after="0.4s"))).sleeps_in == 0
    await until(registry, "changed", State.HIBERNATED)


async def test_how_it_sleeps_is_remembered_when_the_server_is_restarted(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "home")
    first = await open_registry(settings)
    await first.create(CreateSandbox(id="how", sleep_after=7, keep_alive=True, on_idle="freeze", hibernate_after="2h"))
    await first.close()
    second = await open_registry(settings)
    try:
        info = await second.get("how")
        assert (info.sleep_after, info.keep_alive, info.on_idle, info.hibernate_after) == (7, True, "freeze", 7200)
    finally:
        await second.close()


@pytest.mark.parametrize("request_", [UpdateSandbox(sleep_after="soon"), UpdateSandbox(hibernate_after=-1)])
async def test_a_duration_that_is_none_is_refused_and_nothing_changes(
    registry: Registry, request_: UpdateSandbox
) -> None:
    before = await registry.create(CreateSandbox(id="same"))
    with pytest.raises(InvalidRequestError):
        await registry.update("same", request_)
    assert await registry.get("same") == before


async def test_an_ephemeral_one_keeps_everything_while_frozen_and_forgets_it_when_it_hibernates(
    registry: Registry,
) -> None:
    await registry.create(CreateSandbox(id="eph", ephemeral=True))
    await run(registry, "eph", "echo x >f")
    await registry.sleep("eph", FREEZE)
    assert (await run(registry, "eph", "cat f")).stdout == "x\n"
    await registry.sleep("eph", SleepSandbox())
    assert (await run(registry, "eph", "cat f")).exit_code == 1
