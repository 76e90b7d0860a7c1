"""The pool: a disk of the sandboxes' own in one file. Nothing the host or another process does may hurt it."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from skerry.control.open import open_registry
from skerry.control.registry import Registry
from skerry.errors import HostUnfitError, NoSpaceError
from skerry.models import (
    BackupRequest,
    CreateSandbox,
    CreateSnapshot,
    ExecRequest,
    ExecResult,
    ForkSandbox,
    RestoreRequest,
    RollbackSandbox,
)
from skerry.providers.local import loops, pool
from skerry.providers.local.pool import Pool
from skerry.settings import Settings
from tests import warm
from tests.disks import devices_of, file_system, names, opened
from tests.providers.users import needs_root
from tests.servers import mounts_below

pytestmark = needs_root


@asynccontextmanager
async def registry_on(home: Path, **settings: object) -> AsyncIterator[Registry]:
    registry = await open_registry(Settings(home=home, **settings))  # type: ignore[arg-type]
    try:
        yield registry
    finally:
        await registry.close()


async def sh(registry: Registry, id: str, command: str) -> ExecResult:
    async with registry.use(id) as runtime:
        return await runtime.exec(ExecRequest(command=command, session=None))


async def test_files_live_in_the_pool_and_nothing_is_left_when_the_server_ends(tmp_path: Path) -> None:
    home = tmp_path / "home"
    for round in range(2):
        async with registry_on(home) as registry:
            assert registry.provider.capabilities().snapshots == "instant"
            assert len(devices_of(home, 0)) == 1
            assert mounts_below(home) == []
            await sh(registry, "a", f"echo {round} >>f")
            assert (await sh(registry, "a", "cat f")).stdout == "".join(f"{n}\n" for n in range(round + 1))
        assert devices_of(home) == []
    assert list((home / "sandboxes").iterdir()) == []
    assert names(home, "sandboxes") == ["a"]
    assert devices_of(home) == []


async def test_its_space_is_allocated_and_not_given_back(tmp_path: Path) -> None:
    home = tmp_path / "home"
    async with registry_on(home) as registry:
        await sh(registry, "a", "head -c 30000000 /dev/urandom >f; sync; rm f; sync")
        file = home / "pool.img"
        assert file.stat().st_blocks * 512 >= file.stat().st_size
        assert file.stat().st_mode & 0o077 == 0


async def test_destroying_gives_the_space_back_to_the_pool(tmp_path: Path) -> None:
    async with registry_on(tmp_path / "home") as registry:
        for number in range(8):
            result = await sh(registry, f"s{number}", "head -c 200000000 /dev/zero >f && sync")
            assert result.exit_code == 0, result
            await registry.snapshots.create(f"s{number}", CreateSnapshot(name=f"n{number}"))
            await registry.destroy(f"s{number}")
            await registry.snapshots.delete(f"n{number}")
    assert names(tmp_path / "home", "sandboxes") == names(tmp_path / "home", "snapshots") == []
    assert names(tmp_path / "home", "trash") == []


async def test_it_grows_while_the_host_has_room(tmp_path: Path) -> None:
    home = tmp_path / "home"
    async with registry_on(home, pool_size=256 << 20) as registry:
        before = (home / "pool.img").stat().st_size
        for number in range(5):
            result = await sh(registry, "a", f"head -c 100000000 /dev/zero >f{number} && sync")
            assert result.exit_code == 0, result.stderr
            await asyncio.sleep(0.5)
        after = (home / "pool.img").stat()
        assert after.st_size > before + (256 << 20)
        assert after.st_blocks * 512 >= after.st_size
        shown = int((await sh(registry, "a", "df --output=size -B1 / | tail -n1")).stdout)
        assert shown > 700 << 20
    async with registry_on(home) as registry:
        assert (await sh(registry, "a", "cat f* | wc -c")).stdout == "500000000\n"


async def test_it_makes_room_for_a_restore(tmp_path: Path) -> None:
    home = tmp_path / "home"
    async with registry_on(home, pool_size=256 << 20) as registry:
        await sh(registry, "a", "for n in 1 2 3 4 5 6 7; do head -c 100000000 /dev/zero >f$n; sync; sleep 0.5; done")
        async with registry.use("a") as runtime:
            backup = (await registry.backups.backup(runtime, "a", BackupRequest())).backup
        assert backup.bytes == 700_000_000
    async with registry_on(tmp_path / "other", pool_size=256 << 20) as registry:
        (home / "buckets").rename(tmp_path / "other" / "buckets")
        async with registry.use("b") as runtime:
            await registry.backups.restore(runtime, "b", RestoreRequest(backup=backup.id))
        assert (await sh(registry, "b", "cat f* | wc -c")).stdout == "700000000\n"


FILL = """
import os
os.mkdir("notes")
with open("big", "wb") as big:
    try:
        while True:
            big.write(bytes(1 << 20))
            big.flush()
    except OSError as error:
        print(error.strerror)
os.sync()
# btrfs keeps small files in its own notes, for which it has set room apart; what a commit gives back is used up, too.
made = failed = 0
while failed < 5:
    try:
        with open(f"notes/{made}", "wb") as note:
            note.write(bytes(1900))
        made += 1
    except OSError:
        failed += 1
        os.sync()
"""


async def test_a_full_pool_is_an_error_for_who_writes_and_for_nobody_else() -> None:
    # A host of which the pool has taken all it may.
    with file_system("ext4", 700) as place:
        home = place / "home"
        async with registry_on(home, pool_size=200 << 20) as registry:
            await sh(registry, "other", "echo mine >f; sync")
            kept = await registry.snapshots.create("other", CreateSnapshot())
            full = await sh(registry, "greedy", f"python3 -c '{FILL}'")
            assert (full.exit_code, full.stdout) == (0, "No space left on device\n"), full
            assert (home / "pool.img").stat().st_size == 200 << 20
            assert (await sh(registry, "other", "cat f; echo awake")).stdout == "mine\nawake\n"
            with pytest.raises(NoSpaceError, match=r"'other' could not be snapshotted: the disk .* is full"):
                await registry.snapshots.create("other", CreateSnapshot())
            with pytest.raises(NoSpaceError, match=r"'other' could not be rolled back: the disk .* is full"):
                await registry.snapshots.rollback("other", RollbackSandbox(snapshot=kept.id))
            with pytest.raises(NoSpaceError, match=r"'other' could not be snapshotted: the disk .* is full"):
                await registry.snapshots.fork("other", ForkSandbox(ids=["fork"]))
            # It was not even stopped for that, and why it failed can be read.
            assert (await sh(registry, "other", "cat f")).stdout == "mine\n"
            assert (await registry.get("other")).starts == 1
            assert [one.id for one in await registry.snapshots.list_()] == [kept.id]
            told = [(event.kind, event.details) for event in await registry.events("other")][-3:]
            assert told == [(f"{kind}_failed", {"code": "no_space"}) for kind in ("snapshot", "rollback", "fork")]
            for operation in ("snapshot", "rollback", "fork"):
                line = f'skerry_operation_failures_total{{operation="{operation}"}} 1.0'
                assert line in (await registry.measurements()).decode()
            assert (await sh(registry, "greedy", "rm -r big notes; sync")).exit_code == 0
            async with asyncio.timeout(60):  # what was deleted is free again a little later
                while not await rolled_back(registry, "other", kept.id):
                    await asyncio.sleep(0.1)
            assert (await sh(registry, "greedy", "echo ok >small && cat small")).stdout == "ok\n"
        async with registry_on(home) as registry:
            assert (await sh(registry, "other", "cat f")).stdout == "mine\n"
            assert (await sh(registry, "greedy", "cat small")).stdout == "ok\n"
            await registry.snapshots.create("other", CreateSnapshot())


async def rolled_back(registry: Registry, id: str, snapshot: str) -> bool:
    try:
        await registry.snapshots.rollback(id, RollbackSandbox(snapshot=snapshot))
    except NoSpaceError:
        return False
    return True


async def test_a_full_host_hurts_no_sandbox_in_the_pool() -> None:
    with file_system("ext4", 700) as place:
        home = place / "home"
        async with registry_on(home, pool_size=300 << 20) as registry:
            await sh(registry, "a", "echo before >f")
            assert subprocess.run(["dd", "if=/dev/zero", f"of={place}/filler"], capture_output=True).returncode == 1
            # What has been allocated is there, also for the parts that were never written to.
            result = await sh(registry, "a", "head -c 150000000 /dev/urandom >g && sync && sha256sum g && cat f")
            assert result.exit_code == 0, result
            digest = (await sh(registry, "a", "echo 3 >/dev/null; sha256sum g")).stdout
            assert result.stdout == f"{digest}before\n"
            os.unlink(place / "filler")


async def test_a_snapshot_that_does_not_fit_fails_clearly_and_leaves_nothing() -> None:
    with file_system("ext4", 150) as place:
        async with registry_on(place / "home", pool_size=0) as registry:
            await sh(registry, "a", "head -c 70000000 /dev/urandom >f")
            with pytest.raises(NoSpaceError, match=r"could not be snapshotted.*full"):
                await registry.snapshots.create("a", CreateSnapshot())
            assert await registry.snapshots.list_() == []
            assert names(place / "home", "snapshots") == []
            assert (await sh(registry, "a", "rm f; echo ok")).stdout == "ok\n"


async def test_a_launcher_that_dies_is_replaced_and_finds_the_pool_again(tmp_path: Path) -> None:
    home = tmp_path / "home"
    async with registry_on(home) as registry:
        await sh(registry, "a", "echo kept >f")
        for _ in range(2):
            launcher = registry.provider.launcher.pid  # type: ignore[attr-defined]
            os.kill(launcher, signal.SIGKILL)
            async with asyncio.timeout(30):
                while registry.provider.launcher.alive:  # type: ignore[attr-defined]
                    await asyncio.sleep(0.01)
            assert (await sh(registry, "a", "cat f")).stdout == "kept\n"
            taken = await registry.snapshots.create("a", CreateSnapshot())
            made = await registry.create(CreateSandbox(snapshot=taken.id))
            assert (await sh(registry, made.id, "cat f")).stdout == "kept\n"
            assert len(devices_of(home, 0)) == 1
    assert devices_of(home) == []
    groups = map(Path, (home / "cgroups").read_text().split())
    assert [left for group in groups for left in group.parent.glob(f"{group.name}*")] == []


_BESIDE = """
import asyncio, sys
from pathlib import Path
from skerry.control.open import open_registry
from skerry.models import CreateSnapshot, ExecRequest
from skerry.settings import Settings

async def main():
    registry = await open_registry(Settings(home=Path(sys.argv[1])))
    for number in range(5):
        id = f"{sys.argv[2]}-{number}"
        async with registry.use(id) as runtime:
            await runtime.exec(ExecRequest(command=f"echo {id} >f; head -c 1000000 /dev/urandom >g; sha256sum g >sum"))
        await registry.snapshots.create(id, CreateSnapshot(name=f"of-{id}"))
    await registry.close()

asyncio.run(main())
"""


async def test_processes_that_share_a_home_share_one_device(tmp_path: Path) -> None:
    home = tmp_path / "home"
    beside = [warm.Popen(_BESIDE, str(home), name, stderr=subprocess.PIPE) for name in "xyz"]
    most = 0
    while any(process.poll() is None for process in beside):
        most = max(most, len(devices_of(home, 0)))
        await asyncio.sleep(0.005)
    said = [process.communicate()[1].decode() for process in beside]
    assert [process.returncode for process in beside] == [0, 0, 0], said
    assert most == 1
    assert devices_of(home) == []
    async with registry_on(home) as registry:
        assert len(await registry.snapshots.list_()) == 15
        for name in "xyz":
            for number in range(5):
                made = await registry.create(CreateSandbox(snapshot=f"of-{name}-{number}"))
                result = await sh(registry, made.id, "cat f; sha256sum -c sum")
                assert result.stdout == f"{name}-{number}\ng: OK\n"


async def test_a_home_on_btrfs_needs_none() -> None:
    with file_system("btrfs", 400) as place:
        home = place / "home"
        async with registry_on(home) as registry:
            assert registry.provider.capabilities().snapshots == "instant"
            await sh(registry, "a", "echo kept >f; rm /usr/bin/env")
            taken = await registry.snapshots.create("a", CreateSnapshot())
            made = await registry.create(CreateSandbox(snapshot=taken.id))
            assert (
                await sh(registry, made.id, "cat f; ls /usr/bin/env 2>/dev/null || echo gone")
            ).stdout == "kept\ngone\n"
            await registry.snapshots.rollback("a", RollbackSandbox(snapshot=taken.id))
            assert (await sh(registry, "a", "cat f")).stdout == "kept\n"
            await registry.destroy("a")
            await registry.snapshots.delete(taken.id, force=True)
        assert not (home / "pool.img").exists()
        assert (names(home, "sandboxes"), names(home, "snapshots"), names(home, "trash")) == ([made.id], [], [])


async def test_a_home_that_has_plain_sandboxes_stays_plain(tmp_path: Path) -> None:
    home = tmp_path / "home"
    async with registry_on(home, pool_size=0) as registry:
        await sh(registry, "old", "echo kept >f")
    async with registry_on(home) as registry:
        assert registry.provider.capabilities().snapshots == "copy"
        assert "plain directories" in registry.provider.capabilities().details["snapshots"]
        assert (await sh(registry, "old", "cat f")).stdout == "kept\n"
    assert not (home / "pool.img").exists()


async def test_where_no_pool_can_be_made_snapshots_are_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(loops, "attach", refuse)
        async with registry_on(tmp_path / "a") as registry:
            assert registry.provider.capabilities().snapshots == "copy"
            assert "not permitted" in registry.provider.capabilities().details["snapshots"]
            assert (await sh(registry, "s", "echo works")).stdout == "works\n"
    assert sorted(path.name for path in (tmp_path / "a").glob("pool.*")) == ["pool.lock"]
    monkeypatch.setattr(pool, "_path", lambda: str(tmp_path))
    async with registry_on(tmp_path / "b") as registry:
        assert registry.provider.capabilities().details["snapshots"] == "mkfs.btrfs is not installed."


@pytest.mark.parametrize(("text", "size"), [("512M", 512 << 20), ("16GiB", 16 << 30), ("0", 0), ("1048576", 1 << 20)])
def test_its_size_is_written_as_people_write_sizes(text: str, size: int) -> None:
    assert Settings.from_env({"SKERRY_POOL_SIZE": text}).pool_size == size


@pytest.mark.parametrize("text", ["-1", "big", "1,5G", "1X"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="pool_size"):
        Settings.from_env({"SKERRY_POOL_SIZE": text})


def test_a_home_in_memory_gets_none() -> None:
    assert "in memory" in str(Pool(Path("/dev/shm/not-yet"), None).impossible())


async def test_a_pool_that_cannot_be_mounted_is_not_replaced_by_an_empty_one(tmp_path: Path) -> None:
    home = tmp_path / "home"
    async with registry_on(home) as registry:
        await sh(registry, "a", "echo kept >f")
    assert devices_of(home) == []
    intact = (home / "pool.img").read_bytes()
    with (home / "pool.img").open("r+b") as file:
        file.write(bytes(1 << 20))
    with pytest.raises(HostUnfitError, match=r"pool\.img, which cannot be mounted"):
        await open_registry(Settings(home=home))
    (home / "pool.img").write_bytes(intact)
    async with registry_on(home) as registry:
        assert (await sh(registry, "a", "cat f")).stdout == "kept\n"


def test_a_pool_whose_making_was_killed_is_made_again(tmp_path: Path) -> None:
    (tmp_path / "pool.img.new").write_bytes(b"half of it")
    made = Pool(tmp_path, 200 << 20)
    made.make()
    with opened(tmp_path) as disk:
        assert os.statvfs(disk).f_blocks * 4096 == 200 << 20
    assert sorted(os.listdir(tmp_path)) == ["pool.img", "pool.lock"]
    assert devices_of(tmp_path) == []
