"""A bucket mounted in a sandbox, beside ``rclone copy`` to and from the same S3 server."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import skerry
from tests.bench.paths import expect
from tests.bench.report import Row
from tests.bench.samples import Contestant, milliseconds, take_turns
from tests.bench.service import service
from tests.bench.stand import Stand
from tests.s3 import S3

SIZE = 200 * 1000 * 1000
SHARE = 0.4
PREFIX = "bench"
PATH = "/persist"


@dataclass
class Course:
    sandbox: skerry.Sandbox
    data: Path
    rclone: Rclone | None


@dataclass
class Rclone:
    """The program, and a bucket of the server as it knows it."""

    server: S3
    bucket: str

    def copy(self, source: str, target: str) -> None:
        options = {
            "TYPE": "s3",
            "PROVIDER": "Other",
            "ENDPOINT": self.server.endpoint,
            "ACCESS_KEY_ID": self.server.access_key,
            "SECRET_ACCESS_KEY": self.server.secret_key,
        }
        environment = {f"RCLONE_CONFIG_IT_{name}": value for name, value in options.items()}
        environment |= {"PATH": os.environ["PATH"], "RCLONE_CONFIG": "/dev/null"}
        subprocess.run(["rclone", "copyto", source, target], env=environment, capture_output=True, check=True)

    def object(self, name: str) -> str:
        return f"it:{self.bucket}/{PREFIX}/{name}"


def write(stand: Stand) -> list[Row]:
    with _course(stand) as course:
        names = iter(range(1000))

        def ours() -> float:
            return milliseconds(lambda: _run(course, f"cp /tmp/data {PATH}/{next(names)}"))

        def theirs(rclone: Rclone) -> float:
            return milliseconds(lambda: rclone.copy(str(course.data), rclone.object(f"theirs-{next(names)}")))

        _run(course, f"cp /tmp/data {PATH}/first && cmp /tmp/data {PATH}/first")
        return [_compared("mount-write", "200 MB written to a mounted bucket", stand, course, ours, theirs)]


def read(stand: Stand) -> list[Row]:
    with _course(stand) as course:
        # Each is read once: neither the kernel nor the server has anything of it.
        names = [str(number) for number in range(stand.counts.large + 1)]
        for name in names:
            _run(course, f"cp /tmp/data {PATH}/{name}")
        course.sandbox.unmount_bucket(PATH)
        course.sandbox.mount_bucket("bench", PATH, PREFIX)
        _run(course, f"cmp /tmp/data {PATH}/{names.pop()}")
        target = course.data.with_name("copy")

        def ours() -> float:
            return milliseconds(lambda: _run(course, f"cp {PATH}/{names.pop()} /tmp/copy"))

        def theirs(rclone: Rclone) -> float:
            return milliseconds(lambda: rclone.copy(rclone.object("0"), str(target)))

        return [_compared("mount-read", "200 MB read from a mounted bucket", stand, course, ours, theirs, target)]


def _compared(
    name: str,
    path: str,
    stand: Stand,
    course: Course,
    ours: Callable[[], float],
    theirs: Callable[[Rclone], float],
    left: Path | None = None,
) -> Row:
    count = stand.counts.large
    rclone = course.rclone
    rival = Contestant("rclone", failure="rclone is not installed")
    if rclone is not None:
        rival = Contestant("rclone", lambda: theirs(rclone), count)

    def clean() -> None:
        _run(course, "rm -f /tmp/copy")
        if left is not None:
            left.unlink(missing_ok=True)

    samples = take_turns(Contestant("Skerry", ours, count), rival, after=clean)
    reached = None if rival.samples is None else rival.samples.p50 / samples.p50 >= SHARE
    return Row(name, path, f"≥ {SHARE:.0%} of rclone's speed", samples, rivals=[rival], goals=(reached,))


def _run(course: Course, command: str) -> None:
    done = course.sandbox.exec(command)
    expect(done.exit_code == 0, f"{command} failed: {done.stderr}")


@contextmanager
def _course(stand: Stand) -> Iterator[Course]:
    place = stand.scratch / "mounts"
    (place / "s3").mkdir(parents=True)
    (place / "home").mkdir()
    server = S3(place / "s3")
    server.start()
    try:
        bucket = server.create_bucket()
        table = place / "home" / "buckets.toml"
        table.touch(0o600)
        table.write_text(f"[bench]\n{server.table(bucket)}")
        data = place / "data"
        data.write_bytes(os.urandom(SIZE))
        rclone = Rclone(server, bucket) if shutil.which("rclone") else None
        with service(place, "home") as running, skerry.Client(running.url) as client:
            sandbox = client.sandbox("bench")
            sandbox.mount_bucket("bench", PATH, PREFIX)
            sandbox.upload(data, "/tmp/data")
            yield Course(sandbox, data, rclone)
    finally:
        server.stop()
        shutil.rmtree(place)


PATHS: dict[str, Callable[[Stand], list[Row]]] = {"mount-write": write, "mount-read": read}
