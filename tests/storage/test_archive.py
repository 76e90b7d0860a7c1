"""Packing and unpacking through every kind of portal."""

from __future__ import annotations

from contextlib import aclosing

import pytest

from skerry.errors import FileNotFoundInSandboxError, SkerryError
from skerry.portal.contract import Portal
from skerry.storage.archive import Packing, Staging
from tests.conftest import Run
from tests.storage.trees import LOOK, NASTY


def quiet(files: int, size: int) -> None:
    return None


async def packed(portal: Portal, path: str) -> tuple[bytes, Packing]:
    packing = Packing(portal, {"path": path, "excludes": []}, quiet)
    async with aclosing(packing.read()) as chunks:  # type: ignore[type-var]
        return b"".join([chunk async for chunk in chunks]), packing


async def pieces(data: bytes):  # type: ignore[no-untyped-def]
    for start in range(0, len(data), 100_003):
        yield data[start : start + 100_003]


async def look(portal: Portal, run: Run, path: str) -> str:
    code, said = await run(*portal.python, "-c", LOOK, path)
    assert code == 0, said
    return said


async def test_a_tree_is_packed_staged_and_put_in_place(portal: Portal, run: Run, base: str) -> None:
    code, said = await run(*portal.python, "-c", NASTY, f"{base}/tree")
    assert code == 0, said
    archive, packing = await packed(portal, f"{base}/tree")
    assert packing.summary is not None
    assert packing.summary.left_out == {"sockets": 1}
    await portal.mkdir(f"{base}/copy")
    staging = await Staging.prepare(portal, f"{base}/copy", machine=False)
    summary = await staging.fill(pieces(archive), 1000, 1 << 28, quiet)
    assert (summary.files, summary.bytes) == (packing.summary.files, packing.summary.bytes)
    assert await portal.list(f"{base}/copy") == []
    await staging.swap()
    assert await look(portal, run, f"{base}/copy") == await look(portal, run, f"{base}/tree")
    assert sorted(entry.name for entry in await portal.list(base)) == ["copy", "tree"]


async def test_what_was_staged_is_taken_back(portal: Portal, run: Run, base: str) -> None:
    await run(f"mkdir {base}/tree; echo 1 >{base}/tree/file")
    archive, _ = await packed(portal, f"{base}/tree")
    staging = await Staging.prepare(portal, f"{base}/tree", machine=False)
    await staging.fill(pieces(archive), 10, 100, quiet)
    await staging.settle()
    await staging.settle()
    assert [entry.name for entry in await portal.list(base)] == ["tree"]


async def test_entries_that_cannot_change_places_are_all_put_back(portal: Portal, run: Run, base: str) -> None:
    """One of the old entries cannot be moved away, after others were."""
    await run(f"mkdir -p {base}/tree/a {base}/tree/z; echo old >{base}/tree/a/file; echo old >{base}/tree/z/file")
    before = await look(portal, run, f"{base}/tree")
    archive, _ = await packed(portal, f"{base}/tree")
    staging = await Staging.prepare(portal, f"{base}/tree", machine=False)
    await staging.fill(pieces(archive), 10, 100, quiet)
    # The place its old content would go to is taken, and a process stands in the directory.
    await run(f"mkdir -p {staging.places['']}/old/z/x")
    code, said = await run(f"cd {base}/tree; sleep 60 >/dev/null 2>&1 & echo $! >{base}/pid")
    assert code == 0, said
    with pytest.raises(SkerryError):
        await staging.swap()
    assert await look(portal, run, f"{base}/tree") == before
    await run(f"kill $(cat {base}/pid)")
    assert sorted(entry.name for entry in await portal.list(base)) == ["pid", "tree"]


async def test_leaving_early_ends_the_script(portal: Portal, run: Run, base: str) -> None:
    await run(f"head -c 50000000 /dev/zero >{base}/large")
    packing = Packing(portal, {"path": base, "excludes": []}, quiet)
    async with aclosing(packing.read()) as chunks:  # type: ignore[type-var]
        async for _ in chunks:
            break
    assert packing.summary is None
    with pytest.raises(FileNotFoundInSandboxError):
        await packed(portal, f"{base}/nothing")
