from __future__ import annotations

import asyncio

import pytest

from skerry.control.schema import SnapshotState
from skerry.control.snapshot_rows import SnapshotRow
from skerry.control.store import SandboxRow, Store
from skerry.errors import InvalidRequestError, SandboxExistsError, SnapshotExistsError
from skerry.models import State


def row(id: str, **values: object) -> SnapshotRow:
    values = {"node": "here", "sandbox_id": "box", "image": "host", "state": SnapshotState.READY, **values}
    return SnapshotRow(id=id, **values)  # type: ignore[arg-type]


def sandbox(id: str, **values: object) -> SandboxRow:
    return SandboxRow(id=id, node="here", state=State.CREATED, image="host", **values)  # type: ignore[arg-type]


async def test_what_was_inserted_is_found_by_id_and_by_name(store: Store) -> None:
    rows = store.snapshots
    one = row("snap-1", name="one", labels={"a": 'b"c'}, settings={"env": {"A": "ö"}, "sleepAfter": None})
    await rows.insert(one)
    assert await rows.find("snap-1") == await rows.find("one") == one
    assert await rows.find("two") is None
    with pytest.raises(SnapshotExistsError):
        await rows.insert(row("snap-2", name="one"))
    await rows.insert(row("snap-2"))
    await rows.insert(row("snap-3", sandbox_id="other"))
    assert [each.id for each in await rows.list_()] == ["snap-1", "snap-2", "snap-3"]
    assert [each.id for each in await rows.list_("other")] == ["snap-3"]
    assert await rows.count_by_image("host") == 3
    with pytest.raises(InvalidRequestError):
        await rows.insert(row("snap-4", labels={"a": "\0"}))


async def test_only_what_is_ready_is_shown(store: Store) -> None:
    rows = store.snapshots
    await rows.insert(row("snap-1", state=SnapshotState.MAKING))
    assert await rows.find("snap-1") is None
    assert await rows.list_() == []
    assert [each.state for each in await rows.of_node("here")] == [SnapshotState.MAKING]
    assert await rows.of_node("there") == []
    assert await rows.set_state("snap-1", SnapshotState.READY)
    assert await rows.find("snap-1") is not None
    assert not await rows.set_state("snap-2", SnapshotState.READY)


async def test_what_came_after_a_deleted_one_comes_after_what_was_before_it(store: Store) -> None:
    rows = store.snapshots
    chain = [row(f"snap-{n}", parent=f"snap-{n - 1}" if n else None) for n in range(3)]
    for each in chain:
        await rows.insert(each)
    await store.insert_sandboxes([sandbox("a", base="snap-1", made_from="snap-1"), sandbox("b", made_from="snap-1")])
    assert await rows.users_of("snap-1") == ["a", "b"]
    assert await rows.users() == {"snap-1": ["a", "b"]}
    await rows.delete(chain[1])
    left = {each.id: each.parent for each in await rows.list_()}
    assert left == {"snap-0": None, "snap-2": "snap-0"}
    found = await store.get_sandbox("a")
    assert found is not None
    assert (found.base, found.made_from) == ("snap-0", "snap-1")


async def test_several_sandboxes_are_inserted_or_none(store: Store) -> None:
    await store.insert_sandbox(sandbox("b"))
    with pytest.raises(SandboxExistsError, match="'b'"):
        await store.insert_sandboxes([sandbox("a"), sandbox("b"), sandbox("c")])
    assert await store.get_sandbox("a") is None
    assert await store.get_sandbox("c") is None
    results = await asyncio.gather(
        *(store.insert_sandboxes([sandbox("x"), sandbox(f"y{n}")]) for n in range(5)), return_exceptions=True
    )
    assert [result is None for result in results].count(True) == 1
    assert len(await store.list_sandboxes()) == 3
