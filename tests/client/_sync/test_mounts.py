# Generated from tests/client/_async/test_mounts.py by scripts/generate_sync.py; change that file and run it again.
"""Mounted buckets through the SDK. The sync tests are generated from these."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from skerry import (
    BootstrapEvent,
    BucketNotFoundError,
    ConflictError,
    DirectoryNotEmptyError,
    MountExistsError,
    MountNotFoundError,
    Sandbox,
    SetupFailedError,
    State,
)


@pytest.fixture
def sandbox(home: Path) -> Iterator[Sandbox]:
    with Sandbox(f"mounts-{secrets.token_hex(4)}", home=home) as sandbox:
        yield sandbox
        sandbox.destroy()


def test_a_bucket_is_mounted_listed_and_unmounted(sandbox: Sandbox, home: Path) -> None:
    mount = sandbox.mount_bucket("default")
    assert (mount.mount_path, mount.prefix, mount.mode) == ("/persist", f"/projects/{sandbox.id}/", "localBucket")
    assert (mount.bucket, mount.read_only, mount.state, mount.error) == ("default", False, "mounted", None)
    assert sandbox.list_mounts() == [mount]
    sandbox.exec("echo kept > /persist/file")
    assert (home / "buckets" / "default" / "projects" / sandbox.id / "file").read_text() == "kept\n"
    sandbox.stop()
    assert [one.state for one in sandbox.list_mounts()] == ["asleep"]
    assert (sandbox.info()).state is State.HIBERNATED
    assert (sandbox.exec("cat /persist/file")).stdout == "kept\n"
    assert (sandbox.unmount_bucket()).mount_path == "/persist"
    assert sandbox.list_mounts() == []
    with pytest.raises(MountNotFoundError):
        sandbox.unmount_bucket()


def test_parts_of_a_bucket_are_mounted_side_by_side(sandbox: Sandbox) -> None:
    sandbox.mount_bucket("default", "/data/in", "shared/in", read_only=True)
    sandbox.mount_bucket(path="/data/out", prefix="/shared/out/", local_bucket=True)
    assert [(one.mount_path, one.prefix, one.read_only) for one in sandbox.list_mounts()] == [
        ("/data/in", "/shared/in/", True),
        ("/data/out", "/shared/out/", False),
    ]
    assert not (sandbox.exec("touch /data/in/x")).success
    assert (sandbox.exec("touch /data/out/x")).success
    with pytest.raises(MountExistsError):
        sandbox.mount_bucket("default", "/data/out/deeper")
    with pytest.raises(BucketNotFoundError):
        sandbox.mount_bucket("unknown", "/elsewhere")
    sandbox.write_file("/full/file", "here")
    with pytest.raises(DirectoryNotEmptyError):
        sandbox.mount_bucket("default", "/full")


def test_a_sandbox_that_does_not_exist_has_no_mounts(home: Path) -> None:
    with Sandbox("never-made", home=home) as sandbox:
        assert sandbox.list_mounts() == []


def test_a_sandbox_is_bootstrapped(sandbox: Sandbox) -> None:
    commit = "git -C /srv/origin -c user.name=n -c user.email=n@x commit -qm one --allow-empty"
    sandbox.exec(f"git init -q /srv/origin && {commit}")
    seen: list[BootstrapEvent] = []
    done = sandbox.bootstrap("/srv/origin", setup=["echo ready"], local_bucket=True, on_event=seen.append)
    assert [step.type for step in done.steps] == ["mountBucket", "gitCheckout", "exec", "writeFile"]
    assert [event.step for event in seen if event.type == "step"] == done.steps
    assert done.steps[2].stdout == "ready\n"
    again = sandbox.bootstrap("/srv/origin", setup=["echo ready"], local_bucket=True)
    assert not any(step.changed for step in again.steps)
    with pytest.raises(SetupFailedError) as caught:
        sandbox.bootstrap(setup=["echo no >&2; false"])
    assert caught.value.details["failed"]["stderr"] == "no\n"
    with pytest.raises(ConflictError):
        sandbox.bootstrap("/srv/another")
