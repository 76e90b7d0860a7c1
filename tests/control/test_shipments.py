"""A sandbox that one server put into a bucket is woken by another, once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from skerry.control.open import open_registry
from skerry.control.registry import Registry
from skerry.errors import (
    BackupKeyError,
    BucketError,
    ConflictError,
    FilesMissingError,
    SandboxNotFoundError,
    SkerryError,
)
from skerry.models import CreateSandbox, ExecRequest, SleepSandbox, WakeSandbox
from skerry.settings import Settings
from tests.postgres import Postgres, postgres
from tests.s3 import bucket_table

__all__ = ["postgres"]

Open = Callable[..., Awaitable[Registry]]
SHIP = SleepSandbox(grace=1, ship=True, bucket="test")
WAKE = WakeSandbox(bucket="test")


@pytest.fixture
async def server(bucket_kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Open]:
    table = bucket_table(bucket_kind, tmp_path, request)
    opened: list[Registry] = []

    async def server(name: str, **settings: object) -> Registry:
        registry = await open_registry(Settings(home=tmp_path / name, buckets=table, **settings))  # type: ignore[arg-type]
        opened.append(registry)
        return registry

    yield server
    for registry in opened:
        await registry.close()


async def sh(registry: Registry, command: str, id: str = "demo") -> str:
    async with registry.use(id) as runtime:
        result = await runtime.exec(ExecRequest(command=command))
        assert result.exit_code == 0, result.stderr
        return result.stdout


async def test_another_server_wakes_it_with_all_its_files(server: Open) -> None:
    one, other = await server("one"), await server("other")
    await one.create(CreateSandbox(id="demo", env={"TIDE": "low"}, labels={"owner": "ada"}, sleep_after="1h"))
    await sh(
        one,
        "cd /workspace; echo kept > f; chmod 640 f; mkdir -p /opt/tool; echo t > /opt/tool/x; echo e >> /etc/motd",
    )
    await one.sleep("demo", SHIP)
    info = await other.wake("demo", WAKE)
    assert (info.state, info.labels, info.sleep_after) == ("active", {"owner": "ada"}, 3600)
    assert await sh(other, "cat /workspace/f /opt/tool/x; tail -1 /etc/motd; echo $TIDE; stat -c %a /workspace/f") == (
        "kept\nt\ne\nlow\n640\n"
    )
    with pytest.raises(ConflictError, match="another server has woken it"):
        await sh(one, "true")
    await one.destroy("demo")
    assert await sh(other, "cat /workspace/f") == "kept\n"
    # Nothing of it is left in the bucket but the marks.
    assert (await other.backups.list()).backups == []
    kinds = [event.kind for event in await other.events("demo")]
    assert kinds[0] == "arrived"


async def test_the_server_that_shipped_it_wakes_it_from_its_own_files(server: Open) -> None:
    one, other = await server("one"), await server("other")
    await sh(one, "echo kept > /workspace/f; echo here > /tmp/g")
    await one.sleep("demo", SHIP)
    assert await sh(one, "cat /workspace/f /tmp/g") == "kept\nhere\n"
    with pytest.raises(SandboxNotFoundError):
        await other.wake("demo", WAKE)
    await one.sleep("demo", SHIP)
    await one.sleep("demo", SHIP)  # again, while it lies there
    assert len((await one.backups.list()).backups) == 1
    await other.wake("demo", WAKE)
    assert await sh(other, "cat /workspace/f") == "kept\n"


async def test_what_a_restore_that_was_cut_off_had_moved_is_back_before_it_is_shipped(server: Open) -> None:
    one, other = await server("one"), await server("other")
    staged = "/.skerry-restore-0123456789ab"
    log = json.dumps({"move": ["/workspace/f", f"{staged}/old/f"]})
    await sh(one, f"echo kept >f; mkdir -p {staged}/new {staged}/old; mv f {staged}/old/f; echo '{log}' >{staged}/log")
    one.backups.restores.inherit("demo", [{"target": "/workspace", "places": {"": staged}}])
    await one.sleep("demo", SHIP)
    await other.wake("demo", WAKE)
    assert await sh(other, "cat f; ls -A / | grep skerry-restore || true") == "kept\n"
    assert "backup_deleted" not in [event.kind for event in await other.events("demo")]


async def test_one_whose_files_are_missing_is_not_shipped(server: Open) -> None:
    one = await server("one")
    await sh(one, "echo kept >f")
    await one.stop("demo")
    await one.provider.forget("demo")
    with pytest.raises(FilesMissingError):
        await one.sleep("demo", SHIP)
    assert (await one.backups.list()).backups == []


async def test_of_several_who_ask_at_once_one_wakes_it(server: Open) -> None:
    one = await server("one")
    others = [await server(f"other-{number}") for number in range(3)]
    await sh(one, "echo kept > /workspace/f")
    await one.sleep("demo", SHIP)
    asked = (*(other.wake("demo", WAKE) for other in others), one.wake("demo"))
    results = await asyncio.gather(*asked, return_exceptions=True)
    woken = [
        registry
        for registry, result in zip((*others, one), results, strict=True)
        if not isinstance(result, BaseException)
    ]
    assert len(woken) == 1
    assert all(
        isinstance(result, ConflictError | SandboxNotFoundError)
        for result in results
        if isinstance(result, BaseException)
    )
    assert await sh(woken[0], "cat /workspace/f") == "kept\n"


async def test_files_that_cannot_be_brought_leave_no_empty_sandbox(server: Open) -> None:
    one, other = await server("one"), await server("other")
    await sh(one, "head -c 3000000 /dev/urandom > /workspace/f; sha256sum /workspace/f > /workspace/sum")
    await one.sleep("demo", SHIP)
    place = other.backups.bucket("test")
    (part,) = [item.key async for item in place.list("backups") if item.key.endswith(".tar")]
    content = await place.get(part)
    await place.put(part, content[:-100] + bytes(100))
    with pytest.raises(SkerryError):
        await other.wake("demo", WAKE)
    with pytest.raises(SandboxNotFoundError):
        await other.get("demo")
    assert not await other.provider.exists("demo")
    # The mark was taken back: it can be tried again.
    await place.put(part, content)
    await other.wake("demo", WAKE)
    assert "OK" in await sh(other, "sha256sum -c /workspace/sum")


async def test_with_a_key_nobody_else_reads_or_wakes_it(server: Open) -> None:
    key = "ab" * 32
    one, other = await server("one", backup_key=key), await server("other", backup_key=key)
    stranger = await server("stranger")
    await one.create(CreateSandbox(id="demo", env={"TOKEN": "most-secret"}))
    await sh(one, "true")
    await one.sleep("demo", SHIP)
    place = stranger.backups.bucket("test")
    async for item in place.list():
        assert b"most-secret" not in await place.get(item.key)
    with pytest.raises(BackupKeyError):
        await stranger.wake("demo", WAKE)
    await other.wake("demo", WAKE)
    assert await sh(other, "echo $TOKEN") == "most-secret\n"


async def test_every_sandbox_that_hibernates_is_shipped_if_that_is_set(server: Open) -> None:
    one = await server("one", ship_to="test")
    await sh(one, "echo kept > /workspace/f")
    await one.close()  # which puts it to sleep
    other = await server("other", ship_to="test")
    await other.wake("demo")
    assert await sh(other, "cat /workspace/f") == "kept\n"


async def test_servers_that_share_a_store_wake_each_others_with_any_request(server: Open, postgres: Postgres) -> None:
    url = postgres.create_database()
    where = {"region": "eu-central-1", "public_url": "https://eu.skerry.example.com"}
    one, other = await server("one", database_url=url, **where), await server("other", database_url=url)
    await sh(one, "echo kept > /workspace/f")
    with pytest.raises(ConflictError, match="lives on another server in eu-central-1") as refused:
        await sh(other, "true")
    assert refused.value.details == {"node": one.node, "region": where["region"], "url": where["public_url"]}
    assert "https://eu.skerry.example.com" in (refused.value.hint or "")
    await one.sleep("demo", SHIP)
    assert await asyncio.gather(*(sh(other, "cat /workspace/f") for _ in range(5))) == ["kept\n"] * 5
    with pytest.raises(ConflictError) as refused:
        await sh(one, "true")
    assert refused.value.details == {"node": other.node}, "it has not said where it is"


async def test_a_sandbox_that_is_destroyed_leaves_nothing_in_the_bucket(server: Open) -> None:
    one = await server("one")
    await sh(one, "true")
    await one.sleep("demo", SHIP)
    await one.destroy("demo")
    assert [item.key async for item in one.backups.bucket("test").list()] == []


async def test_a_bucket_that_fails_leaves_it_asleep_and_whole(server: Open) -> None:
    one = await server("one")
    await sh(one, "echo kept > /workspace/f")
    with pytest.raises((BucketError, SkerryError), match="no bucket"):
        await one.sleep("demo", SleepSandbox(grace=1, ship=True, bucket="nowhere"))
    assert (await one.get("demo")).state == "hibernated"
    assert await sh(one, "cat /workspace/f") == "kept\n"
