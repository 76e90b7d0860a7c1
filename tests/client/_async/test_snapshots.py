"""Snapshots through the SDK. The sync tests are generated from these."""

from __future__ import annotations

import secrets
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from skerry import AsyncClient, AsyncSandbox, SandboxExistsError, SnapshotInUseError, SnapshotNotFoundError, State


@pytest.fixture
async def sandbox(home: Path) -> AsyncIterator[AsyncSandbox]:
    async with AsyncSandbox(f"layers-{secrets.token_hex(4)}", home=home) as sandbox:
        yield sandbox
        await sandbox.destroy()


async def test_snapshot_change_and_roll_back(sandbox: AsyncSandbox) -> None:
    await sandbox.write_file("f", "one")
    taken = await sandbox.snapshot(labels={"why": "test"})
    await sandbox.write_file("f", "two")
    assert [change.path for change in await sandbox.diff(taken)] == ["/workspace/f"]
    assert (await sandbox.rollback(taken)).state is State.HIBERNATED
    assert (await sandbox.read_file("f")).content == "one"
    assert await sandbox.diff(taken.id) == []
    assert [one.id for one in await sandbox.list_snapshots()] == [taken.id]
    await sandbox.delete_snapshot(taken)
    assert await sandbox.list_snapshots() == []
    with pytest.raises(SnapshotNotFoundError):
        await sandbox.rollback(taken)


async def test_a_sandbox_from_a_snapshot(sandbox: AsyncSandbox, home: Path) -> None:
    await sandbox.write_file("f", "one")
    name = f"of-{sandbox.id}"
    await sandbox.snapshot(name)
    async with await AsyncSandbox.from_snapshot(name, f"{sandbox.id}-b", home=home, env={"A": "1"}) as other:
        assert (await other.exec("cat f; echo $A")).stdout == "one1\n"
        with pytest.raises(SandboxExistsError):
            await AsyncSandbox.from_snapshot(name, other.id, home=home)
        with pytest.raises(SnapshotInUseError):
            await sandbox.delete_snapshot(name)
        await other.destroy()
    await sandbox.delete_snapshot(name)


async def test_forks_go_their_own_ways(sandbox: AsyncSandbox) -> None:
    await sandbox.write_file("f", "common")
    one, two = await sandbox.fork(2)
    (named,) = await sandbox.fork(ids=[f"{sandbox.id}-named"])
    assert named.id == f"{sandbox.id}-named"
    await one.write_file("f", "changed")
    assert [(await each.read_file("f")).content for each in (sandbox, one, two, named)] == [
        "common",
        "changed",
        "common",
        "common",
    ]
    for each in (one, two, named):
        await each.destroy()


async def test_a_client_knows_all_snapshots(sandbox: AsyncSandbox, home: Path, tmp_path: Path) -> None:
    await sandbox.write_file("f", "one")
    first = await sandbox.snapshot()
    await sandbox.exec("rm f; echo two >g")
    second = await sandbox.snapshot()
    async with AsyncClient(home=home) as client:
        assert {first.id, second.id} <= {one.id for one in await client.list_snapshots()}
        assert await client.get_snapshot(first) == first
        changes = {change.path: str(change.change) for change in await client.diff(first, second)}
        assert changes == {"/workspace/f": "deleted", "/workspace/g": "added"}
        assert await client.download_diff(tmp_path / "layer.tar", first, second) > 0
        with tarfile.open(tmp_path / "layer.tar") as tar:
            assert sorted(tar.getnames()) == ["workspace/.wh.f", "workspace/g"]
        await client.delete_snapshot(first)
        await client.delete_snapshot(second.id)
    assert await sandbox.download_diff(tmp_path / "all.tar") > 0
