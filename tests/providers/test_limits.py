"""Limits of memory, cpu, pids and disk space, held by the host. Version 2 of control groups has no controllers on the
machines these tests are made on, so what is written and read there is tested on a directory that stands in for it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from skerry.errors import LimitTooLowError
from skerry.models import CreateSession, ExecRequest, Limits, RunCode
from skerry.providers.contract import Spec
from skerry.providers.local import cgroups
from skerry.providers.local.cgroups import Cgroups, Group
from skerry.providers.local.controls import Controls, Watch, above, figured
from skerry.providers.local.machine import LocalMachine
from skerry.providers.local.provider import LocalProvider
from skerry.runtime.faults import Faults, Met
from skerry.runtime.runtime import Runtime
from skerry.settings import Settings
from tests import warm
from tests.machines import descriptors, nobody
from tests.providers.users import USER, needs_root, place_of, run_as_user

MB = 1 << 20
LIMITS = Limits(memory=128 * MB, pids=50, cpu=0.5, disk=32 * MB)


@pytest_asyncio.fixture
async def limited(provider: LocalProvider) -> AsyncIterator[LocalMachine]:
    machine = await provider.start(Spec(id="limited", image="host", limits=LIMITS), nobody)
    yield machine
    await machine.stop()
    await provider.forget("limited")


def group_of(provider: LocalProvider, machine: LocalMachine) -> Group:
    group = provider.group(machine.key)
    assert group is not None
    return group


# -- on this machine ---------------------------------------------------------------------------------------------------


@needs_root
async def test_every_process_is_in_every_group_before_it_does_anything(
    provider: LocalProvider, limited: LocalMachine
) -> None:
    runtime = Runtime(limited.portal, env={}, on_process=nobody)
    await runtime.sessions.create(CreateSession(id="apart"))
    await runtime.exec(ExecRequest(command="sleep 60 &"))
    await runtime.exec(ExecRequest(command="sleep 60 &", session="apart"))
    await runtime.code.run(RunCode(code="1"))
    group = group_of(provider, limited)
    assert set(group.controllers) == {"memory", "cpu", "pids"}
    inside = [set((path / "cgroup.procs").read_text().split()) for path in group.directories]
    assert len(inside[0]) >= 8
    assert all(each == inside[0] for each in inside)
    await runtime.close()


@needs_root
async def test_the_kernel_has_been_told(provider: LocalProvider, limited: LocalMachine) -> None:
    controllers = group_of(provider, limited).controllers
    expected = {
        "memory": {"memory.limit_in_bytes": 128 * MB, "memory.memsw.limit_in_bytes": 128 * MB},
        "pids": {"pids.max": 50},
        "cpu": {"cpu.cfs_quota_us": 50_000},
    }
    for kind, files in expected.items():
        for name, value in files.items():
            assert int((controllers[kind][1] / name).read_text()) == value


@needs_root
async def test_a_busy_loop_gets_its_share_of_a_processor_and_no_more(limited: LocalMachine) -> None:
    runtime = Runtime(limited.portal, env={}, on_process=nobody)
    before = limited.measure().cpu_seconds or 0.0
    loops = "for i in 1 2 3; do timeout 2 sh -c 'while :; do :; done' & done; wait"
    found = await runtime.exec(ExecRequest(command=loops))
    spent = (limited.measure().cpu_seconds or 0.0) - before
    assert spent <= 0.5 * found.duration / 1000 * 1.25
    await runtime.close()


@needs_root
async def test_other_limits_are_in_force_at_once_whichever_way_they_move(
    provider: LocalProvider, limited: LocalMachine
) -> None:
    directory = group_of(provider, limited).controllers["memory"][1]
    for memory in (512 * MB, 64 * MB, None, 256 * MB):
        await limited.limit(Limits(memory=memory))
        for name in ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"):
            now = int((directory / name).read_text())
            assert now == memory if memory else now > 1 << 60
    assert (group_of(provider, limited).controllers["pids"][1] / "pids.max").read_text() == "max\n"
    runtime = Runtime(limited.portal, env={}, on_process=nobody)
    await runtime.exec(
        ExecRequest(command="python3 -c 'import time; x = bytearray(99 << 20); time.sleep(60)' & sleep 1")
    )
    with pytest.raises(LimitTooLowError):
        await limited.limit(Limits(memory=64 * MB))
    assert int((directory / "memory.limit_in_bytes").read_text()) == 256 * MB
    await runtime.close()


@needs_root
async def test_where_the_server_itself_has_less_than_a_sandbox_asks_for_that_holds(
    provider: LocalProvider, limited: LocalMachine
) -> None:
    version, directory = group_of(provider, limited).controllers["cpu"]
    above = directory.with_name(f"{directory.name}-above")
    inside = above / "inside"
    inside.mkdir(parents=True)
    try:
        (above / "cpu.cfs_quota_us").write_text("50000")
        Controls(Group(2, inside, {"cpu": (version, inside)})).change(Limits(cpu=2))
        assert int((inside / "cpu.cfs_quota_us").read_text()) == -1
        Controls(Group(2, inside, {"cpu": (version, inside)})).change(Limits(cpu=0.25))
        assert int((inside / "cpu.cfs_quota_us").read_text()) == 25_000
    finally:
        inside.rmdir()
        above.rmdir()


@needs_root
async def test_snapshots_forks_and_rollbacks_work_under_a_quota(provider: LocalProvider, limited: LocalMachine) -> None:
    runtime = Runtime(limited.portal, env={}, on_process=nobody)
    await runtime.exec(ExecRequest(command="head -c 20M /dev/urandom >/workspace/f; sync /workspace/f"))
    await provider.snapshot("limited", "then", limited)
    await provider.clone("then", "fork")
    fork = await provider.start(Spec(id="fork", image="host", limits=LIMITS), nobody)
    inside = Runtime(fork.portal, env={}, on_process=nobody)
    # Only what it has written itself counts: what it shares with others takes no space.
    assert (fork.measure().disk or 0) < 8 * MB
    write = "head -c 24M /dev/urandom >/workspace/g && stat -c %s /workspace/f /workspace/g"
    assert (await inside.exec(ExecRequest(command=write))).stdout == f"{20 * MB}\n{24 * MB}\n"
    over = await inside.exec(ExecRequest(command="head -c 24M /dev/urandom >/workspace/h"))
    assert "No space left on device" in over.stderr or "Disk quota exceeded" in over.stderr  # test_nospace says which
    await inside.close()
    await fork.stop()
    await provider.restore("then", "fork", fork.stop)
    again = await provider.start(Spec(id="fork", image="host", limits=LIMITS), nobody)
    inside = Runtime(again.portal, env={}, on_process=nobody)
    assert (await inside.exec(ExecRequest(command="ls /workspace"))).stdout == "f\n"
    await inside.close()
    await again.stop()
    await provider.forget("fork")
    await provider.remove_snapshot("then")
    await runtime.close()


@needs_root
async def test_nothing_is_left_of_the_groups_and_the_last_figures_are_kept(provider: LocalProvider) -> None:
    count = await descriptors()
    machine = await provider.start(Spec(id="brief", image="host", limits=LIMITS), nobody)
    group = group_of(provider, machine)
    runtime = Runtime(machine.portal, env={}, on_process=nobody, faults=Faults(machine.met, LIMITS))
    await runtime.exec(ExecRequest(command="timeout 0.3 sh -c 'while :; do :; done'; python3 -c 'bytearray(1 << 30)'"))
    await runtime.close()
    await machine.stop()
    await provider.forget("brief")
    assert [path for path in group.directories if path.exists()] == []
    assert machine.met() == Met(memory=1)
    assert (machine.measure().cpu_seconds or 0) > 0.1
    assert await descriptors(count) <= count


_SERVER = """
import asyncio, sys
from pathlib import Path
from skerry.control.open import open_registry
from skerry.models import ExecRequest
from skerry.settings import Settings

async def main():
    registry = await open_registry(Settings(home=Path(sys.argv[1])))
    async with registry.use("left") as runtime:
        await runtime.exec(ExecRequest(command="sleep 600 &"))
    group = registry.provider.group(registry._owners["left"]._machine.key)
    print(registry.provider.launcher.pid, *group.directories, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@needs_root
async def test_a_server_that_is_killed_leaves_no_groups_to_the_next(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with warm.Popen(_SERVER, str(home), stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        launcher, *directories = server.stdout.readline().split()
        assert len(directories) >= 4
        assert all(Path(path).is_dir() for path in directories)
        os.kill(int(launcher), signal.SIGKILL)
        server.kill()
    provider = LocalProvider(Settings(home=home))
    await provider.open()
    try:
        await provider.sweep(set(), set())
        for _ in range(100):
            if not any(Path(path).exists() for path in directories):
                break
            await asyncio.sleep(0.05)
        assert not any(Path(path).exists() for path in directories)
    finally:
        await provider.close()
    homes = [path for path in map(Path, (home / "cgroups").read_text().split()) if path.exists()]
    assert homes == []


_AS_USER = """
import asyncio, json, sys
from pathlib import Path
from skerry.control.open import open_registry
from skerry.models import CreateSandbox, ExecRequest
from skerry.settings import Settings

async def main():
    registry = await open_registry(Settings(home=Path(sys.argv[1]) / "home"))
    limits = {"memory": "64M", "disk": "16M", "openFiles": 100, "tmpfs": "2M"}
    info = await registry.create(CreateSandbox(id="mine", limits=limits))
    async with registry.use("mine") as runtime:
        done = await runtime.exec(ExecRequest(command="ulimit -n; head -c 3M /dev/zero >/dev/shm/x"))
    found = await registry.measure("mine")
    ran = found.usage.running_seconds > 0
    print(json.dumps([info.limits.enforced, done.stdout, done.limit, found.now.memory, ran]))
    await registry.close()

asyncio.run(main())
"""


@needs_root
def test_an_ordinary_user_is_told_what_is_not_held_and_the_rest_is() -> None:
    with place_of(USER) as place:
        enforced, stdout, limit, memory, ran = json.loads(run_as_user(_AS_USER, place))
    assert enforced == {"memory": False, "pids": False, "disk": False, "openFiles": True, "tmpfs": True}
    assert (stdout, limit, memory, ran) == ("100\n", "tmpfs", None, True)


# -- version 2, on a directory that stands in for it -------------------------------------------------------------------


def unified(path: Path) -> Group:
    path.mkdir()
    return Group(2, path, {kind: (2, path) for kind in ("memory", "cpu", "pids")})


def test_version_2_is_told_the_same_in_its_own_words(tmp_path: Path) -> None:
    group = unified(tmp_path / "g")
    written = {path.name: text for path, text in Controls(group).settings(LIMITS)}
    assert written == {
        "memory.max": str(128 * MB),
        "memory.swap.max": "0",
        "cpu.max": "50000 100000",
        "pids.max": "50",
    }
    none = {path.name: text for path, text in Controls(group).settings(Limits())}
    assert none == {"memory.max": "max", "memory.swap.max": "0", "cpu.max": "max 100000", "pids.max": "max"}


def test_version_2_is_read_the_same(tmp_path: Path) -> None:
    group = unified(tmp_path / "g")
    files = {
        "memory.current": "5000\n",
        "memory.peak": "9000\n",
        "memory.stat": "anon 1000\ninactive_file 1500\nactive_file 3\n",
        "memory.events": "low 0\nhigh 0\nmax 3\noom 2\noom_kill 2\noom_group_kill 0\n",
        "pids.current": "7\n",
        "pids.events": "max 4\n",
        "cpu.stat": "usage_usec 2500000\nuser_usec 1\n",
    }
    for name, text in files.items():
        (group.directory / name).write_text(text)
    found = Controls(group).measure()
    assert (found.cpu_seconds, found.memory, found.memory_peak, found.processes) == (2.5, 3500, 9000, 7)
    assert found.met == Met(memory=2, pids=4)
    watch = Watch(group)
    assert watch.met() == Met(memory=2, pids=4)
    (group.directory / "memory.events").write_text("oom_kill 3\n")
    assert watch.met() == Met(memory=3, pids=4)
    watch.close()
    assert figured({}).memory is None


def test_a_change_in_version_2_does_not_kill_to_get_there(tmp_path: Path) -> None:
    group = unified(tmp_path / "g")
    for name in ("memory.max", "memory.swap.max", "cpu.max", "pids.max"):
        (group.directory / name).write_text("")
    (group.directory / "memory.current").write_text(str(100 * MB))
    with pytest.raises(OSError, match="busy"):
        Controls(group).change(Limits(memory=50 * MB))
    Controls(group).change(Limits(memory=200 * MB))
    assert (group.directory / "memory.max").read_text() == str(200 * MB)


def delegated(root: Path, own: str, controllers: str, *, procs: str = "1 2 3", handed: str = "") -> Path:
    group = root / own.lstrip("/")
    group.mkdir(parents=True, exist_ok=True)
    files = {"cgroup.controllers": controllers, "cgroup.procs": procs, "cgroup.subtree_control": handed}
    for name, text in files.items():
        (group / name).write_text(text)
    return group


def test_controllers_are_found_in_the_nearest_group_that_hands_them_down(tmp_path: Path) -> None:
    slice = delegated(tmp_path, "/user/app.slice", "memory pids", procs="", handed="memory pids")
    delegated(tmp_path, "/user/app.slice/mine.scope", "memory pids")
    mounts = f"30 1 0:26 / {tmp_path} rw - cgroup2 cgroup2 rw\n"
    places = cgroups._Places.read(mounts, "0::/user/app.slice/mine.scope\n")
    assert places.handing_down() == (slice, ["memory", "pids"])


@pytest.fixture
def scope(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A real group of version 2, as systemd would delegate it, and a controller that is free on these machines."""
    monkeypatch.setattr(cgroups, "CONTROLLERS", ("hugetlb",))
    found = cgroups._Places.read(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())
    assert found.top is not None
    before = (found.top / "cgroup.subtree_control").read_text().split()
    cgroups.write(found.top / "cgroup.subtree_control", "+hugetlb")
    scope = found.top / f"skerry-test-{os.getpid()}.scope"
    scope.mkdir()
    yield scope
    for path in (*(path for path in scope.iterdir() if path.is_dir()), scope):
        path.rmdir()
    if "hugetlb" not in before:
        cgroups.write(found.top / "cgroup.subtree_control", "-hugetlb")


@needs_root
def test_one_that_is_alone_in_its_group_steps_aside_to_hand_down(scope: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as one, subprocess.Popen(["sleep", "60"]) as two:
        for process in (one, two):
            cgroups.write(scope / "cgroup.procs", str(process.pid))
        # Not alone: the kernel refuses, and nobody is moved.
        assert cgroups.hand_down(scope, one.pid) == []
        assert sorted((scope / "cgroup.procs").read_text().split()) == sorted([str(one.pid), str(two.pid)])
        two.kill()
        two.wait()
        assert cgroups.hand_down(scope, one.pid) == ["hugetlb"]
        assert (scope / cgroups.SERVER / "cgroup.procs").read_text().split() == [str(one.pid)]
        (scope / "sandbox").mkdir()
        assert "hugetlb" in (scope / "sandbox" / "cgroup.controllers").read_text()
        assert cgroups.hand_down(scope, one.pid) == ["hugetlb"]
        one.kill()


def test_all_sandboxes_together_leave_something_to_the_host(tmp_path: Path) -> None:
    home = Cgroups(
        2, tmp_path / "home", tmp_path / "record", {kind: (2, tmp_path / "home") for kind in ("memory", "cpu")}
    )
    written = {path.name: text for path, text in above(home, 1000 * MB)}
    assert written["cgroup.subtree_control"] == "+memory +cpu"
    assert written["memory.max"] == str(1000 * MB)
    assert 100 <= int(written["cpu.weight"]) <= 10_000
