"""Workspaces in buckets: only what differs is moved, and a sync that is cut off is made good by the next."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from skerry.errors import BucketUnreachableError, FileNotFoundInSandboxError
from skerry.models import ExecRequest, ExecResult
from skerry.runtime.runtime import Runtime
from skerry.storage import sync
from skerry.storage.buckets import Buckets
from skerry.storage.workspace import Workspace

Sh = Callable[..., Awaitable[ExecResult]]
DIR = "/workspace/project"


@pytest.fixture
async def workspace(buckets: Buckets) -> Workspace:
    return Workspace(buckets.open("test"), "one")


def nobody(files: int, size: int) -> None:
    return None


async def push(runtime: Runtime, workspace: Workspace, **options: object) -> sync.Outcome:
    return await sync.push(runtime.portal, DIR, workspace, sync.EXCLUDED, nobody, **options)  # type: ignore[arg-type]


async def stored(workspace: Workspace) -> dict[str, bytes | None]:
    return {item.key: await workspace.load_file(item.key) for item in await workspace.list_files()}


async def test_files_are_saved_loaded_listed_and_deleted(workspace: Workspace) -> None:
    assert await workspace.load_file("a/b.txt") is None
    await workspace.save_file("a/b.txt", b"one")
    await workspace.save_file("c", b"two")
    assert await workspace.load_file("a/b.txt") == b"one"
    assert {(item.key, item.size) for item in await workspace.list_files()} == {("a/b.txt", 3), ("c", 3)}
    await workspace.delete_file("c")
    await workspace.delete_file("never-there")
    assert await workspace.load_file("c") is None
    assert await workspace.delete_all_files() == 1
    assert await workspace.list_files() == []


async def test_workspaces_are_apart_and_lie_where_they_are_looked_for(buckets: Buckets) -> None:
    bucket = buckets.open("test")
    one, other = Workspace(bucket, "one"), Workspace(bucket, "one-more")
    await one.save_file("f", b"mine")
    assert await other.load_file("f") is None
    await other.delete_all_files()
    assert await bucket.get("workspaces/one/f") == b"mine"


async def test_a_push_moves_only_what_differs(runtime: Runtime, sh: Sh, workspace: Workspace) -> None:
    await sh(
        f"mkdir -p {DIR}/src {DIR}/node_modules/x {DIR}/.git; cd {DIR}; echo one > a; echo two > src/b; chmod 755 a"
    )
    await sh(f"cd {DIR}; echo no > node_modules/x/y; echo no > .git/HEAD; ln -s src/b link; echo 3 > 'na me ü'")
    first = await push(runtime, workspace)
    assert (first.synced, first.unchanged, first.deleted, first.errors) == (3, 0, 0, [])
    assert first.excluded == 2
    assert await stored(workspace) == {"a": b"one\n", "src/b": b"two\n", "na me ü": b"3\n"}
    assert first.size == 10
    again = await push(runtime, workspace)
    assert (again.synced, again.unchanged, again.moved) == (0, 3, 0)
    await sh(f"cd {DIR}; echo changed > a; rm src/b; echo new > c; touch 'na me ü'")
    third = await push(runtime, workspace)
    assert (third.synced, third.unchanged, third.deleted) == (2, 1, 1)
    assert await stored(workspace) == {"a": b"changed\n", "c": b"new\n", "na me ü": b"3\n"}


async def test_a_change_that_leaves_size_and_time_alone_is_seen(runtime: Runtime, sh: Sh, workspace: Workspace) -> None:
    await sh(f"mkdir -p {DIR}; cd {DIR}; echo aaa > f; touch -d 2020-01-01 f")
    await push(runtime, workspace)
    await sh(f"cd {DIR}; echo bbb > f; touch -d 2020-01-01 f")
    assert (await push(runtime, workspace)).synced == 1
    assert await workspace.load_file("f") == b"bbb\n"


async def test_what_was_put_there_by_other_means_stays(runtime: Runtime, sh: Sh, workspace: Workspace) -> None:
    await workspace.save_file("from-elsewhere", b"kept")
    await sh(f"mkdir -p {DIR}; echo 1 > {DIR}/f")
    await push(runtime, workspace)
    await sh(f"rm {DIR}/f")
    assert (await push(runtime, workspace)).deleted == 1
    assert await stored(workspace) == {"from-elsewhere": b"kept"}


async def test_a_pull_brings_back_what_was_pushed(
    runtime: Runtime, other: Runtime, sh: Sh, workspace: Workspace
) -> None:
    await sh(f"mkdir -p {DIR}/deep/er; cd {DIR}; head -c 20000000 /dev/urandom > big; echo x > deep/er/f; ln -s big l")
    await sh(f"cd {DIR}; chmod 750 deep/er/f; : > empty; sha256sum big deep/er/f empty > /tmp/sums")
    await push(runtime, workspace)
    await other.files.mkdir(DIR, recursive=True)
    await other.files.write(f"{DIR}/only-here", b"stays")
    await other.files.write(f"{DIR}/empty", b"not empty")
    back = await sync.pull(other.portal, DIR, workspace, nobody)
    assert (back.synced, back.unchanged, back.errors) == (3, 0, [])
    await other.files.write("/tmp/sums", (await runtime.files.read("/tmp/sums")).content.encode())
    checked = await other.exec(
        ExecRequest(
            command=f"cd {DIR} && sha256sum -c /tmp/sums && readlink l && stat -c %a deep/er/f && cat only-here"
        )
    )
    assert checked.exit_code == 0, checked.stderr
    assert checked.stdout.splitlines()[-3:] == ["big", "750", "stays"]
    again = await sync.pull(other.portal, DIR, workspace, nobody)
    assert (again.synced, again.unchanged, again.moved) == (0, 3, 0)


async def test_names_no_bucket_takes_are_named_and_the_rest_is_synced(
    runtime: Runtime, sh: Sh, workspace: Workspace
) -> None:
    await sh(
        f"mkdir -p {DIR}; cd {DIR}; echo 1 > good; echo 2 > 'back\\slash'; echo 3 > $'new\\nline'; echo 4 > $'\\xff'"
    )
    outcome = await push(runtime, workspace)
    assert outcome.synced == 1
    assert len(outcome.errors) == 3
    assert any("slash" in error for error in outcome.errors)
    assert await stored(workspace) == {"good": b"1\n"}


async def test_a_dry_run_moves_nothing(runtime: Runtime, sh: Sh, workspace: Workspace) -> None:
    await sh(f"mkdir -p {DIR}; echo 1 > {DIR}/f")
    assert (await push(runtime, workspace, dry_run=True)).synced == 1
    assert await workspace.list_files() == []
    assert await workspace.index() is None


async def test_a_push_that_is_cut_off_is_made_good_by_the_next(
    runtime: Runtime, sh: Sh, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    await sh(f"mkdir -p {DIR}; cd {DIR}; for i in 1 2 3 4 5 6; do echo $i > f$i; done; echo old > gone")
    await push(runtime, workspace)
    await sh(f"cd {DIR}; for i in 1 2 3 4 5 6; do echo new $i > f$i; done; rm gone; echo n > fresh")
    save, count = workspace.save_file, 0

    async def breaking(path: str, content: bytes) -> object:
        nonlocal count
        count += 1
        if count > 3:
            raise BucketUnreachableError("The bucket does not answer.")
        return await save(path, content)

    monkeypatch.setattr(workspace, "save_file", breaking)
    with pytest.raises(BucketUnreachableError):
        await push(runtime, workspace)
    monkeypatch.undo()
    # What the cut-off push put there is deleted inside before the next one: it must not stay for ever.
    await sh(f"rm {DIR}/fresh")
    await push(runtime, workspace)
    assert await stored(workspace) == {f"f{i}": f"new {i}\n".encode() for i in range(1, 7)}


async def test_a_damaged_object_is_not_brought_in(runtime: Runtime, sh: Sh, workspace: Workspace) -> None:
    await sh(f"mkdir -p {DIR}; cd {DIR}; echo good > f; echo fine > g")
    await push(runtime, workspace)
    await workspace.save_file("f", b"evil\n")
    await workspace.delete_file("g")
    await sh(f"cd {DIR}; echo mine > f; echo mine > g")
    outcome = await sync.pull(runtime.portal, DIR, workspace, nobody)
    assert sorted(error.partition(":")[0] for error in outcome.errors) == ["f", "g"]
    assert (await sh(f"cat {DIR}/f {DIR}/g")).stdout == "mine\nmine\n"


async def test_a_directory_that_is_not_there_is_an_error(runtime: Runtime, workspace: Workspace) -> None:
    with pytest.raises(FileNotFoundInSandboxError):
        await sync.push(runtime.portal, "/workspace/nowhere", workspace, [], nobody)
    assert await workspace.index() is None


async def test_links_out_of_the_directory_are_kept_as_links(runtime: Runtime, sh: Sh, workspace: Workspace) -> None:
    await sh(f"mkdir -p {DIR}; cd {DIR}; ln -s /etc/passwd p; ln -s /etc d; echo 1 > f")
    outcome = await push(runtime, workspace)
    assert outcome.synced == 1
    assert list(await stored(workspace)) == ["f"]


async def test_thousands_of_files_go_and_come(runtime: Runtime, sh: Sh, workspace: Workspace) -> None:
    await sh(f"mkdir -p {DIR}; cd {DIR}; for i in $(seq 2000); do echo $i > f$i; done")
    assert (await push(runtime, workspace)).synced == 2000
    await sh(f"rm {DIR}/*; :", timeout=60_000)
    assert (await sync.pull(runtime.portal, DIR, workspace, nobody)).synced == 2000
    assert (await sh(f"cat {DIR}/f* | wc -l")).stdout.strip() == "2000"
    assert (await push(runtime, workspace)).synced == 0


async def test_a_file_that_changes_while_it_is_read_is_stored_as_it_was_read(
    runtime: Runtime, sh: Sh, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    await sh(f"mkdir -p {DIR}; echo first > {DIR}/f")
    look = sync.look

    async def late(*arguments: object) -> sync.Found:
        found = await look(*arguments)  # type: ignore[arg-type]
        await runtime.files.write(f"{DIR}/f", b"second\n")
        return found

    monkeypatch.setattr(sync, "look", late)
    await push(runtime, workspace)
    monkeypatch.undo()
    assert await workspace.load_file("f") == b"second\n"
    assert (await push(runtime, workspace)).synced == 0


def test_what_is_left_out_is_what_is_promised() -> None:
    assert set(sync.EXCLUDED) == {
        *("node_modules", ".git", "__pycache__", ".cache", "dist", "build", ".next", ".nuxt", "target", ".opencode"),
        ".DS_Store",
    }
