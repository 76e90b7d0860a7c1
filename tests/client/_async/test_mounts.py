"""Mounted buckets through the SDK. The sync tests are generated from these."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from skerry import (
    AsyncSandbox,
    BootstrapEvent,
    BucketNotFoundError,
    ConflictError,
    DirectoryNotEmptyError,
    MountExistsError,
    MountNotFoundError,
    SetupFailedError,
    State,
)


@pytest.fixture
async def sandbox(home: Path) -> AsyncIterator[AsyncSandbox]:
    async with AsyncSandbox(f"mounts-{secrets.token_hex(4)}", home=home) as sandbox:
        yield sandbox
        await sandbox.destroy()


async def test_a_bucket_is_mounted_listed_and_unmounted(sandbox: AsyncSandbox, home: Path) -> None:
    mount = await sandbox.mount_bucket("default")
    assert (mount.mount_path, mount.prefix, mount.mode) == ("/persist", f"/projects/{sandbox.id}/", "localBucket")
    assert (mount.bucket, mount.read_only, mount.state, mount.error) == ("default", False, "mounted", None)
    assert await sandbox.list_mounts() == [mount]
    await sandbox.exec("echo kept > /persist/file")
    assert (home / "buckets" / "default" / "projects" / sandbox.id / "file").read_text() == "kept\n"
    await sandbox.stop()
    assert [one.state for one in await sandbox.list_mounts()] == ["asleep"]
    assert (await sandbox.info()).state is State.HIBERNATED
    assert (await sandbox.exec("cat /persist/file")).stdout == "kept\n"
    assert (await sandbox.unmount_bucket()).mount_path == "/persist"
    assert await sandbox.list_mounts() == []
    with pytest.raises(MountNotFoundError):
        await sandbox.unmount_bucket()


async def test_parts_of_a_bucket_are_mounted_side_by_side(sandbox: AsyncSandbox) -> None:
    await sandbox.mount_bucket("default", "/data/in", "shared/in", read_only=True)
    await sandbox.mount_bucket(path="/data/out", prefix="/shared/out/", local_bucket=True)
    assert [(one.mount_path, one.prefix, one.read_only) for one in await sandbox.list_mounts()] == [
        ("/data/in", "/shared/in/", True),
        ("/data/out", "/shared/out/", False),
    ]
    assert not (await sandbox.exec("touch /data/in/x")).success
    assert (await sandbox.exec("touch /data/out/x")).success
    with pytest.raises(MountExistsError):
        await sandbox.mount_bucket("default", "/data/out/deeper")
    with pytest.raises(BucketNotFoundError):
        await sandbox.mount_bucket("unknown", "/elsewhere")
    await sandbox.write_file("/full/file", "here")
    with pytest.raises(DirectoryNotEmptyError):
        await sandbox.mount_bucket("default", "/full")


async def test_a_sandbox_that_does_not_exist_has_no_mounts(home: Path) -> None:
    async with AsyncSandbox("never-made", home=home) as sandbox:
        assert await sandbox.list_mounts() == []


async def test_a_sandbox_is_bootstrapped(sandbox: AsyncSandbox) -> None:
    commit = "git -C /srv/origin -c user.name=n -c user.email=n@x commit -qm one --allow-empty"
    await sandbox.exec(f"git init -q /srv/origin && {commit}")
    seen: list[BootstrapEvent] = []
    done = await sandbox.bootstrap("/srv/origin", setup=["echo ready"], local_bucket=True, on_event=seen.append)
    assert [step.type for step in done.steps] == ["mountBucket", "gitCheckout", "exec", "writeFile"]
    assert [event.step for event in seen if event.type == "step"] == done.steps
    assert done.steps[2].stdout == "ready\n"
    again = await sandbox.bootstrap("/srv/origin", setup=["echo ready"], local_bucket=True)
    assert not any(step.changed for step in again.steps)
    with pytest.raises(SetupFailedError) as caught:
        await sandbox.bootstrap(setup=["echo no >&2; false"])
    assert caught.value.details["failed"]["stderr"] == "no\n"
    with pytest.raises(ConflictError):
        await sandbox.bootstrap("/srv/another")
