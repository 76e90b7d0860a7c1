from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from secrets import token_hex
from typing import IO

import httpx
import pytest

from tests import warm

PROGRAM = """
import ctypes, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: a test run that is killed leaves no server behind
from skerry.server.serve import run
from skerry.settings import Settings
run(Settings.model_validate_json(sys.argv[1]), on_ready=lambda url: print(url, flush=True))
"""


class ServerProcess:
    """A server of its own, in a process of its own, as `skerry serve` runs it; `first` is Python to run before."""

    def __init__(self, home: Path, *, log: IO[str] | None = None, first: str = "", **settings: object) -> None:
        self.home = home
        values = json.dumps({"home": str(home), "port": 0, "pool_size": 1 << 28, **settings})
        self.process = warm.Popen(first + PROGRAM, values, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        assert self.url, "the server did not start"

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return self.process.wait(60)


@pytest.fixture(scope="session")
def home() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="skerry-server-"))
    os.chmod(path, 0o711)
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="session")
def server(home: Path) -> Iterator[ServerProcess]:
    process = ServerProcess(home, receive_timeout=2.0)
    yield process
    assert process.stop() == 0


@pytest.fixture(scope="session")
async def http(server: ServerProcess) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture
async def box(http: httpx.AsyncClient) -> AsyncIterator[str]:
    """The path of a sandbox that is made by the first request and destroyed after the test."""
    path = f"/v1/sandboxes/test-{token_hex(4)}"
    yield path
    await http.delete(path)


@pytest.fixture
def shared() -> str:
    """One sandbox for tests that leave nothing behind in it but files in /tmp."""
    return "/v1/sandboxes/shared"
