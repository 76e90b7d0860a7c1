"""The hot paths: what each costs over HTTP from the SDK, beside what its rivals cost."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Callable
from functools import partial

import skerry
from skerry.settings import SPARES
from tests.bench.engine import Engine
from tests.bench.report import Row
from tests.bench.samples import Contestant, Samples, milliseconds, reason, take_turns
from tests.bench.service import Service, proportional_megabytes, service
from tests.bench.stand import Stand

POOL = 2
SETTLED = 3.0
"""Seconds in which a server that nobody asks anything has made its spares."""
CROWD = 100
KILOBYTE = "x" * 1023 + "\n"
OUTPUT = 5_000_000
LARGE = 100_000_000


class WrongAnswerError(Exception):
    """A path answered something else than it should have, so that its time means nothing."""


def expect(condition: bool, sentence: str) -> None:
    if not condition:
        raise WrongAnswerError(sentence)


def create(stand: Stand) -> list[Row]:
    made: list[skerry.Sandbox] = []
    outputs: list[float] = []

    def ours() -> float:
        sandbox = stand.client.sandbox(stand.fresh_name())
        made.append(sandbox)
        return milliseconds(lambda: expect(sandbox.exec("echo hi").stdout == "hi\n", "The command did not say hi."))

    def destroy() -> None:
        for sandbox in made:
            sandbox.destroy()
        made.clear()

    def unconnected(engine: Engine) -> float:
        output, end = engine.run("echo", "hi")
        outputs.append(output)
        return end

    def connected(engine: Engine) -> float:
        return engine.run("echo", "hi", network="bridge")[1]

    # Judged by `docker run` as people type it; without a network, which our sandboxes do not have either, it is faster.
    bare = stand.docker("docker run --rm --network none", unconnected, stand.counts.docker_runs)
    docker = bare
    if isinstance(stand.engine, Engine) and stand.engine.bridged:
        docker = stand.docker("docker run --rm", connected, stand.counts.docker_runs)
    rivals = [docker] if docker is bare else [docker, bare]
    rivals.append(
        Contestant("bwrap", lambda: milliseconds(lambda: stand.bubblewrap.run("echo", "hi")), stand.counts.create)
    )
    ours()
    destroy()
    samples = take_turns(Contestant("Skerry", ours, stand.counts.create), *rivals, after=destroy)
    ratio = docker.samples.p50 / samples.p50 if docker.samples else None
    if bare.samples:
        rivals.insert(rivals.index(bare) + 1, Contestant("… to its output only", values=outputs))
    goals = (samples.p50 <= 60, None if ratio is None else ratio >= 8)
    reach = "p50 ≤ 60 ms and 8x docker run"
    return [Row("create", "create, to the first command's output", reach, samples, rivals=rivals, goals=goals)]


def warm(stand: Stand) -> list[Row]:
    with service(stand.scratch, "pool", warm_pool=POOL) as server, skerry.Client(server.url) as client:

        def ours() -> float:
            server.await_pool()
            sandbox = client.sandbox(stand.fresh_name())
            spent = milliseconds(lambda: expect(sandbox.exec("echo hi").stdout == "hi\n", "The command was silent."))
            sandbox.destroy()
            return spent

        ours()
        samples = take_turns(Contestant("Skerry", ours, stand.counts.warm))
    return [Row("warm", "the same from a warm pool", "p50 ≤ 15 ms", samples, goals=[samples.p50 <= 15])]


def spare(stand: Stand) -> list[Row]:
    """As `skerry serve` does it: a machine without files becomes the sandbox. As many are asked for, one after the
    other, as a fresh server has."""

    def ours() -> list[float]:
        with service(stand.scratch, stand.fresh_name(), spares=SPARES) as server, skerry.Client(server.url) as client:
            time.sleep(SETTLED)
            return [milliseconds(partial(hail, client.sandbox(f"spare-{number}"))) for number in range(SPARES)]

    def hail(sandbox: skerry.Sandbox) -> None:
        expect(sandbox.exec("echo hi").stdout == "hi\n", "The command was silent.")

    samples = Samples([spent for _ in range(stand.counts.large) for spent in ours()])
    return [Row("spare", "the same from a spare", "p50 ≤ 15 ms", samples, goals=[samples.p50 <= 15])]


def execute(stand: Stand) -> list[Row]:
    def ours() -> float:
        return milliseconds(lambda: expect(stand.sandbox.exec("true").success, "true was false."))

    docker = stand.docker_exec(
        "docker exec",
        lambda engine, container: milliseconds(lambda: engine.execute(container, "true")),
        stand.counts.docker_execs,
    )
    samples = take_turns(Contestant("Skerry", ours, stand.counts.small), docker)
    goals = (samples.p50 <= 2.5, samples.p95 <= 8)
    reach = "p50 ≤ 2.5 ms, p95 ≤ 8 ms"
    return [Row("exec", "exec of true in a session", reach, samples, rivals=[docker], goals=goals)]


def stream(stand: Stand) -> list[Row]:
    def ours() -> float:
        start = time.perf_counter()
        with stand.sandbox.exec_stream("true") as events:
            for event in events:
                if event.type == "complete":
                    return (time.perf_counter() - start) * 1000
        raise WrongAnswerError("The stream ended without a complete event.")

    samples = take_turns(Contestant("Skerry", ours, stand.counts.small))
    path = "streamed exec, to its complete event"
    return [Row("stream", path, "p50 ≤ 5 ms", samples, goals=[samples.p50 <= 5])]


def read(stand: Stand) -> list[Row]:
    stand.sandbox.write_file("small.txt", KILOBYTE)

    def ours() -> float:
        return milliseconds(lambda: expect(stand.sandbox.read_file("small.txt") == KILOBYTE, "Another text was read."))

    samples = take_turns(Contestant("Skerry", ours, stand.counts.small))
    return [Row("read", "read 1 KB", "p50 ≤ 1.5 ms", samples, goals=[samples.p50 <= 1.5])]


def write(stand: Stand) -> list[Row]:
    def ours() -> float:
        return milliseconds(
            lambda: expect(stand.sandbox.write_file("small.txt", KILOBYTE).bytes == 1024, "Not all was written.")
        )

    stand.sandbox.write_file("small.txt", "")
    samples = take_turns(Contestant("Skerry", ours, stand.counts.small))
    return [Row("write", "write 1 KB", "p50 ≤ 1.5 ms", samples, goals=[samples.p50 <= 1.5])]


def listing(stand: Stand) -> list[Row]:
    stand.sandbox.exec("mkdir -p thousand && cd thousand && touch $(seq 1000); cd ..")

    def ours() -> float:
        return milliseconds(lambda: expect(len(stand.sandbox.list_files("thousand")) == 1000, "Files are missing."))

    samples = take_turns(Contestant("Skerry", ours, stand.counts.list))
    return [Row("list", "list a directory of 1,000", "p50 ≤ 10 ms", samples, goals=[samples.p50 <= 10])]


def output(stand: Stand) -> list[Row]:
    make = f"yes 'the quick brown fox jumps over the lazy dog' | head -c {OUTPUT} > /tmp/output"
    stand.sandbox.exec(make)

    def ours() -> float:
        return milliseconds(
            lambda: expect(len(stand.sandbox.exec("cat /tmp/output").stdout) == OUTPUT, "Output is missing.")
        )

    def docker(engine: Engine, container: str) -> float:
        if not rival.values:
            engine.execute(container, "sh", "-c", make)
        return milliseconds(
            lambda: expect(len(engine.execute(container, "cat", "/tmp/output")) == OUTPUT, "Output is missing.")
        )

    rival = stand.docker_exec("docker exec", docker, stand.counts.output)
    samples = take_turns(Contestant("Skerry", ours, stand.counts.output), rival)
    goals = [samples.p50 <= 60]
    return [Row("output", "5 MB of stdout in one exec", "p50 ≤ 60 ms", samples, rivals=[rival], goals=goals)]


def transfer(stand: Stand) -> list[Row]:
    """A file of 100 MB from disk to disk; up, down and cp in turn, each to a name that is free."""
    source, target = stand.scratch / "large", stand.scratch / "copy"
    source.write_bytes(bytes(range(256)) * (LARGE // 256))
    size = source.stat().st_size
    sandbox = stand.sandbox

    def up() -> float:
        if sandbox.exists("large"):
            sandbox.delete_file("large")
        return milliseconds(lambda: expect(sandbox.upload(source, "large").bytes == size, "Bytes are missing."))

    def freshly(copy: Callable[[], object]) -> float:
        target.unlink(missing_ok=True)
        spent = milliseconds(copy)
        expect(target.stat().st_size == size, "Bytes are missing.")
        return spent

    upload = Contestant("Skerry", up, stand.counts.large)
    download = Contestant("Skerry", lambda: freshly(lambda: sandbox.download("large", target)), stand.counts.large)
    cp = Contestant(
        "cp", lambda: freshly(lambda: subprocess.run(["cp", source, target], check=True)), stand.counts.large
    )
    try:
        take_turns(upload, download, cp)
    finally:
        for path in (source, target):
            path.unlink(missing_ok=True)
        sandbox.delete_file("large")
    rows = []
    for name, what, ours in (("upload", "a 100 MB file up", upload), ("download", "a 100 MB file down", download)):
        if ours.failure is not None or cp.samples is None:
            rows.append(Row(name, what, "half of cp", failure=ours.failure or cp.failure))
            continue
        samples = Samples(ours.values)
        goals = [cp.samples.p50 / samples.p50 >= 0.5]
        rows.append(Row(name, what, "half of cp: ≥ 0.5x", samples, rivals=[cp], goals=goals))
    return rows


def crowd(stand: Stand) -> list[Row]:
    """Many at once on a server of their own; what the last crowd weighs is measured while it is there."""
    spent: list[float] = []
    weights: list[float] = []

    def floor() -> float:
        return milliseconds(lambda: stand.bubblewrap.run_together(CROWD, "echo", "hi"))

    with service(stand.scratch, "crowd") as server:
        for _ in range(stand.counts.crowds):
            seconds, weight = asyncio.run(_crowd(stand, server))
            spent.append(seconds * 1000)
            weights.append(weight)
    bwrap = Contestant("bwrap", floor, stand.counts.crowds)
    together, memory = Samples(spent), Samples(weights)
    try:
        bwrap.values.extend(floor() for _ in range(stand.counts.crowds))
    except OSError as error:
        bwrap.failure = reason(error)
    path = f"{CROWD} creates with a first command, at once"
    return [
        Row("crowd", path, "≤ 4 s on 2 cores, none failing", together, rivals=[bwrap], goals=[together.p95 <= 4000]),
        Row(
            "memory",
            f"memory of an idle sandbox, {CROWD} alive (PSS)",
            "≤ 6 MB",
            memory,
            unit="MB",
            rivals=[_containers(stand)],
            goals=[memory.p95 <= 6],
        ),
    ]


async def _crowd(stand: Stand, server: Service) -> tuple[float, float]:
    async with skerry.AsyncClient(server.url) as client:
        sandboxes = [client.sandbox(stand.fresh_name()) for _ in range(CROWD)]
        start = time.perf_counter()
        results = await asyncio.gather(*(sandbox.exec("echo hi") for sandbox in sandboxes), return_exceptions=True)
        seconds = time.perf_counter() - start
        failed = [result for result in results if isinstance(result, BaseException) or result.stdout != "hi\n"]
        expect(not failed, f"{len(failed)} of {CROWD} failed, the first with: {failed[:1]}.")
        await asyncio.sleep(1)
        weight = proportional_megabytes(server.sandbox_processes()) / CROWD
        await asyncio.gather(*(sandbox.destroy() for sandbox in sandboxes))
    return seconds, weight


def _containers(stand: Stand) -> Contestant:
    if isinstance(stand.engine, str):
        return Contestant("docker container and shim", failure=stand.engine)
    engine, count = stand.engine, stand.counts.containers
    name = f"docker container and shim, {count} alive"
    try:
        containers = [engine.container() for _ in range(count)]
        for container in containers:
            engine.execute(container, "echo", "hi")
        pids = [pid for container in containers for pid in engine.processes(container)]
        return Contestant(name, values=[proportional_megabytes(pids) / count])
    except (OSError, subprocess.SubprocessError) as error:
        return Contestant(name, failure=reason(error))


PATHS: dict[str, Callable[[Stand], list[Row]]] = {
    "create": create,
    "warm": warm,
    "spare": spare,
    "exec": execute,
    "stream": stream,
    "read": read,
    "write": write,
    "list": listing,
    "output": output,
    "transfer": transfer,
    "crowd": crowd,
}
RIVALLED_BY_DOCKER = frozenset({"create", "exec", "output", "crowd", "wake-freeze", "wake-hibernate"})
