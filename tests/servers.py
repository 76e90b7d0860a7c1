"""A real server in a process of its own, for tests that kill it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx

from tests import warm

_PROGRAM = """
import json
import sys
from pathlib import Path
from skerry.server.serve import run
from skerry.settings import Settings
settings = Settings.from_env(home=Path(sys.argv[1]), port=0, **json.loads(sys.argv[2]))
run(settings, on_ready=lambda url: print(url, flush=True))
"""


class Server:
    def __init__(self, home: Path, **settings: Any) -> None:
        self.home = home
        self.settings = settings
        self.process: subprocess.Popen[str]
        self.url = ""

    def start(self) -> Server:
        options = json.dumps(self.settings)
        self.process = warm.Popen(_PROGRAM, str(self.home), options, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        assert self.url.startswith("http"), f"the server did not start: exit code {self.process.wait(timeout=30)}"
        return self

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60)

    def family(self) -> set[int]:
        """The pids of everything that descends from the server, sandboxes' processes included."""
        parents = {}
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                try:
                    parents[int(entry)] = int(Path(f"/proc/{entry}/stat").read_text().rsplit(")", 1)[1].split()[1])
                except OSError:
                    continue
        family, frontier = set(), [self.process.pid]
        while frontier:
            parent = frontier.pop()
            children = [pid for pid, ppid in parents.items() if ppid == parent]
            family.update(children)
            frontier.extend(children)
        return family

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def kill(self) -> None:
        """As the kernel's out-of-memory killer would."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(timeout=60)
        assert self.process.stdout is not None
        self.process.stdout.close()


def vanished(pids: set[int], seconds: float = 20) -> set[int]:
    """Which of these processes are still there after at most ``seconds``."""
    until = time.monotonic() + seconds
    left = set(pids)
    while left and time.monotonic() < until:
        left = {pid for pid in left if _alive(pid)}
        time.sleep(0.02)
    return left


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def mounts_below(home: Path) -> list[str]:
    return [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(home) in line]
