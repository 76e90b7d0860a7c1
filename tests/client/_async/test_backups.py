"""Backups through the SDK. The sync tests are generated from these."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from skerry import (
    AsyncClient,
    AsyncSandbox,
    BackupEvent,
    BackupExpiredError,
    BackupNotFoundError,
    BucketNotFoundError,
    DangerousPathError,
    FileNotFoundInSandboxError,
    InvalidRequestError,
)


@pytest.fixture
async def client(home: Path) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(home=home) as client:
        yield client


@pytest.fixture
async def sandbox(client: AsyncClient) -> AsyncIterator[AsyncSandbox]:
    async with client.sandbox(f"backups-{secrets.token_hex(4)}", ephemeral=True) as sandbox:
        yield sandbox


async def test_a_backup_is_made_found_restored_and_deleted(client: AsyncClient, sandbox: AsyncSandbox) -> None:
    await sandbox.write_file("/workspace/src/app.py", "print(1)\n")
    await sandbox.write_file("/workspace/junk.log", "junk\n")
    backup = await sandbox.backup(name="nightly", ttl="1h", excludes=["*.log"])
    assert (backup.dir, backup.name, backup.sandbox_id, backup.bucket) == (
        "/workspace",
        "nightly",
        sandbox.id,
        "default",
    )
    assert backup.expires_at is not None
    assert backup.left_out == {"excluded": 1}
    assert (await client.list_backups(sandbox=sandbox.id)).backups == [backup]
    assert await client.get_backup(backup.id) == backup
    await sandbox.write_file("/workspace/src/app.py", "print(2)\n")
    done = await sandbox.restore(backup)
    assert (done.restored, done.dir, done.files, done.bytes) == (True, "/workspace", 3, 9)
    assert (await sandbox.read_file("/workspace/src/app.py")) == "print(1)\n"
    assert not await sandbox.exists("/workspace/junk.log")
    kinds = [event.kind for event in await sandbox.events()]
    assert "backed_up" in kinds
    assert "restored" in kinds
    await client.delete_backup(backup)
    assert (await client.list_backups(sandbox=sandbox.id)).backups == []
    with pytest.raises(BackupNotFoundError):
        await sandbox.restore(backup.id)


async def test_a_handle_restores_by_itself_in_another_sandbox(client: AsyncClient, sandbox: AsyncSandbox) -> None:
    await sandbox.write_file("/workspace/file", "1")
    handle = (await sandbox.backup()).model_dump(mode="json", by_alias=True)
    async with client.sandbox(f"backups-{secrets.token_hex(4)}", ephemeral=True) as other:
        await other.restore(handle)
        assert await other.read_file("/workspace/file") == "1"
        await other.restore(handle["id"], "/opt/elsewhere")
        assert await other.read_file("/opt/elsewhere/file") == "1"


async def test_progress_is_told(sandbox: AsyncSandbox) -> None:
    await sandbox.exec("head -c 120000000 /dev/zero >/workspace/zeros")
    made: list[BackupEvent] = []
    brought: list[BackupEvent] = []
    backup = await sandbox.backup(on_progress=made.append)
    await sandbox.restore(backup, on_progress=brought.append)
    assert made[0].type == brought[0].type == "start"
    assert made[0].id == backup.id
    assert brought[0].total == 120_000_000
    sizes = [event.bytes or 0 for event in brought]
    assert sizes == sorted(sizes)
    assert sizes[-1] > 0


async def test_mistakes_arrive_as_the_errors_they_are(client: AsyncClient, sandbox: AsyncSandbox) -> None:
    with pytest.raises(FileNotFoundInSandboxError):
        await sandbox.backup("/nothing/here")
    with pytest.raises(DangerousPathError):
        await sandbox.backup("/workspace/../etc")
    with pytest.raises(BucketNotFoundError, match="no bucket 'sea'; those that are configured are default"):
        await sandbox.backup(bucket="sea")
    with pytest.raises(InvalidRequestError, match="not a duration"):
        await sandbox.backup(ttl="soon")
    with pytest.raises(BackupNotFoundError):
        await sandbox.restore("../../etc/passwd")
    with pytest.raises(BackupNotFoundError):
        await client.delete_backup("nothing")
    backup = await sandbox.backup(ttl=0.001)
    with pytest.raises(BackupExpiredError):
        await sandbox.restore(backup)


async def test_the_buckets_are_listed(client: AsyncClient) -> None:
    (bucket,) = await client.buckets()
    assert (bucket.name, bucket.kind, bucket.default) == ("default", "directory", True)
