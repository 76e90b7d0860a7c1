"""A copy of a sandbox's files that is made in the middle of a restore is put right before anybody sees it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from skerry.control.open import open_registry
from skerry.control.registry import Registry
from skerry.models import (
    BackupRequest,
    CreateSandbox,
    CreateSnapshot,
    ExecRequest,
    ForkSandbox,
    RestoreRequest,
    RollbackSandbox,
)
from skerry.settings import Settings
from skerry.storage import archive
from skerry.storage.archive import Staging

FILES = 300
FILL = f"for n in $(seq {FILES}); do echo {{}} >$n; done"
LOOK = "sort -u * && ls -A | wc -l && ls -A / | grep skerry-restore || true"


@pytest_asyncio.fixture(scope="module")
async def registry(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Registry]:
    registry = await open_registry(Settings(home=tmp_path_factory.mktemp("restores")))
    yield registry
    await registry.close()


async def sh(registry: Registry, id: str, command: str) -> str:
    async with registry.use(id) as runtime:
        result = await runtime.exec(ExecRequest(command=command, session=None))
        assert result.exit_code == 0, result
        return result.stdout


async def backed_up(registry: Registry, id: str) -> str:
    """A sandbox whose files all say old, and a backup of it in which they say new."""
    await sh(registry, id, FILL.format("new"))
    async with registry.use(id) as runtime:
        backup = (await registry.backups.backup(runtime, id, BackupRequest())).backup
    await sh(registry, id, FILL.format("old"))
    return backup.id


@asynccontextmanager
async def restoring(registry: Registry, id: str, backup: str) -> AsyncIterator[None]:
    async def restore() -> None:
        async with registry.use(id) as runtime:
            await registry.backups.restore(runtime, id, RestoreRequest(backup=backup))

    task = asyncio.create_task(restore())
    try:
        yield
    finally:
        await task


class Halt:
    """Restores wait here when all is unpacked and nothing is in its place."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.go_on = asyncio.Event(), asyncio.Event()
        swap = Staging.swap

        async def halted(staging: Staging) -> None:
            self.reached.set()
            await self.go_on.wait()
            await swap(staging)

        monkeypatch.setattr(archive.Staging, "swap", halted)


async def test_whatever_is_made_of_a_sandbox_during_a_restore_holds_nothing_of_it(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    backup = await backed_up(registry, "source")
    halt = Halt(monkeypatch)
    async with restoring(registry, "source", backup):
        await halt.reached.wait()
        assert "skerry-restore" in await sh(registry, "source", "ls -A /")
        taken = await registry.snapshots.create("source", CreateSnapshot(name="meanwhile"))
        await registry.snapshots.fork("source", ForkSandbox(ids=["forked"]))
        # One that has not been started yet is forked again.
        await registry.snapshots.fork("forked", ForkSandbox(ids=["twice"]))
        halt.go_on.set()
    await registry.create(CreateSandbox(id="made", snapshot=taken.id))
    await registry.create(CreateSandbox(id="passing", snapshot=taken.id, ephemeral=True))
    assert await sh(registry, "source", LOOK) == f"new\n{FILES}\n"
    await registry.snapshots.rollback("source", RollbackSandbox(snapshot=taken.id))
    for id in ("source", "forked", "twice", "made", "passing"):
        assert await sh(registry, id, LOOK) == f"old\n{FILES}\n", id
        assert "restore_undone" in [event.kind for event in await registry.events(id)]
    await registry.stop("passing")
    assert await sh(registry, "passing", LOOK) == f"old\n{FILES}\n"
    assert list((registry.settings.home / "restores").iterdir()) == []


async def test_a_copy_made_while_things_change_places_is_all_old_or_all_new(registry: Registry) -> None:
    backup = await backed_up(registry, "swapped")
    taken: list[Any] = []
    async with restoring(registry, "swapped", backup):
        home = registry.settings.home / "restores"
        while not (home.is_dir() and list(home.glob("swapped.*"))):
            await asyncio.sleep(0)
        while list(home.glob("swapped.*")):
            taken.append(await registry.snapshots.create("swapped", CreateSnapshot()))
    assert taken
    seen = set()
    for number, snapshot in enumerate(taken[-8:]):
        await registry.create(CreateSandbox(id=f"copy-{number}", snapshot=snapshot.id))
        seen.add(await sh(registry, f"copy-{number}", LOOK))
        await registry.destroy(f"copy-{number}")
    assert seen <= {f"old\n{FILES}\n", f"new\n{FILES}\n"}
    assert list(home.iterdir()) == []


async def test_what_is_on_record_for_a_sandbox_that_never_came_to_be_is_forgotten(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "home")
    registry = await open_registry(settings)
    await sh(registry, "there", "true")
    for id in ("there", "never-was"):
        registry.backups.restores.inherit(id, [{"target": "/workspace", "places": {"": "/.skerry-restore-0"}}])
    await registry.close()
    again = await open_registry(settings)
    try:
        assert [name.partition(".")[0] for name, _ in again.backups.restores._records.left()] == ["there"]
        await sh(again, "there", "true")
        assert again.backups.restores.left("there") == []
    finally:
        await again.close()
