"""Snapshots, forks, rollback and diff of real sandboxes, where snapshots are instant and where they are copies."""

from __future__ import annotations

import asyncio
import io
import itertools
import tarfile
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from skerry.control import reaper
from skerry.control.open import open_registry
from skerry.control.owner import Owner
from skerry.control.registry import Registry
from skerry.errors import (
    ConflictError,
    FilesMissingError,
    ImageInUseError,
    InvalidRequestError,
    NoSpaceError,
    QuotaExceededError,
    SandboxExistsError,
    SandboxNotFoundError,
    SnapshotExistsError,
    SnapshotInUseError,
    SnapshotNotFoundError,
)
from skerry.models import (
    CreateSandbox,
    CreateSnapshot,
    ExecRequest,
    ExposePort,
    ForkSandbox,
    Limits,
    RollbackSandbox,
    RunCode,
    SandboxInfo,
    SleepSandbox,
    SnapshotInfo,
    StartProcess,
    State,
    WaitRequest,
)
from skerry.settings import Settings

_numbers = itertools.count(1)
WRITER = """
import itertools
a, b = open("a", "w"), open("b", "w")
for n in itertools.count():
    print(n, file=a, flush=True)
    print(n, file=b, flush=True)
"""


@pytest_asyncio.fixture(params=["instant", "copy"], scope="module")
async def registry(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Registry]:
    home = tmp_path_factory.mktemp("layers")
    size = {"instant": None, "copy": 0}[request.param]
    registry = await open_registry(Settings(home=home, pool_size=size))
    assert registry.provider.capabilities().snapshots == request.param
    yield registry
    await registry.close()


@pytest.fixture
def id() -> str:
    return f"s{next(_numbers)}"


async def sh(registry: Registry, id: str, command: str) -> str:
    async with registry.use(id) as runtime:
        result = await runtime.exec(ExecRequest(command=command, session=None))
        assert result.exit_code == 0, result
        return result.stdout


async def take(registry: Registry, id: str, name: str | None = None) -> SnapshotInfo:
    return await registry.snapshots.create(id, CreateSnapshot(name=name))


async def back(registry: Registry, id: str, snapshot: SnapshotInfo) -> SandboxInfo:
    return await registry.snapshots.rollback(id, RollbackSandbox(snapshot=snapshot.id))


async def fork(registry: Registry, id: str, count: int = 1) -> list[str]:
    return [info.id for info in (await registry.snapshots.fork(id, ForkSandbox(count=count))).sandboxes]


async def changes(registry: Registry, id: str, since: SnapshotInfo | None = None) -> dict[str, str]:
    async with registry.snapshots.sandbox_diff(id, None if since is None else since.id) as found:
        listed, truncated = await found.list_(10_000)
    assert not truncated
    return {change.path: str(change.change) for change in listed}


# -- snapshots ---------------------------------------------------------------------------------------------------------


async def test_a_snapshot_is_what_the_files_were_and_the_sandbox_goes_on(registry: Registry, id: str) -> None:
    await sh(registry, id, "echo one >f; mkdir d; echo kept >d/g")
    async with registry.use(id) as runtime:
        process = await runtime.processes.start(StartProcess(command="sleep 1000"))
        taken = await take(registry, id)
        assert (await runtime.processes.get(process.id)).status == "running"
    await sh(registry, id, "echo two >f; rm -r d")
    assert (await registry.get(id)).starts == 1
    made = await registry.create(CreateSandbox(snapshot=taken.id))
    assert await sh(registry, made.id, "cat f d/g") == "one\nkept\n"
    assert await sh(registry, id, "cat f; ls") == "two\nf\n"


async def test_code_that_writes_all_the_time_is_held_still_too(registry: Registry, id: str) -> None:
    seed = registry.provider.seed  # type: ignore[attr-defined]
    assert await seed.open()  # contexts are then no children of the machine's first process
    async with registry.use(id) as runtime:
        running = asyncio.ensure_future(runtime.code.run(RunCode(code=WRITER)))
        while not await runtime.files.exists("b"):
            await asyncio.sleep(0.01)
        for number in range(8):
            await registry.snapshots.create(id, CreateSnapshot(name=f"moment-{id}-{number}"))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    for number in range(8):
        made = await registry.create(CreateSandbox(id=f"look-{id}-{number}", snapshot=f"moment-{id}-{number}"))
        lines = [int(line) for line in (await sh(registry, made.id, "tail -qn 1 a b")).split()]
        assert 0 <= lines[0] - lines[1] <= 1
        await registry.destroy(made.id)


async def test_a_frozen_sandbox_is_snapshotted_and_stays_frozen(registry: Registry, id: str) -> None:
    await sh(registry, id, "echo one >f")
    await registry.sleep(id, SleepSandbox(stage="freeze"))
    await registry.snapshots.create(id, CreateSnapshot(name=f"cold-{id}"))
    assert (await registry.get(id)).state == State.FROZEN
    made = await registry.create(CreateSandbox(id=f"thawed-{id}", snapshot=f"cold-{id}"))
    assert await sh(registry, made.id, "cat f") == "one\n"


async def test_a_command_that_writes_all_the_time_loses_nothing_and_every_snapshot_is_one_moment(
    registry: Registry, id: str
) -> None:
    # Two files, always written one after the other: a moment in between has at most one line more in the first.
    await sh(registry, id, "touch a b")
    async with registry.use(id) as runtime:
        script = "i=0; while [ ! -e stop ]; do i=$((i+1)); echo $i >>a; echo $i >>b; done"
        await runtime.processes.start(StartProcess(command=script, process_id="writer"))
        taken = []
        for _ in range(20):
            taken.append(await take(registry, id))
            await asyncio.sleep(0.01)
        await runtime.exec(ExecRequest(command="touch stop", session=None))
        assert (await runtime.processes.wait("writer", WaitRequest(timeout=30_000))).exit_code == 0
    last = 0
    for snapshot in taken:
        made = (await registry.create(CreateSandbox(snapshot=snapshot.id))).id
        a, b = [(await sh(registry, made, f"cat {name}")).split() for name in "ab"]
        assert len(a) - len(b) in (0, 1)
        assert a == [str(n) for n in range(1, len(a) + 1)]
        assert b == a[: len(b)]
        assert len(a) >= last
        last = len(a)
        await registry.destroy(made)
    end = int(await sh(registry, id, "tail -n1 a"))
    assert await sh(registry, id, f"seq {end} | cmp - a && seq {end} | cmp - b && echo whole") == "whole\n"
    assert end > last > 0


async def test_shells_notice_nothing_of_a_snapshot(registry: Registry, id: str) -> None:
    async with registry.use(id) as runtime:
        # An interactive shell would tell if it ever saw its child stopped.
        script = "script -qc \"bash -ic 'echo begin; sleep 1.5; echo end'\" /dev/null 2>&1"
        running = asyncio.create_task(runtime.exec(ExecRequest(command=script, session=None)))
        for _ in range(5):
            await asyncio.sleep(0.2)
            await take(registry, id)
        result = await running
    assert "begin" in result.stdout
    assert "end" in result.stdout
    assert "Stopped" not in result.stdout
    assert result.exit_code == 0


async def test_what_was_stopped_stays_stopped(registry: Registry, id: str) -> None:
    await sh(registry, id, "sleep 1000 >/dev/null 2>&1 & echo $! >pid; kill -STOP $!")
    await take(registry, id)
    assert await sh(registry, id, "cut -d' ' -f3 /proc/$(cat pid)/stat") == "T\n"


async def test_snapshots_are_found_by_id_and_by_name(registry: Registry, id: str) -> None:
    await sh(registry, id, "true")
    name = f"name-of-{id}"
    taken = await registry.snapshots.create(id, CreateSnapshot(name=name, labels={"why": "test"}))
    plain = await take(registry, id)
    assert await registry.snapshots.get(name) == await registry.snapshots.get(taken.id)
    assert (await registry.snapshots.get(name)).labels == {"why": "test"}
    assert [one.id for one in await registry.snapshots.list_(id)] == [taken.id, plain.id]
    assert {taken.id, plain.id} <= {one.id for one in await registry.snapshots.list_()}
    with pytest.raises(SnapshotExistsError):
        await take(registry, id, name)
    for bad in ("snap-me", "", "a/b", "..", "Große", "x" * 64):
        with pytest.raises(InvalidRequestError):
            await take(registry, id, bad)
        with pytest.raises(SnapshotNotFoundError):
            await registry.snapshots.get(bad)
    assert len(await registry.snapshots.list_(id)) == 2
    with pytest.raises(SandboxNotFoundError):
        await take(registry, "there-is-none")


async def test_a_sandbox_that_never_started_can_be_snapshotted_and_started_afterwards(
    registry: Registry, id: str
) -> None:
    await registry.create(CreateSandbox(id=id, env={"A": "b"}))
    taken = await take(registry, id)
    assert await sh(registry, id, "echo $A; echo x >f; cat f") == "b\nx\n"
    made = await registry.create(CreateSandbox(snapshot=taken.id))
    assert await sh(registry, made.id, "echo $A; ls") == "b\n"
    assert await changes(registry, made.id) == {}


async def test_a_sandbox_that_sleeps_can_be_snapshotted_without_waking(registry: Registry, id: str) -> None:
    await sh(registry, id, "echo asleep >f")
    await registry.stop(id)
    taken = await take(registry, id)
    assert (await registry.get(id)).state == State.HIBERNATED
    made = await registry.create(CreateSandbox(snapshot=taken.id))
    assert await sh(registry, made.id, "cat f") == "asleep\n"


async def test_a_snapshot_outlives_its_sandbox(registry: Registry, id: str) -> None:
    await sh(registry, id, "echo kept >f")
    taken = await take(registry, id)
    await registry.destroy(id)
    made = await registry.create(CreateSandbox(id=id, snapshot=taken.id))
    assert await sh(registry, made.id, "cat f") == "kept\n"


# -- new sandboxes -----------------------------------------------------------------------------------------------------


async def test_a_sandbox_from_a_snapshot_has_its_settings_where_nothing_else_is_said(
    registry: Registry, id: str
) -> None:
    await registry.create(
        CreateSandbox(
            id=id, env={"A": "1", "B": "2"}, labels={"team": "x"}, sleep_after="5m", limits=Limits(memory=512 << 20)
        )
    )
    taken = await take(registry, id)
    same = await registry.create(CreateSandbox(snapshot=taken.id))
    assert (same.env, same.labels, same.sleep_after) == ({"A": "1", "B": "2"}, {"team": "x"}, 300)
    assert same.limits.memory == 512 << 20
    assert (same.made_from, same.base, same.image, same.starts) == (taken.id, taken.id, "host", 0)
    other = await registry.create(
        CreateSandbox(snapshot=taken.id, env={"B": "3"}, labels={"team": "y"}, sleep_after="1h")
    )
    assert (other.env, other.labels, other.sleep_after) == ({"A": "1", "B": "3"}, {"team": "y"}, 3600)
    with pytest.raises(InvalidRequestError, match="over image 'host'"):
        await registry.create(CreateSandbox(snapshot=taken.id, image="other"))
    with pytest.raises(SandboxExistsError):
        await registry.create(CreateSandbox(id=id, snapshot=taken.id))
    with pytest.raises(SnapshotNotFoundError):
        await registry.create(CreateSandbox(snapshot="nothing"))


async def test_forks_have_the_files_and_settings_but_nothing_that_runs(registry: Registry, id: str) -> None:
    await registry.create(CreateSandbox(id=id, env={"A": "1"}, labels={"l": "v"}))
    await sh(registry, id, "echo shared >f; sleep 1000 >/dev/null 2>&1 &")
    async with registry.use(id) as runtime:
        await runtime.code.run(RunCode(code="x = 1", language="python"))
        await registry.exposures.expose(id, ExposePort(port=3000))
    forks = await fork(registry, id, 3)
    assert len({id, *forks}) == 4
    for each in forks:
        info = await registry.get(each)
        assert (info.env, info.labels, info.forked_from, info.starts) == ({"A": "1"}, {"l": "v"}, id, 0)
        assert await sh(registry, each, "cat f; echo $A; pgrep -x sleep || echo none") == "shared\n1\nnone\n"
        async with registry.use(each) as runtime:
            assert runtime.code.list() == []
        assert await registry.exposures.list(each) == []


async def test_forks_share_no_later_write(registry: Registry, id: str) -> None:
    await sh(registry, id, "echo common >f; mkdir d; echo x >d/x")
    family = [id, *(await fork(registry, id, 2))]
    family += await fork(registry, family[1])
    for each in family:
        await sh(registry, each, f"echo {each} >>f; echo {each} >d/own; rm d/x")
    for each in family:
        assert await sh(registry, each, "cat f d/own; ls d") == f"common\n{each}\n{each}\nown\n"


async def test_forks_get_the_ids_that_are_asked_for_or_none_is_made(registry: Registry, id: str) -> None:
    await sh(registry, id, "true")
    made = await registry.snapshots.fork(id, ForkSandbox(ids=[f"{id}-a", f"{id}-b"]))
    assert [info.id for info in made.sandboxes] == [f"{id}-a", f"{id}-b"]
    for request in (
        ForkSandbox(ids=[f"{id}-c", f"{id}-a"]),
        ForkSandbox(ids=[f"{id}-c", f"{id}-C"]),
        ForkSandbox(ids=[f"{id}-c"], count=2),
        ForkSandbox(ids=[f"{id}-c", "-no-"]),
    ):
        with pytest.raises((SandboxExistsError, InvalidRequestError)):
            await registry.snapshots.fork(id, request)
        with pytest.raises(SandboxNotFoundError):
            await registry.get(f"{id}-c")
    assert await registry.snapshots.list_(id) == []
    assert not [name for name in await registry.provider.snapshots() if name.startswith(".")]


async def test_an_ephemeral_sandbox_from_a_snapshot_forgets_all_that_came_after(registry: Registry, id: str) -> None:
    await sh(registry, id, "echo from the snapshot >f")
    taken = await take(registry, id)
    made = await registry.create(CreateSandbox(snapshot=taken.id, ephemeral=True))
    await sh(registry, made.id, "echo more >f; echo new >g")
    await registry.stop(made.id)
    assert await sh(registry, made.id, "cat f; ls") == "from the snapshot\nf\n"


# -- several that are started at once ----------------------------------------------------------------------------------


async def several(registry: Registry, id: str, *names: str) -> list[str]:
    snapshot = await take(registry, id)
    ids = [f"{id}-{name}" for name in names]
    await registry.create_from(snapshot.id, [CreateSandbox(id=each) for each in ids])
    return ids


async def test_several_from_one_snapshot_start_without_being_asked_to(registry: Registry, id: str) -> None:
    await sh(registry, id, "echo one >f")
    ids = await several(registry, id, "a", "b", "c")
    async with asyncio.timeout(30):
        while [(await registry.get(each)).state for each in ids] != [State.ACTIVE] * 3:
            await asyncio.sleep(0.01)
    for each in ids:
        assert await sh(registry, each, f"cat f; echo {each} >f; cat f") == f"one\n{each}\n"
        assert (await registry.get(each)).starts == 1
        assert [event.kind for event in await registry.history.list(each)] == ["created", "started"]
    listed = (await registry.list(prefix=f"{id}-")).sandboxes
    assert [(info.id, info.state, info.starts) for info in listed] == [(each, State.ACTIVE, 1) for each in ids]


async def test_one_of_several_whose_files_do_not_come_says_why_and_fails_alone(
    registry: Registry, id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await sh(registry, id, "echo one >f")
    clone = registry.provider.clone

    async def partly(snapshot: str, to: str) -> None:
        if to.endswith("-b"):
            raise NoSpaceError("There is no room for it.")
        await clone(snapshot, to)

    monkeypatch.setattr(registry.provider, "clone", partly)
    first, second = await several(registry, id, "a", "b")
    with pytest.raises(NoSpaceError):
        await sh(registry, second, "true")
    with pytest.raises(FilesMissingError):
        await sh(registry, second, "true")
    info = await registry.get(second)
    assert (info.state, info.last_stop) == (State.FAILED, "There is no room for it.")
    kinds = [event.kind for event in await registry.history.list(second)]
    assert (kinds, (await registry.list(prefix=second)).sandboxes[0].state) == (["created", "failed"], State.FAILED)
    row = await registry._store.get_sandbox(second)
    assert row is not None
    assert (row.state, row.starts) == (State.FAILED, 0)
    assert await sh(registry, first, "cat f") == "one\n"


async def test_one_of_several_that_may_not_be_started_is_on_record_as_not_started(
    registry: Registry, id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await sh(registry, id, "echo one >f")

    async def refuse(owner: Owner) -> Callable[[], None]:
        raise QuotaExceededError("Too many run.")

    with monkeypatch.context() as patch:
        patch.setattr(registry, "_attendants", replace(registry._attendants, admit=refuse))
        (each,) = await several(registry, id, "a")
    with pytest.raises(QuotaExceededError):
        await sh(registry, each, "true")
    await registry.history.flush()
    listed = (await registry.list(prefix=each)).sandboxes
    assert [(info.state, info.starts) for info in listed] == [(State.CREATED, 0)]
    row = await registry._store.get_sandbox(each)
    assert row is not None
    assert (row.state, row.starts) == (State.CREATED, 0)


async def test_one_whose_files_take_their_time_is_not_put_away_meanwhile(
    registry: Registry, id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await sh(registry, id, "echo one >f")
    clone, arrive = registry.provider.clone, asyncio.Event()

    async def late(snapshot: str, to: str) -> None:
        await arrive.wait()
        await clone(snapshot, to)

    monkeypatch.setattr(registry.provider, "clone", late)
    (each,) = await several(registry, id, "a")
    owner = registry._owners[each]
    owner._idle_since -= 10 * reaper.REAP_EVERY
    await asyncio.sleep(3 * reaper.REAP_EVERY)
    assert not owner.gone
    arrive.set()
    assert await sh(registry, each, "cat f") == "one\n"
    assert (registry._owners[each] is owner, owner.row.starts) == (True, 1)


@pytest.mark.parametrize("end", ["destroy", "stop", "rollback", "snapshot", "close"])
async def test_several_that_are_still_being_started_can_be_changed(registry: Registry, id: str, end: str) -> None:
    await sh(registry, id, "echo one >f")
    taken = await take(registry, id)
    await sh(registry, id, "echo two >f")
    (each,) = await several(registry, id, "a")
    if end == "destroy":
        await registry.destroy(each)
        with pytest.raises(SandboxNotFoundError):
            await registry.get(each)
        return
    if end == "stop":
        assert (await registry.stop(each)).state == State.HIBERNATED
    elif end == "rollback":
        await back(registry, each, taken)
        assert await sh(registry, each, "cat f") == "one\n"
        return
    elif end == "snapshot":
        kept = await take(registry, each)
        assert await sh(registry, (await registry.create(CreateSandbox(snapshot=kept.id))).id, "cat f") == "two\n"
    else:
        await registry._put_to_sleep(registry._owners[each])  # as the server does when it closes
        assert (await registry.get(each)).state == State.HIBERNATED
    assert await sh(registry, each, "cat f") == "two\n"


async def test_several_of_which_one_exists_are_not_made(registry: Registry, id: str) -> None:
    await sh(registry, f"{id}-b", "true")
    await sh(registry, id, "true")
    with pytest.raises(SandboxExistsError):
        await several(registry, id, "a", "b")
    with pytest.raises(SandboxNotFoundError):
        await registry.get(f"{id}-a")
    assert await registry.provider.exists(f"{id}-b")


# -- going back --------------------------------------------------------------------------------------------------------


async def test_a_rollback_ends_what_runs_and_the_files_are_as_they_were(registry: Registry, id: str) -> None:
    await sh(registry, id, "echo one >f; mkdir d; useradd -m bob 2>/dev/null; true")
    taken = await take(registry, id)
    await sh(registry, id, "echo two >f; rm -r d; rm -f /usr/bin/vim; echo new >g; sleep 1000 >/dev/null 2>&1 &")
    info = await back(registry, id, taken)
    assert (info.state, info.base) == (State.HIBERNATED, taken.id)
    assert await sh(registry, id, "cat f; ls; pgrep -x sleep || echo none") == "one\nd\nf\nnone\n"
    assert [event.kind for event in await registry.events(id)].count("rollback") == 1
    await sh(registry, id, "rm f")
    await back(registry, id, taken)
    assert await sh(registry, id, "cat f") == "one\n"


async def test_a_rollback_may_go_to_another_sandboxs_snapshot(registry: Registry, id: str) -> None:
    await sh(registry, id, "echo one >f")
    taken = await take(registry, id)
    other = f"{id}-other"
    await registry.create(CreateSandbox(id=other))
    await back(registry, other, taken)
    assert await sh(registry, other, "cat f") == "one\n"


async def test_what_cannot_be_rolled_back_to_changes_nothing(registry: Registry, id: str) -> None:
    await sh(registry, id, "echo one >f")
    clocks = {"sleeps_in", "sleeps_at", "last_active_at"}  # reckoned from how long nobody has used it
    before = (await registry.get(id)).model_dump(exclude=clocks)
    with pytest.raises(SnapshotNotFoundError):
        await registry.snapshots.rollback(id, RollbackSandbox(snapshot="none-such"))
    assert (await registry.get(id)).model_dump(exclude=clocks) == before
    taken = await take(registry, id)
    await registry.provider.remove_snapshot(taken.id)  # as if its disk had lost it
    with pytest.raises(SnapshotNotFoundError, match="missing"):
        await back(registry, id, taken)
    assert await sh(registry, id, "cat f") == "one\n"
    await registry.snapshots.delete(taken.id)


# -- deleting ----------------------------------------------------------------------------------------------------------


async def test_a_snapshot_that_sandboxes_were_made_from_is_deleted_only_by_force(registry: Registry, id: str) -> None:
    await sh(registry, id, "echo one >f")
    taken = await take(registry, id)
    made = await registry.create(CreateSandbox(snapshot=taken.id))
    assert (await registry.snapshots.get(taken.id)).sandboxes == [made.id]
    with pytest.raises(SnapshotInUseError, match=made.id):
        await registry.snapshots.delete(taken.id)
    await registry.snapshots.delete(taken.id, force=True)
    with pytest.raises(SnapshotNotFoundError):
        await registry.snapshots.get(taken.id)
    assert await sh(registry, made.id, "cat f") == "one\n"
    assert taken.id not in await registry.provider.snapshots()


async def test_who_came_from_what_is_told_and_stays_true_when_one_goes(registry: Registry, id: str) -> None:
    await sh(registry, id, "true")
    first, second, third = [await take(registry, id) for _ in range(3)]
    assert [first.parent, second.parent, third.parent] == [None, first.id, second.id]
    await back(registry, id, first)
    branch = await take(registry, id)
    assert branch.parent == first.id
    made = await registry.create(CreateSandbox(snapshot=second.id))
    await registry.snapshots.delete(second.id, force=True)
    assert (await registry.snapshots.get(third.id)).parent == first.id
    assert (await registry.get(made.id)).base == first.id
    assert (await registry.get(id)).base == branch.id
    await registry.snapshots.delete(branch.id)
    assert (await registry.get(id)).base == first.id


async def test_an_image_below_a_snapshot_cannot_be_removed(registry: Registry, id: str, tmp_path: Path) -> None:
    (tmp_path / "rootfs" / "bin").mkdir(parents=True)
    (tmp_path / "rootfs" / "bin" / "sh").write_text("#!")
    (tmp_path / "rootfs" / "bin" / "sh").chmod(0o755)
    await registry.provider.import_image(id, str(tmp_path / "rootfs"))
    await registry.create(CreateSandbox(id=id, image=id))
    taken = await take(registry, id)
    await registry.destroy(id)
    with pytest.raises(ImageInUseError, match="snapshot"):
        await registry.remove_image(id)
    other = await registry.create(CreateSandbox())
    with pytest.raises(ConflictError, match="over image"):
        await back(registry, other.id, taken)
    await registry.snapshots.delete(taken.id)
    await registry.remove_image(id)


# -- what changed ------------------------------------------------------------------------------------------------------


async def test_a_diff_names_what_was_added_changed_and_deleted(registry: Registry, id: str) -> None:
    await sh(
        registry, id, "echo 1 >a; echo 1 >b; mkdir d; echo 1 >d/x; chmod 600 /etc/passwd; rm /etc/hostname || true"
    )
    first = await take(registry, id)
    since_image = await changes(registry, id)
    assert since_image["/workspace/a"] == since_image["/workspace/d/x"] == "added"
    assert since_image["/etc/passwd"] == "changed"
    assert await changes(registry, id, first) == {}
    await sh(registry, id, "echo 2 >a; rm b; rm -r d; mkdir d; echo 2 >d/y; ln -s a c; touch -d @0 d/y")
    assert await changes(registry, id, first) == {
        "/workspace/a": "changed",
        "/workspace/b": "deleted",
        "/workspace/c": "added",
        "/workspace/d/x": "deleted",
        "/workspace/d/y": "added",
    }


async def test_a_diff_understands_what_an_overlay_hides(registry: Registry, id: str) -> None:
    await sh(registry, id, "ls /etc >/dev/null; rm -r /etc/ssl; mkdir /etc/ssl; echo new >/etc/ssl/only")
    first = await take(registry, id)
    found = await changes(registry, id)
    below = {path: change for path, change in found.items() if path.startswith("/etc/ssl/")}
    assert below.pop("/etc/ssl/only") == "added"
    assert set(below.values()) <= {"deleted"}
    await sh(registry, id, "rm /etc/group; rm -r /etc/ssl")
    assert await changes(registry, id, first) == {"/etc/group": "deleted", "/etc/ssl": "deleted"}


async def test_a_diff_between_two_snapshots_goes_both_ways(registry: Registry, id: str) -> None:
    await sh(registry, id, "echo 1 >a; echo 1 >gone")
    first = await take(registry, id)
    await sh(registry, id, "echo 2 >a; rm gone; echo 1 >new")
    second = await take(registry, id)

    async def between(one: SnapshotInfo, other: SnapshotInfo) -> dict[str, str]:
        async with registry.snapshots.diff(one.id, other.id) as found:
            return {change.path: str(change.change) for change in (await found.list_(100))[0]}

    assert await between(first, second) == {
        "/workspace/a": "changed",
        "/workspace/gone": "deleted",
        "/workspace/new": "added",
    }
    assert await between(second, first) == {
        "/workspace/a": "changed",
        "/workspace/gone": "added",
        "/workspace/new": "deleted",
    }
    assert await between(first, first) == {}


async def test_a_diff_as_tar_is_a_layer_with_every_name_and_attribute(registry: Registry, id: str) -> None:
    await sh(
        registry,
        id,
        "mkdir d; echo content >d/f; ln d/f d/hard; ln -s /etc/passwd link; chmod 4755 d/f; mkfifo pipe; "
        "printf x >$'odd\\xff\\n'; truncate -s 1M sparse; rm /etc/group; "
        "python3 -c \"import os; os.setxattr('d/f', 'user.a', b'\\x00\\xff')\"",
    )
    async with registry.snapshots.sandbox_diff(id) as found:
        data = b"".join([chunk async for chunk in found.tar()])
    with tarfile.open(fileobj=io.BytesIO(data), errors="surrogateescape") as tar:
        members = {member.name: member for member in tar.getmembers()}
        file = tar.extractfile("workspace/d/f")
        assert file is not None
        assert file.read() == b"content\n"
    assert members["workspace/d/f"].mode == 0o4755
    assert members["workspace/d/f"].pax_headers["SCHILY.xattr.user.a"].encode("utf-8", "surrogateescape") == b"\0\xff"
    assert (members["workspace/d/hard"].islnk(), members["workspace/d/hard"].linkname) == (True, "workspace/d/f")
    assert (members["workspace/link"].issym(), members["workspace/link"].linkname) == (True, "/etc/passwd")
    assert members["workspace/pipe"].isfifo()
    assert members["workspace/sparse"].size == 1 << 20
    assert "workspace/odd\udcff\n" in members
    assert members["etc/.wh.group"].size == 0
    assert {(member.uid, member.gid) for member in members.values()} == {(0, 0)}


async def test_names_that_are_no_text_are_told_as_bytes_too(registry: Registry, id: str) -> None:
    await sh(registry, id, "touch $'\\xff'")
    async with registry.snapshots.sandbox_diff(id) as found:
        (change,) = [one for one in (await found.list_(100))[0] if one.path.startswith("/workspace/")]
    assert (change.path, change.raw_path) == ("/workspace/\ufffd", "L3dvcmtzcGFjZS//")


async def test_a_reader_who_leaves_ends_the_tar(registry: Registry, id: str) -> None:
    await sh(registry, id, "head -c 30000000 /dev/urandom >big")
    async with registry.snapshots.sandbox_diff(id) as found:
        pieces = found.tar()
        assert await anext(pieces)
        await pieces.aclose()
    assert not [name for name in await registry.provider.snapshots() if name.startswith(".")]


# -- all at once -------------------------------------------------------------------------------------------------------


async def test_a_caller_who_gives_up_leaves_nothing_half_done(registry: Registry, id: str) -> None:
    await sh(registry, id, "echo one >f")
    for pause in (0.0, 0.001, 0.002, 0.005, 0.01):
        for work in (take(registry, id), fork(registry, id, 2)):
            task = asyncio.create_task(work)
            await asyncio.sleep(pause)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    kept = {snapshot.id for snapshot in await registry.snapshots.list_()}
    async with asyncio.timeout(10):
        while {name for name in await registry.provider.snapshots()} - kept:
            await asyncio.sleep(0.05)
    assert await sh(registry, id, "cat f") == "one\n"
    for info in (await registry.list(limit=100, prefix=f"{id}-")).sandboxes:
        assert await sh(registry, info.id, "cat f") == "one\n"


async def test_changes_of_life_queue_and_commands_go_on(registry: Registry, id: str) -> None:
    await sh(registry, id, "echo one >f")
    work = [take(registry, id) for _ in range(4)] + [fork(registry, id) for _ in range(3)]
    results = await asyncio.gather(*work, *(sh(registry, id, "cat f") for _ in range(10)))
    assert results[7:] == ["one\n"] * 10
    assert len(await registry.snapshots.list_(id)) == 4
