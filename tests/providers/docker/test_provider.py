"""The life of containers: started, frozen, snapshotted, killed, swept."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import tarfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from skerry.errors import (
    ImageExistsError,
    ImageNotFoundError,
    LimitTooLowError,
    SandboxExistsError,
    SandboxLostError,
    SnapshotNotFoundError,
    UnsupportedError,
)
from skerry.models import ChangeKind, ExecRequest, Limits
from skerry.providers.contract import Spec
from skerry.providers.docker.machine import DockerMachine
from skerry.providers.docker.provider import DockerProvider
from skerry.providers.toolboxes import KITS, Toolboxes
from skerry.runtime.runtime import Runtime
from skerry.settings import Settings
from tests.bench.engine import Engine
from tests.machines import descriptors, nobody

Say = Callable[[str], Awaitable[str]]


@asynccontextmanager
async def started(provider: DockerProvider, id: str, **limits: Any) -> AsyncIterator[tuple[DockerMachine, Say]]:
    machine = await provider.start(Spec(id=id, image="host", limits=Limits(**limits), owner="ada"), nobody)
    try:
        async with speaking(machine) as say:
            yield machine, say
    finally:
        await machine.stop()


@asynccontextmanager
async def speaking(machine: DockerMachine) -> AsyncIterator[Say]:
    runtime = Runtime(machine.portal, env={}, on_process=nobody)

    async def say(command: str) -> str:
        return (await runtime.exec(ExecRequest(command=command))).stdout

    try:
        yield say
    finally:
        await runtime.close()


@pytest.fixture
async def id(provider: DockerProvider, request: pytest.FixtureRequest) -> AsyncIterator[str]:
    """Of a sandbox that is forgotten afterwards, with its copies and snapshots."""
    id = f"box-{abs(hash(request.node.name)) % 10**8}"
    yield id
    for one in (id, f"{id}-copy"):
        await provider.forget(one)
    for snapshot in await provider.snapshots():
        await provider.remove_snapshot(snapshot)


def inspected(engine: Engine, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(engine._call("inspect", name))[0]
    return found


# -- walls -------------------------------------------------------------------------------------------------------------


async def test_a_container_has_no_powers_no_network_and_nothing_of_the_host_to_write_to(
    engine: Engine, provider: DockerProvider, id: str
) -> None:
    async with started(provider, id, memory=256 << 20, pids=100, cpu=0.5, open_files=512) as (machine, say):
        status = await say("grep -E 'CapEff|CapBnd|NoNewPrivs|Seccomp:' /proc/self/status")
        assert status.split() == [
            *("CapEff:", "00000000800405fb", "CapBnd:", "00000000800405fb"),
            *("NoNewPrivs:", "1", "Seccomp:", "2"),
        ]
        assert (await say("ls /sys/class/net")).split() == ["lo"]
        assert await say("touch /run/skerry/x /run/skerry-trust/x /run/skerry-door/x; ls /run/skerry-door") == ""
        assert await say("mount -t tmpfs none /mnt && echo mounted; unshare -m true && echo unshared") == ""
        assert (await say("ulimit -n")).strip() == "512"
        host = inspected(engine, machine.name)["HostConfig"]
        assert (host["NetworkMode"], host["CapDrop"], host["Privileged"]) == ("none", ["ALL"], False)
        assert (host["Memory"], host["MemorySwap"], host["PidsLimit"]) == (256 << 20, 256 << 20, 100)
        assert host["CpuQuota"] / host["CpuPeriod"] == 0.5
        assert all(mount["ReadOnly"] for mount in host["Mounts"])


async def test_no_device_of_the_host_is_given_away_with_the_input_of_a_program(
    provider: DockerProvider, id: str
) -> None:
    """Root in a container may be root outside, and could change the mode of whatever it holds a descriptor of."""
    async with started(provider, id) as (machine, _):
        runtime = Runtime(machine.portal, env={}, on_process=nobody)
        given = ExecRequest(command="stat -L -c %d /proc/self/fd/0 /dev/null", session=None)
        own, device = (await runtime.exec(given)).stdout.split()
        await runtime.close()
    assert own == device


async def test_others_who_look_at_the_engine_see_whose_it_is(engine: Engine, provider: DockerProvider, id: str) -> None:
    tier = Limits(tier="builder")
    machine = await provider.start(Spec(id=id, image="host", limits=tier, owner="ada"), nobody)
    await machine.stop()
    labels = inspected(engine, machine.name)["Config"]["Labels"]
    assert labels["agentpod.sandbox.id"] == id
    assert labels["agentpod.sandbox.user"] == "ada"
    assert labels["agentpod.sandbox.managed"] == "true"
    assert labels["skerry.tier"] == "builder"


# -- life --------------------------------------------------------------------------------------------------------------


async def test_files_stay_when_it_is_stopped_whatever_its_settings_become(
    engine: Engine, provider: DockerProvider, id: str
) -> None:
    assert not await provider.exists(id)
    async with started(provider, id) as (_, say):
        await say("echo kept > /workspace/file; rm /etc/debian_version")
    assert await provider.exists(id)
    async with started(provider, id, memory=128 << 20) as (machine, say):
        assert await say("cat /workspace/file") == "kept\n"
        assert inspected(engine, machine.name)["HostConfig"]["Memory"] == 128 << 20
    # What cannot be changed of a container makes it a new one, over the same files.
    async with started(provider, id, open_files=777, tmpfs=8 << 20) as (_, say):
        assert await say("cat /workspace/file; ulimit -n; ls /etc/debian_version 2>/dev/null") == "kept\n777\n"
    await provider.forget(id)
    assert not await provider.exists(id)


async def test_it_is_frozen_and_goes_on_as_if_nothing_had_been(provider: DockerProvider, id: str) -> None:
    async with started(provider, id) as (machine, say):
        await machine.freeze()
        assert machine.frozen
        waiting = asyncio.create_task(say("echo awake"))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await machine.thaw()
        assert await waiting == "awake\n"
        await machine.freeze()
        await machine.stop()
    async with started(provider, id) as (_, say):
        assert await say("echo again") == "again\n"


async def test_a_container_that_somebody_kills_is_reported_once_with_the_reason(
    engine: Engine, provider: DockerProvider, id: str
) -> None:
    reasons: asyncio.Queue[str] = asyncio.Queue()
    machine = await provider.start(Spec(id=id, image="host"), reasons.put)
    engine._call("kill", machine.name)
    async with asyncio.timeout(20):
        assert await reasons.get() == "its init was killed"
    with pytest.raises(SandboxLostError):
        await machine.portal.stat("/")
    await machine.stop()
    assert reasons.empty()
    async with started(provider, id) as (_, say):
        assert await say("echo back") == "back\n"


async def test_want_of_memory_is_counted_and_ends_the_command_alone(provider: DockerProvider, id: str) -> None:
    async with started(provider, id, memory=64 << 20, pids=100) as (machine, say):
        assert machine.met().memory == 0
        await say("python3 -c 'x = bytearray(300 << 20)'; echo $?")
        assert machine.met().memory >= 1
        assert await say("echo fine") == "fine\n"
        used = machine.measure()
        assert used.cpu_seconds is not None
        assert used.cpu_seconds > 0
        assert used.memory is not None
        assert used.processes is not None
        assert used.processes >= 2
        await say("python3 -c 'import time; x = bytearray(40 << 20); time.sleep(600)' & sleep 0.5")
        with pytest.raises(LimitTooLowError):
            await machine.limit(Limits(memory=20 << 20))
        await machine.limit(Limits(memory=128 << 20, pids=50))
    assert machine.measure().met.memory >= 1


async def test_its_processes_have_time_to_end(provider: DockerProvider, id: str) -> None:
    machine = await provider.start(Spec(id=id, image="host"), nobody)
    async with speaking(machine) as say:
        await say("(trap 'echo bye > /workspace/said; exit' TERM; while :; do sleep 0.05; done) & sleep 0.3")
        await machine.stop(grace=5.0)
    async with started(provider, id) as (_, say):
        assert await say("cat /workspace/said") == "bye\n"


async def test_one_that_was_started_in_advance_takes_another_name(provider: DockerProvider, id: str) -> None:
    machine = await provider.start(Spec(id=".warm-1", image="host"), nobody)
    async with speaking(machine) as say:
        await say("echo mine > /workspace/file")
        await provider.rename(machine, id)
        assert not await provider.exists(".warm-1")
    await machine.stop()
    await provider.require_idle(id)
    async with started(provider, id) as (_, say):
        assert await say("cat /workspace/file; hostname") == f"mine\n{id}\n"


async def test_nothing_is_left_open(provider: DockerProvider, id: str) -> None:
    async with started(provider, id):
        pass
    before = await descriptors()
    for _ in range(3):
        async with started(provider, id) as (_, say):
            await say("true")
    assert await descriptors(before) <= before


# -- snapshots ---------------------------------------------------------------------------------------------------------


async def test_a_snapshot_is_kept_copied_and_rolled_back_to(provider: DockerProvider, id: str) -> None:
    async with started(provider, id) as (machine, say):
        await say("echo one > /workspace/file; rm /etc/debian_version")
        await provider.snapshot(id, "first", machine)
        await say("echo two > /workspace/file; echo more > /workspace/other")
        await provider.clone("first", f"{id}-copy")
        with pytest.raises(SandboxExistsError):
            await provider.clone("first", f"{id}-copy")
        with pytest.raises(SnapshotNotFoundError):
            await provider.clone("no-such", "nobody")

        async def stop() -> None:
            await machine.stop()

        async with started(provider, f"{id}-copy") as (_, copy):
            assert (
                await copy("cat /workspace/file; ls /workspace /etc/debian_version 2>/dev/null")
                == "one\n/workspace:\nfile\n"
            )
        await provider.restore("first", id, stop)
    # Whatever still uses a snapshot, it can be removed.
    await provider.remove_snapshot("first")
    assert await provider.snapshots() == set()
    async with started(provider, id) as (machine, say):
        assert await say("cat /workspace/file; ls /workspace") == "one\nfile\n"
        await provider.snapshot(id, "second", machine)
    async with started(provider, f"{id}-copy") as (_, copy):
        assert await copy("cat /workspace/file") == "one\n"


async def test_two_files_written_in_turn_are_never_out_of_turn_in_a_snapshot(provider: DockerProvider, id: str) -> None:
    async with started(provider, id) as (machine, say):
        # What lies between the two takes time to be copied, in which the second would run ahead of the first.
        await say("cd /workspace; head -c 100M /dev/urandom > m; mkdir a z")
        loop = "i=$((i+1)); for f in a z; do echo $i > $f/new; mv $f/new $f/now; done"
        await say(f"(i=0; while :; do {loop}; done) & sleep 0.2")
        await provider.snapshot(id, "moment", machine)
    await provider.clone("moment", f"{id}-copy")
    async with started(provider, f"{id}-copy") as (_, say):
        first, second = (int(word) for word in (await say("cat /workspace/a/now /workspace/z/now")).split())
        assert first - second in (0, 1)


async def test_a_sandbox_that_was_never_started_can_be_copied(provider: DockerProvider, id: str) -> None:
    await provider.snapshot(id, "nothing")
    await provider.clone("nothing", f"{id}-copy")
    assert await provider.exists(f"{id}-copy")
    async with started(provider, f"{id}-copy") as (_, say):
        assert await say("ls -a /workspace | wc -l; bash --version | head -c 8") == "2\nGNU bash"


async def test_what_changed_is_told_and_given_as_a_layer(provider: DockerProvider, id: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "doc" / "deep").mkdir(parents=True)
    (tmp_path / "doc" / "deep" / "file").write_text("of the image")
    await provider.import_image("tiny", str(tmp_path))
    machine = await provider.start(Spec(id=id, image="tiny"), nobody)
    portal = machine.portal

    async def write(path: str, content: bytes) -> None:
        fd = await portal.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.write(fd, content)
        os.close(fd)

    await write("/workspace/changed", b"one")
    await write("/workspace/gone", b"gone")
    await provider.snapshot(id, "before", machine)
    await write("/workspace/changed", b"two")  # in the same second, and as long
    await portal.unlink("/workspace/gone")
    await portal.mkdir("/workspace/new")
    await write("/workspace/new/file", b"new")
    await portal.unlink("/doc/deep/file")
    await portal.rmdir("/doc/deep")
    await provider.snapshot(id, "after", machine)
    await machine.stop()
    changes = provider.changes("tiny", "before", "after")
    found, more = await changes.list_(100)
    assert not more
    assert [(change.path, change.change, change.type) for change in found] == [
        ("/doc/deep", ChangeKind.DELETED, "directory"),
        ("/workspace/changed", ChangeKind.CHANGED, "file"),
        ("/workspace/gone", ChangeKind.DELETED, "file"),
        ("/workspace/new", ChangeKind.ADDED, "directory"),
        ("/workspace/new/file", ChangeKind.ADDED, "file"),
    ]
    content = b"".join([part async for part in changes.tar()])
    with tarfile.open(fileobj=BytesIO(content)) as tar:
        assert sorted(tar.getnames()) == sorted(
            ["doc/.wh.deep", "workspace/.wh.gone", "workspace/changed", "workspace/new", "workspace/new/file"]
        )
        member = tar.extractfile("workspace/changed")
        assert member is not None
        assert member.read() == b"two"
    since = await provider.changes("tiny", None, "after").list_(2)
    assert ([change.path for change in since[0]], since[1]) == (["/doc/deep", "/workspace"], True)
    assert await provider.deleted(id, "tiny") == ["doc/deep"]
    await provider.clone("after", f"{id}-copy")
    assert await provider.deleted(f"{id}-copy", "tiny") == ["doc/deep"]  # which is in a layer below its own
    await provider.forget(f"{id}-copy")
    await provider.remove_image("tiny")


# -- what others left --------------------------------------------------------------------------------------------------


async def test_what_a_killed_server_left_is_swept_and_what_is_owned_is_kept(
    engine: Engine, settings: dict[str, object], tmp_path: Path
) -> None:
    first = DockerProvider(Settings(home=tmp_path, **settings))  # type: ignore[arg-type]
    await first.open()
    assert await first.sweep(set(), set()) == []
    kept = await first.start(Spec(id="kept", image="host"), nobody)
    async with speaking(kept) as say:
        await say("echo precious > /workspace/file")
    await first.snapshot("kept", "owned", kept)
    await first.snapshot("kept", "nobodys", kept)
    lost = await first.start(Spec(id="nobodys", image="host"), nobody)
    await kept.freeze()  # which would stay so for ever
    await first.restore("owned", "nobodys", lost.stop)
    # As a server that is killed: nothing is said to the engine, everything of the process goes.
    await first.engine.close()
    os.close(first._presence)
    first._presence = -1
    kept._provider = None  # type: ignore[assignment]
    kept.portal._on_lost = None
    kept.relock(-1)
    second = DockerProvider(Settings(home=tmp_path, **settings))  # type: ignore[arg-type]
    await second.open()
    assert second.alone
    removed = await second.sweep({"kept"}, {"owned"})
    assert sorted(removed) == ["snapshot nobodys", "the container of nobodys", "what ran in the container of kept"]
    assert await second.snapshots() == {"owned"}
    async with started(second, "kept") as (_, say):
        assert await say("cat /workspace/file") == "precious\n"
    await second.remove_snapshot("owned")
    await second.forget("kept")
    await second.close()
    await kept.portal.close()
    left = subprocess.run(
        [*engine._line("ps"), "-aq", f"--filter=label=skerry.home={second._mark}"],
        env=engine._env,
        capture_output=True,
        check=True,
    )
    assert left.stdout == b""


async def test_an_exchange_in_which_a_server_was_killed_is_finished(provider: DockerProvider, id: str) -> None:
    async with started(provider, id) as (machine, say):
        await say("echo one > /workspace/file")
        await provider.snapshot(id, "first", machine)
    image = await provider._images.snapshot("first")
    await provider._containers.hold(provider._containers.next(id), id, image)
    await provider.engine.remove(provider._containers.name(id))  # and here it was killed
    assert await provider.exists(id)
    async with started(provider, id) as (_, say):
        assert await say("cat /workspace/file") == "one\n"


# -- images ------------------------------------------------------------------------------------------------------------


async def test_images_are_imported_listed_used_and_removed(provider: DockerProvider, id: str, tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "mark").write_text("imported")
    info = await provider.import_image("small", str(tmp_path), label="a directory")
    assert (info.name, info.source) == ("small", "a directory")
    assert [one.name for one in await provider.images()] == ["host", "small"]
    with pytest.raises(ImageExistsError):
        await provider.import_image("small", str(tmp_path))
    # There is no shell in it, and Skerry's own Python is at hand all the same.
    machine = await provider.start(Spec(id=id, image="small"), nobody)
    fd = await machine.portal.open("/etc/mark", os.O_RDONLY)
    assert os.read(fd, 100) == b"imported"
    os.close(fd)
    await machine.stop()
    await provider.remove_image("small")
    with pytest.raises(ImageNotFoundError):
        await provider.require_image("small")
    machine = await provider.start(Spec(id=id, image="small"), nobody)  # which still has its files
    await machine.stop()


async def test_an_image_whose_files_would_be_in_no_snapshot_is_refused(
    engine: Engine, provider: DockerProvider
) -> None:
    reference = f"{provider._images.repository}:image-volumes"
    container = engine._call("create", "--network=none", "skerry-bench", "true").strip()
    engine._call("commit", "--change=VOLUME /data", container, reference)
    engine._call("rm", container)
    with pytest.raises(UnsupportedError, match="declares volumes"):
        await provider.require_image("volumes")
    engine._call("rmi", reference)


async def test_toolboxes_are_shown_read_only_to_those_that_ask(
    provider: DockerProvider, id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toolboxes = Toolboxes(tmp_path)
    kit = KITS["opencode"]
    program = toolboxes.directory / kit.name / kit.version / "bin" / "opencode"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\necho shown\n")
    program.chmod(0o755)
    monkeypatch.setattr(provider, "_toolboxes", toolboxes)
    machine = await provider.start(Spec(id=id, image="host", toolboxes=("opencode",)), nobody)
    async with speaking(machine) as say:
        assert await say("/opt/skerry/opencode/bin/opencode; touch /opt/skerry/opencode/x || echo refused") == (
            "shown\nrefused\n"
        )
    await machine.stop()
    async with started(provider, id) as (_, say):  # and no longer to one that does not
        assert await say("ls /opt/skerry/opencode") == ""
    toolboxes.close()
