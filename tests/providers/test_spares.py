"""Machines that are started without files and become sandboxes: nobody inside can tell."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from skerry.control.open import open_registry
from skerry.control.registry import Registry
from skerry.errors import SnapshotNotFoundError
from skerry.models import CreateSandbox, CreateSnapshot, ExecRequest, ForkSandbox, Limits, RollbackSandbox
from skerry.providers.contract import Spec
from skerry.providers.local import spares
from skerry.providers.local.machine import LocalMachine
from skerry.providers.local.provider import LocalProvider
from skerry.providers.local.spares import kind_of
from skerry.settings import Settings
from tests.providers.users import needs_root
from tests.servers import vanished

SIZE = 3
LOOK = """
ls -A / /dev /run; hostname; id; pwd
cut -d' ' -f5,6 /proc/self/mountinfo | sort
grep -E '^(Cap|Seccomp|NoNewPrivs|Uid|Gid)' /proc/self/status
stat -c '%n %a %u:%g' / /usr /dev /run /proc /tmp /workspace /dev/shm
readlink /proc/1/cwd /proc/1/root
ls -A /proc/1/fd | wc -l
ulimit -a
"""

pytestmark = needs_root


@pytest_asyncio.fixture(scope="module")
async def registry(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Registry]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spares, "QUIET", 0.05)
        home = tmp_path_factory.mktemp("spares") / "home"
        registry = await open_registry(Settings(home=home, spares=SIZE))
        yield registry
        await registry.close()


def provider_of(registry: Registry) -> LocalProvider:
    assert isinstance(registry.provider, LocalProvider)
    return registry.provider


async def full(registry: Registry) -> None:
    """Until there are as many as there should be, and copies as well if some are wanted."""
    provider = provider_of(registry)
    async with asyncio.timeout(60):
        while True:
            kept, stock = provider._advance.spares, provider._advance.stock
            fit = [spare for spare in kept._ready if kind_of(spare.started_with) == kind_of(kept._like)]
            settled = stock._like is None or all(copy.settled for copy in stock._ready)
            copied = stock._snapshot is None or (len(stock._ready) == SIZE and settled)
            if len(fit) == len(kept._ready) == SIZE and copied:
                return
            await asyncio.sleep(0.02)


async def run(registry: Registry, id: str, command: str) -> str:
    async with registry.use(id) as runtime:
        done = await runtime.exec(ExecRequest(command=command, session=None))
        return done.stdout + done.stderr


async def started(registry: Registry, id: str) -> bool:
    """Start it; whether a spare has become it."""
    await full(registry)
    waiting = {spare.key for spare in provider_of(registry)._advance.spares._ready}
    async with registry.use(id):
        return key_of(registry, id) in waiting


def key_of(registry: Registry, id: str) -> str:
    machine = registry._owners[id]._machine
    assert isinstance(machine, LocalMachine)
    return machine.key


async def stocked(registry: Registry, name: str, **settings: Any) -> str:
    """A snapshot of which there are copies with machines on them, each as for a sandbox with these settings."""
    await run(registry, name, "echo first > /workspace/f; mkdir /opt/here; touch /usr/lib/there")
    snapshot = await registry.snapshots.create(name, CreateSnapshot())
    await registry.create(CreateSandbox(id=f"{name}-1", snapshot=snapshot.id, **settings))
    await run(registry, f"{name}-1", "true")
    await full(registry)
    return snapshot.id


async def settled(registry: Registry, id: str, **settings: Any) -> str:
    """A new sandbox whose machine is there before it is started; the key of that."""
    await registry.create(CreateSandbox(id=id, **settings))
    return provider_of(registry)._advance.settled[id].machine.key


async def test_what_is_seen_inside_is_the_same(registry: Registry, tmp_path: Path) -> None:
    assert await started(registry, "same")
    direct = await open_registry(Settings(home=tmp_path / "home"))
    try:
        expected = await run(direct, "same", LOOK)
    finally:
        await direct.close()
    assert await run(registry, "same", LOOK) == expected
    assert "\n/ rw,relatime\n" in expected
    assert "hold" not in await run(registry, "same", "cat /proc/*/mountinfo | cut -d' ' -f5; ls -A /")


async def test_it_is_a_sandbox_of_its_own_that_keeps_its_files(registry: Registry) -> None:
    assert await started(registry, "one")
    assert await started(registry, "other")
    await run(registry, "one", "echo mine > /workspace/f; mkdir /opt/here; touch /usr/lib/there")
    assert "No such file" in await run(registry, "other", "cat /workspace/f")
    await registry.stop("one")
    assert await started(registry, "one"), "it wakes as a spare, too"
    assert await run(registry, "one", "cat /workspace/f; ls -d /opt/here /usr/lib/there; hostname") == (
        "mine\n/opt/here\n/usr/lib/there\none\n"
    )


async def test_isolated_sessions_and_programs_work_in_it(registry: Registry) -> None:
    assert await started(registry, "works")
    async with registry.use("works") as runtime:
        portal = await runtime.portal.isolate()
        await portal.close()
    said = await run(registry, "works", "python3 -c 'print(6*7)'; node -p 6*7; su nobody -s /bin/sh -c id")
    assert said.startswith("42\n42\nuid=65534(nobody)")


async def test_its_limits_are_those_that_it_was_given(registry: Registry) -> None:
    await registry.create(CreateSandbox(id="small", limits=Limits(memory=64 << 20, pids=32)))
    assert await started(registry, "small")
    async with registry.use("small") as runtime:
        done = await runtime.exec(ExecRequest(command="python3 -c 'x = bytearray(1 << 28)'"))
    assert done.limit == "memory"


async def test_other_limits_at_the_start_make_other_spares(registry: Registry) -> None:
    await full(registry)
    for number in range(2):
        await registry.create(CreateSandbox(id=f"few-files-{number}", limits=Limits(open_files=100)))
        assert await started(registry, f"few-files-{number}") == bool(number)
        assert await run(registry, f"few-files-{number}", "ulimit -Hn") == "100\n"
    await registry.stop("few-files-0")
    assert not await started(registry, "as-usual")
    assert await started(registry, "as-usual-again")


async def test_where_a_link_is_in_the_way_it_starts_as_ever(registry: Registry) -> None:
    """Of /opt, below which toolboxes are shown: nothing may be mounted where a sandbox's own link leads."""
    await registry.create(CreateSandbox(id="linked", toolboxes=["opencode"]))
    assert await started(registry, "linked")
    assert await run(registry, "linked", "ls /opt/skerry") == "opencode\n"
    await registry.stop("linked")
    upper = provider_of(registry)._disk.directory("linked") / "root" / "upper"
    (upper / "opt").rename(upper / "elsewhere")
    os.symlink("elsewhere", upper / "opt")
    assert not await started(registry, "linked")
    assert await run(registry, "linked", "ls /opt/skerry") == "opencode\n"


async def test_one_that_is_killed_is_replaced_and_one_that_dies_while_it_is_taken_is_done_without(
    registry: Registry,
) -> None:
    await full(registry)
    provider = provider_of(registry)
    killed = provider._advance.spares._ready[0]
    os.kill(provider.launcher._pids[killed.key], signal.SIGKILL)
    async with asyncio.timeout(30):
        while killed in provider._advance.spares._ready:
            await asyncio.sleep(0.02)
    await full(registry)
    for spare in provider._advance.spares._ready:
        os.kill(provider.launcher._pids[spare.key], signal.SIGKILL)
    assert await run(registry, "undaunted", "echo here") == "here\n"


async def test_one_whose_attendant_is_killed_is_done_without(registry: Registry) -> None:
    await full(registry)
    provider = provider_of(registry)
    spares_of = {provider.launcher._pids[spare.key] for spare in provider._advance.spares._ready}
    for pid in _below(provider.launcher.pid):
        # It is in the host's pid namespace, but in the mount namespace of a spare.
        of_a_spare = any(os.readlink(f"/proc/{pid}/ns/mnt") == os.readlink(f"/proc/{one}/ns/mnt") for one in spares_of)
        if of_a_spare and os.readlink(f"/proc/{pid}/ns/pid") == os.readlink("/proc/self/ns/pid"):
            os.kill(pid, signal.SIGKILL)
    assert await run(registry, "unattended", "echo here") == "here\n"


async def test_copies_that_were_made_ahead_are_as_others(registry: Registry) -> None:
    await run(registry, "origin", "echo first > /workspace/f")
    snapshot = await registry.snapshots.create("origin", CreateSnapshot())
    await registry.create(CreateSandbox(id="copied-1", snapshot=snapshot.id))
    await full(registry)
    stock = provider_of(registry)._advance.stock
    assert len(stock._ready) == SIZE
    ready = list(stock._ready)
    await registry.snapshots.fork("copied-1", ForkSandbox(ids=["forked"]))
    assert stock._ready == ready, "what is forked as it is now is copied once"
    await registry.create(CreateSandbox(id="copied-2", snapshot=snapshot.id))
    await full(registry)
    await registry.create(CreateSandbox(id="copied-3", snapshot=snapshot.id))
    assert len(stock._ready) == SIZE - 1
    await run(registry, "copied-3", "echo second > /workspace/f")
    assert [await run(registry, f"copied-{n}", "cat /workspace/f") for n in (1, 2, 3)] == ["first\n"] * 2 + ["second\n"]
    sandboxes = provider_of(registry)._disk.directory("x").parent
    await full(registry)
    await registry.snapshots.delete(snapshot.id, force=True)
    with pytest.raises(SnapshotNotFoundError):
        await registry.create(CreateSandbox(id="copied-4", snapshot=snapshot.id))
    async with asyncio.timeout(30):
        while [name for name in os.listdir(sandboxes) if name.startswith(".copy-")]:
            await asyncio.sleep(0.02)


async def test_what_is_seen_in_a_machine_on_a_copy_is_the_same(registry: Registry, tmp_path: Path) -> None:
    snapshot = await stocked(registry, "kin", toolboxes=["opencode"])
    key = await settled(registry, "kin-2", snapshot=snapshot, toolboxes=["opencode"])
    found = await run(registry, "kin-2", LOOK)
    assert key_of(registry, "kin-2") == key
    direct = await open_registry(Settings(home=tmp_path / "home"))
    try:
        await direct.create(CreateSandbox(id="kin-2", toolboxes=["opencode"]))
        assert await run(direct, "kin-2", LOOK) == found
    finally:
        await direct.close()
    assert await run(registry, "kin-2", "cat /workspace/f; ls -d /opt/here /usr/lib/there; hostname") == (
        "first\n/opt/here\n/usr/lib/there\nkin-2\n"
    )
    assert "hold" not in await run(registry, "kin-2", "cat /proc/*/mountinfo | cut -d' ' -f5; ls -A /")


async def test_what_is_written_on_a_copy_is_its_sandbox_s_alone_and_stays(registry: Registry) -> None:
    snapshot = await stocked(registry, "alone")
    for number in (2, 3):
        await settled(registry, f"alone-{number}", snapshot=snapshot)
        await run(registry, f"alone-{number}", f"echo {number} > /workspace/f; rm -r /opt/here")
        await registry.stop(f"alone-{number}")
    assert [await run(registry, f"alone-{n}", "cat /workspace/f; ls /opt") for n in (1, 2, 3)] == [
        "first\nhere\n",
        "2\n",
        "3\n",
    ]


async def test_one_that_wants_other_toolboxes_or_limits_than_the_last_has_them(registry: Registry) -> None:
    snapshot = await stocked(registry, "other")
    first: dict[str, Any] = {"toolboxes": ["opencode"]}
    for number, (wish, most) in enumerate([(first, None), (first | {"limits": Limits(open_files=100)}, "100\n")]):
        key = await settled(registry, f"other-wish-{number}", snapshot=snapshot, **wish)
        assert await run(registry, f"other-wish-{number}", "cat /workspace/f; ls /opt") == "first\nhere\nskerry\n"
        assert most in (None, await run(registry, f"other-wish-{number}", "ulimit -Hn"))
        assert key not in provider_of(registry).launcher._pids
        await full(registry)


async def test_limits_that_can_be_changed_are_those_that_it_was_given(registry: Registry) -> None:
    snapshot = await stocked(registry, "limited")
    key = await settled(registry, "limited-2", snapshot=snapshot, limits=Limits(memory=64 << 20, disk=64 << 20))
    async with registry.use("limited-2") as runtime:
        assert key_of(registry, "limited-2") == key
        done = await runtime.exec(ExecRequest(command="python3 -c 'x = bytearray(1 << 28)'"))
        assert done.limit == "memory"
        done = await runtime.exec(ExecRequest(command="head -c 100M /dev/zero > /workspace/big"))
        assert "No space left on device" in done.stderr


async def test_one_that_is_deleted_or_rolled_back_before_it_was_started_leaves_its_machine(registry: Registry) -> None:
    snapshot = await stocked(registry, "back")
    pids = provider_of(registry).launcher._pids
    keys = [await settled(registry, f"back-{number}", snapshot=snapshot) for number in (2, 3)]
    assert pids.keys() >= set(keys)
    await registry.destroy("back-2")
    await run(registry, "back", "echo second > /workspace/f")
    later = await registry.snapshots.create("back", CreateSnapshot())
    await registry.snapshots.rollback("back-3", RollbackSandbox(snapshot=later.id))
    assert not pids.keys() & set(keys)
    assert await run(registry, "back-3", "cat /workspace/f") == "second\n"


async def test_of_those_that_nobody_starts_only_the_last_keep_their_machines(registry: Registry) -> None:
    snapshot = await stocked(registry, "left")
    keys = list[str]()
    for number in range(2, SIZE + 3):
        keys.append(await settled(registry, f"left-{number}", snapshot=snapshot))
        await full(registry)
    advance = provider_of(registry)._advance
    assert list(advance.settled) == [f"left-{number}" for number in range(3, SIZE + 3)]
    assert await run(registry, "left-2", "cat /workspace/f; hostname") == "first\nleft-2\n"
    assert not provider_of(registry).launcher._pids.keys() & {keys[0]}
    assert await run(registry, "left-3", "cat /workspace/f") == "first\n"
    assert key_of(registry, "left-3") == keys[1]
    for number in range(2, SIZE + 3):
        await registry.destroy(f"left-{number}")
    assert not provider_of(registry).launcher._pids.keys() & set(keys)


async def test_one_that_another_process_has_run_is_seen_as_that_has_left_it(registry: Registry) -> None:
    snapshot = await stocked(registry, "lent")
    key = await settled(registry, "lent-2", snapshot=snapshot)
    line = [sys.executable, "-m", "skerry.cli.main", "--home", str(registry.settings.home), "exec", "lent-2", "--"]
    command = "echo elsewhere > /workspace/f; rm -r /opt/here; touch /workspace/new"
    done = await asyncio.create_subprocess_exec(*line, "sh", "-c", command)
    assert await done.wait() == 0
    assert (
        await run(registry, "lent-2", "cat /workspace/f; ls /opt /workspace")
        == "elsewhere\n/opt:\n\n/workspace:\nf\nnew\n"
    )
    assert key_of(registry, "lent-2") != key
    kept = await settled(registry, "lent-3", snapshot=snapshot)
    await provider_of(registry).require_idle("lent-3")
    assert await run(registry, "lent-3", "cat /workspace/f") == "first\n"
    assert key_of(registry, "lent-3") == kept


async def test_where_the_machine_on_a_copy_was_killed_it_starts_as_ever(registry: Registry) -> None:
    snapshot = await stocked(registry, "hardy")
    pids = provider_of(registry).launcher._pids
    key = await settled(registry, "hardy-2", snapshot=snapshot)
    os.kill(pids[key], signal.SIGKILL)
    async with asyncio.timeout(30):
        while key in pids:
            await asyncio.sleep(0.02)
    assert await run(registry, "hardy-2", "cat /workspace/f; hostname") == "first\nhardy-2\n"
    assert key_of(registry, "hardy-2") != key


async def test_where_no_machine_can_live_on_a_copy_the_copies_are_there_all_the_same(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    await full(registry)
    advance = provider_of(registry)._advance
    outfit, refused = advance._outfit, list[str]()

    async def refusing(spare: LocalMachine, spec: Spec, *, stays: bool = False) -> None:
        if stays:
            refused.append(spec.id)
            raise OSError("It does not work here.")
        await outfit(spare, spec)

    monkeypatch.setattr(advance, "_outfit", refusing)
    snapshot = await stocked(registry, "bare")
    assert len(refused) == 1, "it is not tried again and again"
    await registry.create(CreateSandbox(id="bare-2", snapshot=snapshot))
    assert advance.settled == {}
    assert await run(registry, "bare-2", "cat /workspace/f") == "first\n"
    await full(registry)
    assert advance.spares._worker is not None
    assert not advance.spares._worker.done()


async def test_copies_go_with_their_machines(registry: Registry) -> None:
    snapshot = await stocked(registry, "gone")
    provider = provider_of(registry)
    keys = {copy.settled.machine.key for copy in provider._advance.stock._ready if copy.settled is not None}
    assert len(keys) == SIZE
    await registry.snapshots.delete(snapshot, force=True)
    async with asyncio.timeout(30):
        while provider.launcher._pids.keys() & keys:
            await asyncio.sleep(0.02)
        while [name for name in os.listdir(provider._disk.directory("x").parent) if name.startswith(".copy-")]:
            await asyncio.sleep(0.02)


async def test_none_is_left_when_the_server_has_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spares, "QUIET", 0.05)
    registry = await open_registry(Settings(home=tmp_path / "home", spares=SIZE))
    await full(registry)
    launcher = provider_of(registry).launcher.pid
    below = set(_below(launcher))
    assert len(below) >= 3 * SIZE, "bubblewrap, an init and who waits in it, each"
    groups = {line for pid in below for line in Path(f"/proc/{pid}/cgroup").read_text().split() if "spare" in line}
    assert len({re.sub(".*spare", "", line) for line in groups}) == SIZE
    await registry.close()
    assert not vanished(below)
    assert not [path for path in Path("/sys/fs/cgroup").glob("*/*/.spare-*") if str(tmp_path) in str(path)]


def _below(pid: int) -> list[int]:
    children = [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [*children, *(found for child in children for found in _below(child))]
