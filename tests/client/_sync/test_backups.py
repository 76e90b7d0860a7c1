# Generated from tests/client/_async/test_backups.py by scripts/generate_sync.py; change that file and run it again.
"""Backups through the SDK. The sync tests are generated from these."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from skerry import (
    BackupEvent,
    BackupExpiredError,
    BackupNotFoundError,
    BucketNotFoundError,
    Client,
    DangerousPathError,
    FileNotFoundInSandboxError,
    InvalidRequestError,
    Sandbox,
)


@pytest.fixture
def client(home: Path) -> Iterator[Client]:
    with Client(home=home) as client:
        yield client


@pytest.fixture
def sandbox(client: Client) -> Iterator[Sandbox]:
    with client.sandbox(f"backups-{secrets.token_hex(4)}", ephemeral=True) as sandbox:
        yield sandbox


def test_a_backup_is_made_found_restored_and_deleted(client: Client, sandbox: Sandbox) -> None:
    sandbox.write_file("/workspace/src/app.py", "print(1)\n")
    sandbox.write_file("/workspace/junk.log", "junk\n")
    backup = sandbox.backup(name="nightly", ttl="1h", excludes=["*.log"])
    assert (backup.dir, backup.name, backup.sandbox_id, backup.bucket) == (
        "/workspace",
        "nightly",
        sandbox.id,
        "default",
    )
    assert backup.expires_at is not None
    assert backup.left_out == {"excluded": 1}
    assert (client.list_backups(sandbox=sandbox.id)).backups == [backup]
    assert client.get_backup(backup.id) == backup
    sandbox.write_file("/workspace/src/app.py", "print(2)\n")
    done = sandbox.restore(backup)
    assert (done.restored, done.dir, done.files, done.bytes) == (True, "/workspace", 3, 9)
    assert (sandbox.read_file("/workspace/src/app.py")) == "print(1)\n"
    assert not sandbox.exists("/workspace/junk.log")
    kinds = [event.kind for event in sandbox.events()]
    assert "backed_up" in kinds
    assert "restored" in kinds
    client.delete_backup(backup)
    assert (client.list_backups(sandbox=sandbox.id)).backups == []
    with pytest.raises(BackupNotFoundError):
        sandbox.restore(backup.id)


def test_a_handle_restores_by_itself_in_another_sandbox(client: Client, sandbox: Sandbox) -> None:
    sandbox.write_file("/workspace/file", "1")
    handle = (sandbox.backup()).model_dump(mode="json", by_alias=True)
    with client.sandbox(f"backups-{secrets.token_hex(4)}", ephemeral=True) as other:
        other.restore(handle)
        assert other.read_file("/workspace/file") == "1"
        other.restore(handle["id"], "/opt/elsewhere")
        assert other.read_file("/opt/elsewhere/file") == "1"


def test_progress_is_told(sandbox: Sandbox) -> None:
    sandbox.exec("head -c 120000000 /dev/zero >/workspace/zeros")
    made: list[BackupEvent] = []
    brought: list[BackupEvent] = []
    backup = sandbox.backup(on_progress=made.append)
    sandbox.restore(backup, on_progress=brought.append)
    assert made[0].type == brought[0].type == "start"
    assert made[0].id == backup.id
    assert brought[0].total == 120_000_000
    sizes = [event.bytes or 0 for event in brought]
    assert sizes == sorted(sizes)
    assert sizes[-1] > 0


def test_mistakes_arrive_as_the_errors_they_are(client: Client, sandbox: Sandbox) -> None:
    with pytest.raises(FileNotFoundInSandboxError):
        sandbox.backup("/nothing/here")
    with pytest.raises(DangerousPathError):
        sandbox.backup("/workspace/../etc")
    with pytest.raises(BucketNotFoundError, match="no bucket 'sea'; those that are configured are default"):
        sandbox.backup(bucket="sea")
    with pytest.raises(InvalidRequestError, match="not a duration"):
        sandbox.backup(ttl="soon")
    with pytest.raises(BackupNotFoundError):
        sandbox.restore("../../etc/passwd")
    with pytest.raises(BackupNotFoundError):
        client.delete_backup("nothing")
    backup = sandbox.backup(ttl=0.001)
    with pytest.raises(BackupExpiredError):
        sandbox.restore(backup)


def test_the_buckets_are_listed(client: Client) -> None:
    (bucket,) = client.buckets()
    assert (bucket.name, bucket.kind, bucket.default) == ("default", "directory", True)
