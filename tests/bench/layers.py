"""Snapshots and forks, of a small workspace and of a large one, beside `docker commit`."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import skerry
from tests.bench.engine import Engine
from tests.bench.paths import expect
from tests.bench.report import Row
from tests.bench.samples import Contestant, milliseconds, reason, take_turns
from tests.bench.stand import Stand

SMALL, LARGE = (10, 1_000), (1_000, 100_000)
"""Megabytes, and files."""
LIMIT = 30


def _fill(megabytes: int, files: int) -> str:
    size = megabytes * 1_000_000 // files
    make = f"head -c {size * files} /dev/urandom | split -a 6 -d -b {size}"
    return f"mkdir -p /workspace/d && cd /workspace/d && {make} && ls | wc -l"


def snapshot(size: tuple[int, int]) -> Callable[[Stand], list[Row]]:
    def measure(stand: Stand) -> list[Row]:
        sandbox = _filled(stand, size)
        taken: list[skerry.SnapshotInfo] = []

        def ours() -> float:
            sandbox.exec("date >/workspace/d/x000000")
            return milliseconds(lambda: taken.append(sandbox.snapshot()))

        def delete() -> None:
            for each in taken:
                sandbox.delete_snapshot(each)
            taken.clear()

        return [_measured(stand, "snapshot", size, ours, delete, _commit(stand, size))]

    return measure


def fork(size: tuple[int, int]) -> Callable[[Stand], list[Row]]:
    def measure(stand: Stand) -> list[Row]:
        sandbox = _filled(stand, size)
        made: list[skerry.Sandbox] = []

        def ours() -> float:
            sandbox.exec("date >/workspace/d/x000000")
            return milliseconds(lambda: made.extend(sandbox.fork()))

        def destroy() -> None:
            for each in made:
                each.destroy()
            made.clear()

        row = _measured(stand, "fork", size, ours, destroy)
        (one,) = sandbox.fork()
        expect(one.exec("ls /workspace/d | wc -l").stdout.strip() == str(size[1]), "A fork does not have all files.")
        one.destroy()
        return [row]

    return measure


def _filled(stand: Stand, size: tuple[int, int]) -> skerry.Sandbox:
    sandbox = stand.client.sandbox(f"layers-{size[0]}")
    there = sandbox.exec("ls /workspace/d 2>/dev/null | wc -l").stdout.strip()
    if there != str(size[1]):
        expect(sandbox.exec(_fill(*size)).stdout.strip() == str(size[1]), "The workspace could not be filled.")
    return sandbox


def _measured(
    stand: Stand,
    what: str,
    size: tuple[int, int],
    ours: Callable[[], float],
    after: Callable[[], None],
    *rivals: Contestant,
) -> Row:
    ours()  # the first one writes out what is still in memory
    after()
    samples = take_turns(Contestant("Skerry", ours, stand.counts.layers), *rivals, after=after)
    path = f"{what} of {size[0]} MB in {size[1]:,} files"
    goals = (samples.p50 <= LIMIT,)
    return Row(f"{what}-{size[0]}", path, f"p50 ≤ {LIMIT} ms", samples, rivals=rivals, goals=goals)


def _commit(stand: Stand, size: tuple[int, int]) -> Contestant:
    name = "docker commit"
    if isinstance(stand.engine, str):
        return Contestant(name, failure=stand.engine)
    engine: Engine = stand.engine
    try:
        container = engine.container()
        engine.execute(container, "sh", "-c", _fill(*size))
    except subprocess.SubprocessError as error:
        return Contestant(name, failure=reason(error))
    return Contestant(name, lambda: milliseconds(lambda: engine.commit(container)), stand.counts.commits)


PATHS: dict[str, Callable[[Stand], list[Row]]] = {
    f"{name}-{size[0]}": work(size)
    for name, work in (("snapshot", snapshot), ("fork", fork))
    for size in (SMALL, LARGE)
}
RIVALLED_BY_DOCKER = frozenset(name for name in PATHS if name.startswith("snapshot"))
