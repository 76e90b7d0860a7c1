"""The server under measurement, in a process of its own, and what its sandboxes weigh."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from skerry.providers.local.idmap import IdMap
from skerry.providers.local.trees import remove_tree
from tests.servers import Server

_PROGRAM = """
import json
import sys
from pathlib import Path
from skerry.server.serve import run
from skerry.settings import Settings
settings = Settings(home=Path(sys.argv[1]), port=0, **json.loads(sys.argv[2]))
run(settings, on_ready=lambda url: print(url, flush=True))
"""


class Service(Server):
    def __init__(self, home: Path, warm_pool: int, before: str = "", **settings: Any) -> None:
        """``before`` is Python that the server's process runs first."""
        super().__init__(home, warm_pool=warm_pool, **settings)
        self.before = before
        self.warm_pool = warm_pool

    def start(self) -> Service:
        argv = [sys.executable, "-c", self.before + _PROGRAM, str(self.home), json.dumps(self.settings)]
        # In a session of its own, so that Ctrl-C reaches the bench alone, which then stops the server. It writes a log
        # as servers do, a line for each request, and that is part of what is measured.
        with self.home.with_suffix(".log").open("w") as log:
            self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        if not self.url:
            raise OSError(f"The server did not start. {self.home.with_suffix('.log').read_text()[-2000:]}")
        return self

    def sandbox_processes(self) -> set[int]:
        """Everything below the launcher, which is the server's only child."""
        return {pid for pid in self.family() if parent(pid) != self.process.pid}

    def await_pool(self, patience: float = 20) -> None:
        """Until every machine of the pool has its shell; only with no sandbox in use."""
        until = time.monotonic() + patience
        while sum(_name(pid) == "bash" for pid in self.sandbox_processes()) != self.warm_pool:
            if time.monotonic() > until:
                raise OSError("The warm pool was not refilled.")
            time.sleep(0.01)
        time.sleep(0.05)


@contextmanager
def service(scratch: Path, name: str, warm_pool: int = 0, before: str = "", **settings: Any) -> Iterator[Service]:
    server = Service(scratch / name, warm_pool, before, **settings)
    try:
        yield server.start()
    finally:
        try:
            server.stop()
        except subprocess.TimeoutExpired:
            server.kill()
        remove_tree(server.home, IdMap.detect())
        server.home.with_suffix(".log").unlink()


def proportional_megabytes(pids: Iterable[int]) -> float:
    """PSS: memory that several processes share counts once, split among them."""
    total = 0
    for pid in pids:
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        total += next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
    return total * 1024 / 1e6


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def pid_inside(pid: int) -> int:
    """The number a process has in the innermost of its namespaces."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next(int(line.split()[-1]) for line in status.splitlines() if line.startswith("NSpid:"))


def parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0
