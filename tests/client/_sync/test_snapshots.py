# Generated from tests/client/_async/test_snapshots.py by scripts/generate_sync.py; change that file and run it again.
"""Snapshots through the SDK. The sync tests are generated from these."""

from __future__ import annotations

import secrets
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from skerry import Client, Sandbox, SandboxExistsError, SnapshotInUseError, SnapshotNotFoundError, State


@pytest.fixture
def sandbox(home: Path) -> Iterator[Sandbox]:
    with Sandbox(f"layers-{secrets.token_hex(4)}", home=home) as sandbox:
        yield sandbox
        sandbox.destroy()


def test_snapshot_change_and_roll_back(sandbox: Sandbox) -> None:
    sandbox.write_file("f", "one")
    taken = sandbox.snapshot(labels={"why": "test"})
    sandbox.write_file("f", "two")
    assert [change.path for change in sandbox.diff(taken)] == ["/workspace/f"]
    assert (sandbox.rollback(taken)).state is State.HIBERNATED
    assert (sandbox.read_file("f")).content == "one"
    assert sandbox.diff(taken.id) == []
    assert [one.id for one in sandbox.list_snapshots()] == [taken.id]
    sandbox.delete_snapshot(taken)
    assert sandbox.list_snapshots() == []
    with pytest.raises(SnapshotNotFoundError):
        sandbox.rollback(taken)


def test_a_sandbox_from_a_snapshot(sandbox: Sandbox, home: Path) -> None:
    sandbox.write_file("f", "one")
    name = f"of-{sandbox.id}"
    sandbox.snapshot(name)
    with Sandbox.from_snapshot(name, f"{sandbox.id}-b", home=home, env={"A": "1"}) as other:
        assert (other.exec("cat f; echo $A")).stdout == "one1\n"
        with pytest.raises(SandboxExistsError):
            Sandbox.from_snapshot(name, other.id, home=home)
        with pytest.raises(SnapshotInUseError):
            sandbox.delete_snapshot(name)
        other.destroy()
    sandbox.delete_snapshot(name)


def test_forks_go_their_own_ways(sandbox: Sandbox) -> None:
    sandbox.write_file("f", "common")
    one, two = sandbox.fork(2)
    (named,) = sandbox.fork(ids=[f"{sandbox.id}-named"])
    assert named.id == f"{sandbox.id}-named"
    one.write_file("f", "changed")
    assert [(each.read_file("f")).content for each in (sandbox, one, two, named)] == [
        "common",
        "changed",
        "common",
        "common",
    ]
    for each in (one, two, named):
        each.destroy()


def test_a_client_knows_all_snapshots(sandbox: Sandbox, home: Path, tmp_path: Path) -> None:
    sandbox.write_file("f", "one")
    first = sandbox.snapshot()
    sandbox.exec("rm f; echo two >g")
    second = sandbox.snapshot()
    with Client(home=home) as client:
        assert {first.id, second.id} <= {one.id for one in client.list_snapshots()}
        assert client.get_snapshot(first) == first
        changes = {change.path: str(change.change) for change in client.diff(first, second)}
        assert changes == {"/workspace/f": "deleted", "/workspace/g": "added"}
        assert client.download_diff(tmp_path / "layer.tar", first, second) > 0
        with tarfile.open(tmp_path / "layer.tar") as tar:
            assert sorted(tar.getnames()) == ["workspace/.wh.f", "workspace/g"]
        client.delete_snapshot(first)
        client.delete_snapshot(second.id)
    assert sandbox.download_diff(tmp_path / "all.tar") > 0
