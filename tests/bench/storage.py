"""Backups to a real S3 server on this machine, beside tar and zstd with nowhere to ship to."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import skerry
from tests.bench.paths import expect
from tests.bench.report import Row
from tests.bench.samples import Contestant, take_turns
from tests.bench.service import service
from tests.bench.stand import Stand
from tests.s3 import S3

TREE = "/workspace/tree"
FILL = f"""
import os, shutil, sys
size = count = 0
for folder, folders, names in os.walk("/usr"):
    folders.sort()
    for name in sorted(names):
        path = os.path.join(folder, name)
        if size < int(sys.argv[1]) and not os.path.islink(path) and os.path.getsize(path) > 1 << 16:
            os.makedirs(f"{TREE}/{{count // 50}}", exist_ok=True)
            shutil.copyfile(path, f"{TREE}/{{count // 50}}/{{count}}")
            size += os.path.getsize(path)
            count += 1
"""
"""Programs and libraries of this machine: real files, none of them tiny."""
PACK = f"tar c -C {TREE} . | zstd -q -3 -f -o /tmp/tree.tar.zst"
UNPACK = "mkdir /tmp/tree && zstd -q -d -c /tmp/tree.tar.zst | tar x -C /tmp/tree"


def backups(stand: Stand) -> list[Row]:
    with _stage(stand.scratch / "storage", stand.counts.backup) as sandbox:
        made: list[skerry.BackupInfo] = []

        def backup() -> float:
            start = time.perf_counter()
            made.append(sandbox.backup(TREE, bucket="s3"))
            return made[-1].bytes / 1e6 / (time.perf_counter() - start)

        def restore() -> float:
            start = time.perf_counter()
            done = sandbox.restore(made[0], f"/tmp/restored-{len(made)}")
            spent = time.perf_counter() - start
            expect(done.bytes == made[0].bytes, f"{done.bytes} bytes came back.")
            return done.bytes / 1e6 / spent

        def run(command: str) -> float:
            start = time.perf_counter()
            done = sandbox.exec(f"set -o pipefail; {command}")
            spent = time.perf_counter() - start
            expect(done.success, done.stderr)
            return made[0].bytes / 1e6 / spent

        def clean() -> None:
            sandbox.exec("rm -rf /tmp/restored-* /tmp/tree; sync -f /workspace")

        def unpack() -> float:
            spent = run(UNPACK)
            clean()
            return spent

        rounds = stand.counts.large
        packing = Contestant("tar | zstd -3", lambda: run(PACK), rounds)
        there = take_turns(Contestant("Skerry", backup, rounds), packing, after=clean)
        unpacking = Contestant("unzstd | tar x", unpack, rounds)
        back = take_turns(Contestant("Skerry", restore, rounds), unpacking, after=clean)
    size = f"{stand.counts.backup / 1e9:g} GB"
    rows = (
        ("backup", f"back up {size} to the local S3 server", there, packing),
        ("restore", "restore it", back, unpacking),
    )
    return [
        Row(name, path, f"≥ half of {rival.name}", samples, "MB/s", [rival], [_half(samples.p50, rival)])
        for name, path, samples, rival in rows
    ]


def _half(ours: float, rival: Contestant) -> bool | None:
    return None if rival.samples is None else ours >= rival.samples.p50 / 2


@contextmanager
def _stage(place: Path, size: int) -> Iterator[skerry.Sandbox]:
    home = place / "home"
    home.mkdir(parents=True)
    (place / "s3").mkdir()
    store = S3(place / "s3", volume=1024)
    try:
        store.start()
        (home / "buckets.toml").write_text("[s3]\n" + store.table(store.create_bucket()))
        (home / "buckets.toml").chmod(0o600)
        with service(place, "home") as server, skerry.Client(server.url) as client:
            sandbox = client.sandbox("bench-storage")
            done = sandbox.exec("/run/skerry/bin/python3", args=["-c", FILL, str(size)])
            expect(done.success, done.stderr)
            try:
                yield sandbox
            finally:
                sandbox.destroy()
    finally:
        store.stop()
        shutil.rmtree(place / "s3")


PATHS = {"backups": backups}
