"""Who has stored how much, since when; over the embedded API, as a user has it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from skerry import Client, NotFoundError, embedded
from skerry.control.open import open_registry
from skerry.control.registry import Registry
from skerry.models import CreateSandbox, SleepSandbox, SyncRequest
from skerry.settings import Settings


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    home = tmp_path / "home"
    with Client(home=home) as client:
        yield client
    embedded._servers.pop(home).close()


def test_a_workspace_is_synced_on_demand_and_accounted_for(client: Client) -> None:
    one = client.sandbox("one", labels={"owner": "ada"})
    one.write_file("/workspace/a.txt", "12345")
    with pytest.raises(NotFoundError, match="never synced"):
        one.stored_workspace()
    done = one.sync()
    assert (done.ok, done.synced_files, done.skipped_files, done.total_size) == (True, 1, 0, 5)
    assert one.sync().skipped_files == 1
    client.sandbox("two", labels={"owner": "ada"}).write_file("/workspace/b", "123")
    client.sandbox("two").sync()
    client.sandbox("three").write_file("/workspace/c", "1")
    client.sandbox("three").sync()
    found = client.list_workspaces()
    assert [(w.sandbox_id, w.owner, w.files, w.size) for w in found.workspaces] == [
        ("one", "ada", 1, 5),
        ("three", "default", 1, 1),
        ("two", "ada", 1, 3),
    ]
    assert found.owners == {"ada": 8, "default": 1}
    assert one.stored_workspace().workspace_synced_at >= done.workspace_synced_at
    # It outlives its sandbox, and a new one gets it back.
    one.destroy()
    again = client.sandbox("one")
    assert again.sync("pull").synced_files == 1
    assert again.read_file("/workspace/a.txt").content == "12345"
    assert client.delete_workspace("one") == 1
    assert client.list_workspaces().owners == {"ada": 3, "default": 1}
    assert again.sync("pull").synced_files == 0


def test_patterns_leave_out_more_and_everything_is_everything(client: Client) -> None:
    sandbox = client.sandbox("one")
    for path in ("keep", "node_modules/m", "skip.log", "src/skip.log"):
        sandbox.write_file(f"/workspace/{path}", "x")
    assert sandbox.sync(excludes=["*.log"], dry_run=True).synced_files == 1
    assert sandbox.sync(everything=True).synced_files == 4


async def test_a_workspace_is_synced_before_it_sleeps_if_that_is_wished(tmp_path: Path) -> None:
    registry = await open_registry(Settings(home=tmp_path / "home", sync_on_hibernate=True))
    try:
        async with registry.use("one") as runtime:
            await runtime.files.write("/workspace/f", b"kept")
        await registry.sleep("one", SleepSandbox(grace=1))
        assert (await registry.workspaces.get("one")).files == 1
        async with registry.use("two") as runtime:
            await runtime.files.write("/workspace/f", b"kept")
    finally:
        await registry.close()  # which puts what is awake to sleep
    assert (tmp_path / "home/buckets/default/workspaces/two/f").read_bytes() == b"kept"


async def test_two_syncs_of_one_sandbox_take_turns(registry: Registry) -> None:
    await registry.create(CreateSandbox(id="one"))
    async with registry.use("one") as runtime:
        for number in range(20):
            await runtime.files.write(f"/workspace/f{number}", b"x")
        results = await asyncio.gather(*(registry.workspaces.sync(runtime, "one", SyncRequest()) for _ in range(3)))
    assert sorted(result.synced_files for result in results) == [0, 0, 20]
    assert "skerry_r2_sync_duration_seconds_count 3.0" in registry.metrics.text({}).decode()
    assert 'skerry_r2_storage_bytes{owner="default"} 20.0' in registry.metrics.text({}).decode()
    kinds = [event.kind for event in await registry.events("one")]
    assert kinds.count("synced") == 3
