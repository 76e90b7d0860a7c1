"""The way out of a sandbox, beside the same program on this machine, which has no door to go through."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.bench.paths import expect
from tests.bench.previews import ORIGIN, PATIENCE, PYTHON
from tests.bench.report import Row
from tests.bench.samples import ROUNDS, Contestant, Samples
from tests.bench.stand import Stand

VISITOR = Path(__file__).with_name("visitor.py")
PROXY = 61080
WAYS = {
    "http": "a request over a kept connection to the proxy",
    "fresh": "a request over a fresh connection through the proxy",
    "tunnel": "the same through a fresh tunnel (CONNECT)",
    "caught": "the same by a program that knows no proxy",
}


def small(stand: Stand) -> list[Row]:
    return [_small(stand, way) for way in WAYS]


def _small(stand: Stand, way: str) -> Row:
    count = max(stand.counts.small // ROUNDS, 1)
    ours, rival = Contestant("Skerry"), Contestant("direct")
    with _origin("page") as (host, port):
        inside, outside = _visitors(stand, host, port, way)
        inside(5), outside(5)
        for _ in range(ROUNDS):
            ours.values += inside(count)
            rival.values += outside(count)
    samples = Samples(ours.values)
    assert rival.samples is not None
    goals = [samples.p50 - rival.samples.p50 <= 2]
    return Row(f"egress-{way}", f"egress: {WAYS[way]}", "p50 ≤ 2 ms over direct", samples, rivals=[rival], goals=goals)


def large(stand: Stand) -> list[Row]:
    return [_large(stand, way) for way in ("fresh", "tunnel", "caught")]


def _large(stand: Stand, way: str) -> Row:
    ours, rival = Contestant("Skerry"), Contestant("direct")
    with _origin("large") as (host, port):
        inside, outside = _visitors(stand, host, port, way)
        inside(1), outside(1)
        for _ in range(stand.counts.large):
            ours.values += inside(1)
            rival.values += outside(1)
    samples = Samples(ours.values)
    assert rival.samples is not None
    goals = [rival.samples.p50 / samples.p50 >= 0.5]
    path = f"egress: 1 GB, {WAYS[way]}"
    return Row(f"egress-large-{way}", path, "50 % of direct: ≥ 0.5x", samples, rivals=[rival], goals=goals)


Visit = Callable[[int], list[float]]


def _visitors(stand: Stand, host: str, port: int, way: str) -> tuple[Visit, Visit]:
    sandbox = stand.sandbox
    sandbox.set_egress("allowlist", allow=[f"{host}:{port}"])
    sandbox.write_file("/tmp/visitor.py", VISITOR.read_text())

    def inside(count: int) -> list[float]:
        line = f"{PYTHON} -I /tmp/visitor.py {way} {host} {port} {PROXY} {count}"
        done = sandbox.exec(line)
        expect(done.exit_code == 0, done.stderr[-300:])
        return [float(value) for value in json.loads(done.stdout)]

    def outside(count: int) -> list[float]:
        direct = "kept" if way == "http" else "direct"
        line = [PYTHON, "-I", str(VISITOR), direct, host, str(port), "0", str(count)]
        said = subprocess.run(line, check=True, capture_output=True, text=True).stdout
        return [float(value) for value in json.loads(said)]

    return inside, outside


@contextmanager
def _origin(kind: str) -> Iterator[tuple[str, int]]:
    """A server on an address of this machine that is not its loopback's, which means another one inside."""
    host = _address()
    line = [PYTHON, "-I", str(ORIGIN), kind, "0", host]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as origin:
        try:
            assert origin.stdout is not None
            said = origin.stdout.readline()
            expect(said != "", "The server to compare with did not start.")
            yield host, int(said)
        finally:
            origin.kill()
            origin.wait(PATIENCE)


def _address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect(("192.0.2.1", 9))  # sends nothing: the kernel only says from where it would
        return str(sock.getsockname()[0])


PATHS: dict[str, Callable[[Stand], list[Row]]] = {"egress-small": small, "egress-large": large}
