"""``python -m tests.bench``: every hot path of Skerry with its p50 and p95, beside its rivals in the same run."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

from skerry.errors import SkerryError
from tests.bench import (
    agents,
    auth,
    cloudflare,
    code,
    egress,
    layers,
    limits,
    mounts,
    paths,
    previews,
    record,
    sleep,
    storage,
    tasks,
)
from tests.bench.engine import Engine, engine
from tests.bench.paths import RIVALLED_BY_DOCKER, WrongAnswerError
from tests.bench.report import Report, Row
from tests.bench.samples import reason
from tests.bench.stand import FULL, QUICK, Stand

CORES = 2
TOPICS = {
    "code": code.PATHS,
    "previews": previews.PATHS,
    "layers": layers.PATHS,
    "limits": limits.PATHS,
    "sleep": sleep.PATHS,
    "mounts": mounts.PATHS,
    "storage": storage.PATHS,
    "auth": auth.PATHS,
    "record": record.PATHS,
    "egress": egress.PATHS,
    "cloudflare": cloudflare.PATHS,
    "agents": agents.PATHS,
    "tasks": tasks.PATHS,
}
PATHS = {**paths.PATHS, **{name: path for topic in TOPICS.values() for name, path in topic.items()}}
GROUPS = {name: list(topic) for name, topic in TOPICS.items()}
ELSEWHERE = (
    "Cloudflare's own container server, measured elsewhere on such a machine: "
    "exec 8.2 ms (p95 52 ms), streamed exec 112 ms."
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer samples, about a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report to FILE")
    names = [*PATHS, *GROUPS]
    parser.add_argument("--only", action="append", choices=names, metavar="NAME", help=f"one of {', '.join(names)}")
    options = parser.parse_args()
    # So that what was started is stopped, and what was made is deleted, however the bench ends.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    chosen = [name for asked in options.only or PATHS for name in GROUPS.get(asked, [asked])]
    report = measure(chosen, quick=options.quick)
    report.print()
    if options.json is not None:
        options.json.write_text(json.dumps(report.to_json(), indent=2) + "\n")
    return 1 if report.failed else 0


def measure(names: list[str], *, quick: bool) -> Report:
    busy = os.getloadavg()[0]
    # The same number everywhere, for us and for all rivals, who inherit it.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    report = Report(machine())
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="skerry-bench-")))
        rival: Engine | str = "not asked for"
        if (RIVALLED_BY_DOCKER | layers.RIVALLED_BY_DOCKER).intersection(names):
            say("starting a Docker engine")
            rival = stack.enter_context(engine(scratch))
        stand = stack.enter_context(Stand(scratch, rival, QUICK if quick else FULL))
        for name in names:
            say(f"measuring {name}")
            report.rows += attempt(name, stand)
        if isinstance(rival, Engine):
            report.notes.append(f"Docker {rival.storage()} and an image of Debian minbase.")
    if {"exec", "stream"}.intersection(names):
        report.notes.append(ELSEWHERE)
    if set(cloudflare.PATHS).intersection(names):
        report.notes.append(cloudflare.THEIRS)
    if busy > CORES / 2:
        report.notes.append(f"The machine was busy when this began (load {busy:.1f}): times may be too high.")
    return report


def attempt(name: str, stand: Stand) -> list[Row]:
    try:
        return PATHS[name](stand)
    except (SkerryError, WrongAnswerError, OSError, subprocess.SubprocessError) as error:
        return [Row(name, name, "", failure=reason(error))]


def machine() -> dict[str, Any]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return {
        "Skerry": version("skerry"),
        "Linux": platform.release().split("-")[0],
        "Python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "GB of memory": round(memory),
    }


def say(what: str) -> None:
    print(f"… {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
