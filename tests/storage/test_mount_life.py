"""Mounts over the life of a sandbox: sleep, wake, failure, destruction, and what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from skerry.control.open import open_registry
from skerry.control.registry import Registry
from skerry.errors import (
    BucketNotConfiguredError,
    BucketNotFoundError,
    BucketUnreachableError,
    DangerousPathError,
    DirectoryNotEmptyError,
    InvalidKeyError,
    InvalidPathError,
    InvalidRequestError,
    MountExistsError,
    MountNotFoundError,
    NameTooLongError,
    NotDirectoryError,
    SandboxNotFoundError,
    SandboxStartError,
    SkerryError,
    UnsupportedError,
)
from skerry.models import CreateSandbox, MountBucket, StartProcess
from skerry.settings import Settings
from tests.s3 import S3
from tests.storage.mounting import Place, mounted, mounting_registry, place
from tests.storage.stalling import Stalling, stalling

__all__ = ["mounted", "mounting_registry", "place"]


async def descriptors(at_most: int | None = None) -> int:
    """How many there are but for the database's, whose connections come and go; waits for work in the background."""
    for _ in range(100):
        await asyncio.sleep(0.05)
        count = 0
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):
                count += "skerry.db" not in os.readlink(f"/proc/self/fd/{name}")
        if at_most is None or count <= at_most:
            break
    return count


def mount_threads() -> int:
    return sum(thread.name == "skerry-mount" for thread in threading.enumerate())


# -- sleep and wake ----------------------------------------------------------------------------------------------------


async def test_a_mount_comes_back_when_the_sandbox_wakes(mounted: Place) -> None:
    await mounted.out("echo before > /persist/f")
    for number in range(3):
        await mounted.registry.stop(mounted.id)
        assert [one.state for one in await mounted.registry.mounts.list(mounted.id)] == ["asleep"]
        assert mount_threads() == 0
        assert await mounted.out(f"cat /persist/f; echo {number} > /persist/f") in ("before\n", f"{number - 1}\n")
    assert [one.state for one in await mounted.registry.mounts.list(mounted.id)] == ["mounted"]
    assert await mounted.bucket.get("f") == b"2\n"


async def test_what_is_open_when_the_sandbox_is_stopped_is_saved(mounted: Place) -> None:
    await mounted.out("exec 3>/persist/open; echo written >&3")
    await mounted.registry.stop(mounted.id)
    assert await mounted.bucket.get("open") == b"written\n"


async def test_unmounting_leaves_an_empty_directory_and_nothing_behind(place: Place) -> None:
    await place.sh("true")
    before = await descriptors()
    for _ in range(5):
        await place.mount()
        await place.out("echo x > /persist/x")
        gone = await place.registry.mounts.unmount(place.id, "/persist")
        assert gone.mount_path == "/persist"
        assert await place.out("ls -A /persist; grep -c fuse /proc/self/mounts; true") == "0\n"
    assert await place.keys() == ["x"]
    assert mount_threads() == 0
    assert await descriptors(at_most=before) <= before
    with pytest.raises(MountNotFoundError):
        await place.registry.mounts.unmount(place.id, "/persist")
    assert (await place.kinds()).count("mounted") == (await place.kinds()).count("unmounted") == 5


async def test_a_mount_that_is_in_use_can_be_taken_away(mounted: Place) -> None:
    async with mounted.registry.use(mounted.id) as runtime:
        program = "import time\nf = open('/persist/log', 'wb', 0)\nwhile True: f.write(b'x\\n'); time.sleep(0.01)"
        await runtime.files.write("/tmp/write.py", program.encode())
        process = await runtime.processes.start(StartProcess(command="python3 /tmp/write.py"))
        await asyncio.sleep(0.3)
        async with asyncio.timeout(20):
            await mounted.registry.mounts.unmount(mounted.id, "/persist")
            while (await runtime.processes.get(process.id)).exit_code is None:
                await asyncio.sleep(0.05)
    assert mount_threads() == 0
    assert (await mounted.bucket.get("log")).startswith(b"x\nx\n")


async def test_a_sleeping_sandbox_is_not_woken_to_unmount(mounted: Place) -> None:
    await mounted.registry.stop(mounted.id)
    await mounted.registry.mounts.unmount(mounted.id, "/persist")
    assert await mounted.registry.mounts.list(mounted.id) == []
    assert (await mounted.registry.get(mounted.id)).state == "hibernated"
    assert await mounted.out("ls -A /persist") == ""


async def test_a_destroyed_sandbox_leaves_nothing_of_its_mounts(place: Place) -> None:
    await place.sh("true")
    await place.registry.stop(place.id)
    before = await descriptors()
    await place.mount()
    await place.mount("/other", prefix=f"{place.prefix}other", readOnly=True)
    await place.out("echo kept > /persist/kept")
    await place.registry.destroy(place.id)
    assert mount_threads() == 0
    assert await descriptors(at_most=before) <= before
    assert await place.bucket.get("kept") == b"kept\n"
    with pytest.raises(SandboxNotFoundError):
        await place.registry.mounts.list(place.id)
    # Another of the same name has none of it.
    assert await place.out("ls -A /persist 2>/dev/null; echo none") == "none\n"


async def test_a_sandbox_that_is_killed_leaves_nothing_either(mounted: Place) -> None:
    await mounted.out("exec 3>/persist/f; echo x >&3")
    machine = mounted.registry._owners[mounted.id].machine
    assert machine is not None
    await machine._provider.launcher.kill(machine.key)  # type: ignore[attr-defined]
    async with asyncio.timeout(20):
        while mount_threads() or mounted.registry._owners[mounted.id].machine is machine:
            await asyncio.sleep(0.05)
    assert await mounted.out("cat /persist/f") == "x\n"


async def test_an_ephemeral_sandbox_forgets_its_mounts(mounting_registry: Registry) -> None:
    await mounting_registry.create(CreateSandbox(id="fleeting", ephemeral=True))
    await mounting_registry.mounts.mount("fleeting", MountBucket(bucket="test"))
    await mounting_registry.stop("fleeting")
    assert await mounting_registry.mounts.list("fleeting") == []
    await mounting_registry.destroy("fleeting")


async def test_the_same_mount_again_changes_nothing(mounted: Place) -> None:
    await mounted.out("exec 3>/persist/f")
    again = await mounted.mount()
    assert (again.state, again.mode) == ("mounted", "localBucket" if mounted.bucket.kind == "directory" else "remoteR2")
    await mounted.out("echo still open >&3; exec 3>&-")
    assert await mounted.bucket.get("f") == b"still open\n"
    assert len(await mounted.registry.mounts.list(mounted.id)) == 1


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("/proc/x", DangerousPathError),
        ("/", DangerousPathError),
        ("/usr/local/x", DangerousPathError),
        ("/run/skerry", InvalidPathError),
        ("/workspace", InvalidPathError),
        ("/persist/../etc", DangerousPathError),
        ("/persist\0", InvalidPathError),
        ("/tmp/link/x", InvalidPathError),
        ("/tmp/link", InvalidPathError),
        ("/tmp/full", DirectoryNotEmptyError),
        ("/tmp/file", NotDirectoryError),
        ("/tmp/file/below", NotDirectoryError),
        ("/persist/below", MountExistsError),
        ("/data", MountExistsError),
    ],
)
async def test_places_that_cannot_be_mounted(place: Place, path: str, error: type[SkerryError]) -> None:
    await place.out("mkdir -p /tmp/full/x; touch /tmp/file; ln -s /var /tmp/link")
    await place.mount()
    await place.mount("/data/deep")
    before = await place.out("cat /proc/self/mounts; ls -d /tmp/* /")
    with pytest.raises(error):
        await place.mount(path)
    assert await place.out("cat /proc/self/mounts; ls -d /tmp/* /") == before
    assert len(await place.registry.mounts.list(place.id)) == 2


async def test_directories_made_for_a_mount_that_fails_are_taken_back(place: Place) -> None:
    await place.sh("true")
    with pytest.raises(NameTooLongError):
        await place.mount(f"/new/deep/{'x' * 256}")
    assert await place.out("ls -d /new 2>/dev/null; echo none") == "none\n"


async def test_a_mount_is_not_mounted_on_even_by_another_name(place: Place) -> None:
    await place.mount("/workspace/dir/mounted")
    await place.out("mv /workspace/dir /workspace/moved")
    with pytest.raises(InvalidPathError):
        await place.mount("/workspace/moved/mounted/x/y")
    assert await place.keys() == []


@pytest.mark.parametrize("prefix", ["a/../b", "../x", "/a//b/", "a\nb", "x" * 2000, "."])
async def test_prefixes_that_cannot_be(place: Place, prefix: str) -> None:
    with pytest.raises(InvalidKeyError):
        await place.mount(prefix=prefix)
    with pytest.raises(SandboxNotFoundError):
        await place.registry.get(place.id)
    await place.sh("true")


async def test_buckets_that_cannot_be_used_change_nothing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    await place.sh("true")
    mounts = place.registry.mounts
    with pytest.raises(BucketNotFoundError, match="those that are configured are default, test"):
        await mounts.mount(place.id, MountBucket(bucket="unknown"))
    for name in ("R2_ENDPOINT", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "PROJECT_DATA_BUCKET_NAME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(BucketNotConfiguredError, match="missing env vars: R2_ENDPOINT, AWS_ACCESS_KEY_ID"):
        await mounts.mount(place.id, MountBucket())
    if place.bucket.kind == "s3":
        with pytest.raises(InvalidRequestError):
            await mounts.mount(place.id, MountBucket(bucket="test", local_bucket=True))
    assert await mounts.list(place.id) == []
    assert "persist" not in await place.out("ls /")


async def test_a_host_without_fuse_says_so_and_makes_nothing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place.registry.provider, "_fuse", False)
    with pytest.raises(UnsupportedError, match="/dev/fuse"):
        await place.mount()
    with pytest.raises(SandboxNotFoundError):
        await place.registry.get(place.id)
    await place.sh("true")


async def test_the_local_bucket_needs_no_credentials(place: Place) -> None:
    mount = await place.registry.mounts.mount(place.id, MountBucket(local_bucket=True))
    assert (mount.mode, mount.prefix, mount.mount_path) == ("localBucket", f"/projects/{place.id}/", "/persist")
    await place.out("echo here > /persist/f")
    kept = place.registry.settings.home / "buckets" / "default" / "projects" / place.id / "f"
    assert kept.read_text() == "here\n"


async def test_there_is_a_bound_on_mounts(place: Place) -> None:
    for number in range(16):
        await place.mount(f"/m/{number}")
    with pytest.raises(InvalidRequestError, match="at most 16"):
        await place.mount("/m/16")


# -- buckets that fail -------------------------------------------------------------------------------------------------


@pytest_asyncio.fixture
async def fragile(s3: S3, tmp_path: Path) -> AsyncIterator[tuple[Place, Stalling]]:
    """A sandbox whose bucket can be made to go dead."""
    bucket = s3.create_bucket()
    async with stalling(s3.endpoint) as way:
        table = tmp_path / "buckets.toml"
        table.write_text(f"[test]\n{s3.table(bucket).replace(s3.endpoint, way.endpoint)}")
        table.chmod(0o600)
        registry = await open_registry(Settings(home=tmp_path / "home", buckets=table, mount_timeout=2.0))
        try:
            place = Place(registry, "fragile", registry.mounts.buckets.open("test").within("tests/fragile"))
            await place.mount()
            yield place, way
        finally:
            await registry.close()


async def test_a_bucket_that_stops_answering_gives_errors_and_no_hangs(fragile: tuple[Place, Stalling]) -> None:
    place, way = fragile
    await place.out("echo x > /persist/x; mkdir /persist/d")
    await asyncio.sleep(2)
    way.stall()
    began = time.monotonic()
    for command in ("ls /persist", "cat /persist/x", "echo y > /persist/y", "stat /persist/d/z"):
        result = await place.sh(command)
        assert result.exit_code != 0
        assert "Input/output error" in result.stderr or "timed out" in result.stderr
    assert time.monotonic() - began < 20
    mount = (await place.registry.mounts.list(place.id))[0]
    assert mount.error is not None
    way.flow()
    async with asyncio.timeout(20):
        while (await place.sh("cat /persist/x")).exit_code:
            await asyncio.sleep(0.2)
    assert await place.out("cat /persist/x; echo again > /persist/again") == "x\n"
    assert await place.bucket.get("again") == b"again\n"


async def test_a_file_that_could_not_be_saved_is_an_error_of_close_and_is_said(fragile: tuple[Place, Stalling]) -> None:
    place, way = fragile
    program = (
        "import os, sys\n"
        "fd = os.open('/persist/lost', os.O_CREAT | os.O_WRONLY)\n"
        "os.write(fd, b'data')\n"
        "print('ready', flush=True)\n"
        "sys.stdin.readline()\n"
        "try:\n"
        "    os.close(fd)\n"
        "except OSError as error:\n"
        "    print(type(error).__name__, error.errno)\n"
    )
    async with place.registry.use(place.id) as runtime:
        await runtime.files.write("/tmp/close.py", program.encode())
        await place.out(
            "mkfifo /tmp/go; (python3 /tmp/close.py < /tmp/go > /tmp/said; true) & exec 9>/tmp/go; sleep 0.5"
        )
        way.stall()
        await place.out("echo go >&9; wait", timeout=60_000)
    assert "Error" in await place.out("tail -1 /tmp/said")
    async with asyncio.timeout(30):
        while "upload_failed" not in await place.kinds():
            await asyncio.sleep(0.1)
    way.flow()


async def test_a_sandbox_on_a_dead_bucket_is_destroyed_all_the_same(fragile: tuple[Place, Stalling]) -> None:
    place, way = fragile
    await place.out("exec 3>/persist/open; echo x >&3; (while :; do ls /persist; done) >/dev/null 2>&1 &")
    way.stall()
    await asyncio.sleep(0.5)
    began = time.monotonic()
    await place.registry.destroy(place.id)
    assert time.monotonic() - began < 60
    assert mount_threads() == 0


async def test_a_bucket_that_is_dead_from_the_start_changes_nothing(fragile: tuple[Place, Stalling]) -> None:
    place, way = fragile
    way.stall()
    with pytest.raises(BucketUnreachableError):
        await place.mount("/second")
    assert [mount.mount_path for mount in await place.registry.mounts.list(place.id)] == ["/persist"]
    assert "second" not in await place.out("ls /")
    # Asleep and awake again without the bucket: the mount is there, and everything in it is an error.
    await place.registry.stop(place.id)
    assert (await place.sh("ls /persist")).exit_code != 0
    way.flow()


# -- mounts that cannot come back --------------------------------------------------------------------------------------


async def test_a_mount_whose_bucket_is_no_longer_configured_is_an_error_not_an_empty_directory(tmp_path: Path) -> None:
    table = tmp_path / "buckets.toml"
    table.write_text(f'[test]\nurl = "{(tmp_path / "objects").as_uri()}"\n')
    settings = Settings(home=tmp_path / "home", buckets=table)
    registry = await open_registry(settings)
    await registry.mounts.mount("box", MountBucket(bucket="test", prefix="/"))
    await registry.close()
    table.write_text("")
    registry = await open_registry(settings)
    try:
        box = Place(registry, "box", registry.mounts.buckets.open())
        for command in ("ls /persist", "echo x > /persist/x", "mkdir /persist/d"):
            result = await box.sh(command)
            assert result.exit_code != 0
            assert "Input/output error" in result.stderr
        mount = (await registry.mounts.list("box"))[0]
        assert mount.state == "failed"
        assert "There is no bucket 'test'" in str(mount.error)
        assert "mount_failed" in await box.kinds()
        await registry.mounts.unmount("box", "/persist")
        assert await box.out("ls -A /persist") == ""
    finally:
        await registry.close()


async def test_a_sandbox_whose_mount_point_was_taken_refuses_work_until_told_what_to_do(mounted: Place) -> None:
    await mounted.mount("/tmp/parent/point", readOnly=True)
    await mounted.out("mv /tmp/parent /tmp/elsewhere && echo mine > /tmp/parent")
    await mounted.registry.stop(mounted.id)
    before = await descriptors()
    with pytest.raises(SandboxStartError, match="could not be mounted at /tmp/parent/point again") as caught:
        await mounted.sh("true")
    assert "skerry unmount" in str(caught.value.hint)
    assert mount_threads() == 0
    assert await descriptors(at_most=before) <= before
    await mounted.registry.mounts.unmount(mounted.id, "/tmp/parent/point")
    assert await mounted.out("cat /tmp/parent; echo works > /persist/w") == "mine\n"


async def test_mounts_outlive_the_server(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "home")
    registry = await open_registry(settings)
    await registry.mounts.mount("box", MountBucket(local_bucket=True, read_only=True, mount_path="/a/b"))
    await registry.close()
    assert mount_threads() == 0
    registry = await open_registry(settings)
    try:
        (mount,) = await registry.mounts.list("box")
        assert (mount.mount_path, mount.read_only, mount.state) == ("/a/b", True, "asleep")
        box = Place(registry, "box", registry.mounts.buckets.open())
        assert "Read-only file system" in (await box.sh("touch /a/b/x")).stderr
    finally:
        await registry.close()
