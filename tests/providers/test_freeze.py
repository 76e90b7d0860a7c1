"""Machines that stand still: by control groups of either version, and by signals where there are none."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from skerry.models import CreateSession, ExecRequest, StartProcess
from skerry.providers.contract import Spec
from skerry.providers.local import cgroups
from skerry.providers.local.cgroups import Cgroups
from skerry.providers.local.machine import LocalMachine
from skerry.providers.local.provider import LocalProvider
from skerry.runtime.runtime import Runtime
from skerry.settings import Settings
from tests import machines
from tests.machines import nobody, read_inside
from tests.providers.users import USER, needs_newuidmap, needs_root, place_of, run_as_user

COUNTER = "i=0; while :; do i=$((i+1)); echo $i >/tmp/n.new; mv /tmp/n.new /tmp/n; sleep 0.001; done"
UNIFIED = "30 1 0:26 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
FREEZER = "31 1 0:27 / /sys/fs/cgroup/freezer rw - cgroup cgroup rw,freezer\n"


@pytest_asyncio.fixture(params=["version 2", "version 1", "signals"])
async def frozen_by(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[LocalProvider]:
    """A provider that freezes in one of the ways; this machine has both versions."""
    provider = LocalProvider(Settings(home=tmp_path / "home"))
    await provider.open()
    detected = provider._cgroups
    if request.param == "signals":
        provider._cgroups = None
    else:
        mounts = tmp_path / "mounts"
        mounts.write_text(UNIFIED if request.param == "version 2" else FREEZER)
        provider._cgroups = Cgroups.detect(provider.home, mounts)
        assert provider._cgroups is not None
        assert f"version {provider._cgroups.version}" == request.param
    yield provider
    provider._cgroups and provider._cgroups.close()
    provider._cgroups = detected
    await provider.close()


@pytest_asyncio.fixture
async def machine(frozen_by: LocalProvider) -> AsyncIterator[LocalMachine]:
    machine = await frozen_by.start(Spec(id="ice", image="host"), nobody)
    yield machine
    await machine.stop()


@pytest_asyncio.fixture
async def runtime(machine: LocalMachine) -> AsyncIterator[Runtime]:
    runtime = Runtime(machine.portal, env={}, on_process=nobody)
    yield runtime
    await runtime.close()


async def sh(runtime: Runtime, command: str, **options: object) -> str:
    return (await runtime.exec(ExecRequest(command=command, **options))).stdout  # type: ignore[arg-type]


def count(provider: LocalProvider) -> int:
    assert provider.launcher._process is not None
    return int(read_inside(provider.launcher._process.pid, "/tmp/n") or 0)


async def test_every_process_stands_still_and_goes_on(
    frozen_by: LocalProvider, machine: LocalMachine, runtime: Runtime
) -> None:
    await runtime.sessions.create(CreateSession(id="apart"))
    await runtime.processes.start(StartProcess(command=COUNTER, session="apart"))
    while not await sh(runtime, "cat /tmp/n 2>/dev/null"):
        pass
    for _ in range(3):
        await machine.freeze()
        before = count(frozen_by)
        await asyncio.sleep(0.2)
        assert count(frozen_by) == before
        await machine.thaw()
        while count(frozen_by) <= before:
            await asyncio.sleep(0.01)
    assert await sh(runtime, "echo fine; jobs") == "fine\n"
    assert await sh(runtime, "echo fine", session="apart") == "fine\n"


async def test_what_is_asked_of_a_frozen_machine_waits(machine: LocalMachine, runtime: Runtime) -> None:
    await sh(runtime, "echo x >/tmp/f")
    await machine.freeze()
    asked = asyncio.create_task(machine.portal.stat("/tmp/f"))
    done, _ = await asyncio.wait([asked], timeout=0.2)
    assert not done
    await machine.thaw()
    assert (await asked).size == 2


async def test_a_job_that_somebody_stopped_stays_stopped(machine: LocalMachine, runtime: Runtime) -> None:
    state = "cut -d' ' -f3 /proc/$(cat /tmp/pid)/stat"
    await sh(runtime, "sleep 600 & echo $! >/tmp/pid; kill -STOP $!")
    while await sh(runtime, state) != "T\n":
        pass
    await machine.freeze()
    await machine.thaw()
    assert await sh(runtime, state) == "T\n"


async def test_a_frozen_machine_can_be_stopped_and_its_group_is_gone(
    frozen_by: LocalProvider, machine: LocalMachine, runtime: Runtime
) -> None:
    await runtime.sessions.create(CreateSession(id="apart"))
    await sh(runtime, "sleep 600 &")
    await sh(runtime, "sleep 600 &", session="apart")
    group = frozen_by.group(machine.key)
    await machine.freeze()
    async with asyncio.timeout(10):
        await machine.stop()
    assert group is None or not group.directory.exists()


async def test_a_frozen_machine_that_is_killed_is_known_to_have_ended(frozen_by: LocalProvider) -> None:
    ended = asyncio.Event()

    async def died(reason: str) -> None:
        ended.set()

    machine = await frozen_by.start(Spec(id="dies", image="host"), died)
    await machine.freeze()
    await frozen_by.launcher.kill(machine.key)
    async with asyncio.timeout(10):
        await ended.wait()


async def test_nothing_inside_sees_or_leaves_its_group(machine: LocalMachine, runtime: Runtime) -> None:
    shown = {line.rpartition(":")[2] for line in (await sh(runtime, "cat /proc/self/cgroup")).split()}
    assert shown == {"/"}
    assert await sh(runtime, "ls /sys/fs/cgroup 2>/dev/null") == ""


# -- finding out what can be used --------------------------------------------------------------------------------------


def test_version_2_is_taken_where_there_are_both(tmp_path: Path) -> None:
    found = Cgroups.detect(tmp_path)
    assert found is not None
    assert found.version == 2
    found.remember()
    found.remember()
    assert found.record.read_text() == "".join(f"{path}\n" for path in found.directories)
    assert not found.directory.exists()  # until a sandbox needs it


def fake(root: Path, own: str, *files: str) -> Path:
    """A tree as a kernel would show it, but that it is made of plain files."""
    group = root / own.lstrip("/")
    group.mkdir(parents=True)
    for name in files:
        (group / name).write_text("")
    return group


@pytest.mark.parametrize(
    ("root", "own", "shown"),
    [
        ("/", "/user.slice/app.scope", "user.slice/app.scope"),  # systemd, all of the hierarchy mounted
        ("/docker/abc", "/docker/abc/child", "child"),  # a container that is shown its own part only
        ("/", "/", ""),  # a container with a namespace of its own
    ],
)
def test_groups_are_made_below_the_servers_own(tmp_path: Path, root: str, own: str, shown: str) -> None:
    mounts = f"30 1 0:26 {root} {tmp_path} rw,nosuid - cgroup2 cgroup2 rw\n"
    assert list(cgroups._Places.read(mounts, f"0::{own}\n").freezers()) == [(2, tmp_path / shown)]


def test_one_who_may_make_no_groups_has_none(tmp_path: Path) -> None:
    mounts, own = tmp_path / "mounts", tmp_path / "own"
    # A tree of plain files: directories can be made, but nothing appears in them, as where nothing is delegated.
    mounts.write_text(f"30 1 0:26 / {tmp_path}/cgroup rw - cgroup2 cgroup2 rw\n")
    own.write_text("0::/mine\n")
    fake(tmp_path / "cgroup", "/mine", "cgroup.procs")
    assert Cgroups.detect(tmp_path / "home", mounts, own) is None
    assert [path.name for path in (tmp_path / "cgroup" / "mine").iterdir()] == ["cgroup.procs"]
    mounts.write_text("")
    assert Cgroups.detect(tmp_path / "home", mounts, own) is None


def test_groups_that_an_earlier_server_left_are_swept_wherever_it_ran(tmp_path: Path) -> None:
    found = Cgroups.detect(tmp_path)
    assert found is not None
    found.remember()
    old = found.group("demo/1234")
    old.directory.mkdir(parents=True)
    with (tmp_path / "cgroups").open("a") as record:
        record.write("/sys/fs/cgroup/unified/skerry-of-nobody\n/tmp\n")
    assert cgroups.sweep(tmp_path) == ["the control group demo.1234"]
    assert not old.directory.exists()
    found.close()
    assert not found.directory.exists()


# -- without root ------------------------------------------------------------------------------------------------------

_PROGRAM = """
import asyncio, json, sys
from pathlib import Path
from skerry.control.open import open_registry
from skerry.models import CreateSession, ExecRequest, SleepSandbox, StartProcess
from skerry.settings import Settings

COUNTER = sys.argv[2]
exec(sys.argv[3])

async def main():
    home = Path(sys.argv[1]) / "home"
    registry = await open_registry(Settings(home=home))
    found = {"freeze": registry.provider.capabilities().freeze}
    async with registry.use("mine") as runtime:
        async def sh(command, **options):
            return (await runtime.exec(ExecRequest(command=command, **options))).stdout.strip()
        await sh("X=kept")
        await runtime.sessions.create(CreateSession(id="apart"))
        await runtime.processes.start(StartProcess(command=COUNTER, session="apart"))
        polite = "trap 'echo bye >/workspace/said; exit 0' TERM; while :; do sleep 0.01; done"
        await runtime.processes.start(StartProcess(command=polite))
        while not await sh("cat /tmp/n 2>/dev/null"):
            pass
    def count():
        return int(read_inside(registry.provider.launcher._process.pid, "/tmp/n") or 0)
    found["state"] = (await registry.sleep("mine", SleepSandbox(stage="freeze"))).state
    before = count()
    await asyncio.sleep(0.3)
    found["still"] = count() == before
    async with registry.use("mine") as runtime:
        found["kept"] = await sh("echo $X")
    while count() <= before:
        await asyncio.sleep(0.01)
    await registry.sleep("mine", SleepSandbox(stage="freeze"))
    await registry.sleep("mine", SleepSandbox(grace=20))
    async with registry.use("mine") as runtime:
        found["said"] = await sh("cat said")
    await registry.sleep("mine", SleepSandbox(stage="freeze"))
    await registry.destroy("mine")
    await registry.close()
    print(json.dumps(found))

asyncio.run(main())
"""


@needs_root
@pytest.mark.parametrize("subids", [False, pytest.param(True, marks=needs_newuidmap)])
def test_an_ordinary_user_without_groups_freezes_by_signals(subids: bool) -> None:
    with place_of(USER) as place:
        helpers = "".join(map(inspect.getsource, (machines._children, read_inside)))
        found = json.loads(run_as_user(_PROGRAM, place, COUNTER, helpers, subids=subids))
    assert found == {"freeze": "signals", "state": "frozen", "still": True, "kept": "kept", "said": "bye"}
