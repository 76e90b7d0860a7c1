"""The test stand: one server with one sandbox in it, the rivals, and a place for files, each made when first needed."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import skerry
from tests.bench.bubblewrap import Bubblewrap, bubblewrap
from tests.bench.engine import Engine
from tests.bench.kernel import Kernel, kernel
from tests.bench.samples import Contestant, reason
from tests.bench.service import Service, service


@dataclass(frozen=True)
class Counts:
    """How often each thing is measured."""

    create: int = 40
    warm: int = 30
    small: int = 400
    list: int = 60
    output: int = 20
    large: int = 7
    teams: int = 20
    crowds: int = 3
    docker_runs: int = 15
    docker_execs: int = 30
    containers: int = 10
    contexts: int = 40
    kernels: int = 7
    figures: int = 30
    loads: int = 3
    layers: int = 40
    commits: int = 2
    backup: int = 10**9


FULL = Counts()
QUICK = Counts(
    create=15,
    warm=10,
    small=100,
    list=20,
    output=8,
    large=3,
    teams=6,
    crowds=1,
    docker_runs=5,
    docker_execs=10,
    containers=4,
    contexts=15,
    kernels=3,
    figures=10,
    loads=1,
    layers=15,
    commits=1,
    backup=2 * 10**8,
)


class Stand:
    def __init__(self, scratch: Path, engine: Engine | str, counts: Counts) -> None:
        self.scratch = scratch
        self.engine = engine
        self.counts = counts
        self._stack = ExitStack()
        self._numbers = itertools.count(1)
        self._server: Service | None = None
        self._client: skerry.Client | None = None
        self._sandbox: skerry.Sandbox | None = None
        self._bubblewrap: Bubblewrap | None = None
        self._kernel: Kernel | None = None
        self._container: str | None = None

    def __enter__(self) -> Stand:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def fresh_name(self) -> str:
        return f"bench-{next(self._numbers)}"

    @property
    def server(self) -> Service:
        if self._server is None:
            self._server = self._stack.enter_context(service(self.scratch, "home"))
        return self._server

    @property
    def client(self) -> skerry.Client:
        if self._client is None:
            self._client = self._stack.enter_context(skerry.Client(self.server.url))
        return self._client

    @property
    def sandbox(self) -> skerry.Sandbox:
        """One that runs and has had its first command."""
        if self._sandbox is None:
            self._sandbox = self.client.sandbox("bench")
            self._sandbox.exec("true")
        return self._sandbox

    @property
    def kernel(self) -> Kernel:
        if self._kernel is None:
            self._kernel = self._stack.enter_context(kernel(self.scratch))
        return self._kernel

    @property
    def bubblewrap(self) -> Bubblewrap:
        if self._bubblewrap is None:
            self._bubblewrap = self._stack.enter_context(bubblewrap(self.scratch))
        return self._bubblewrap

    def docker(self, name: str, work: Callable[[Engine], float], count: int) -> Contestant:
        engine = self.engine
        if isinstance(engine, str):
            return Contestant(name, failure=engine)
        return Contestant(name, lambda: work(engine), count)

    def docker_exec(self, name: str, work: Callable[[Engine, str], float], count: int) -> Contestant:
        """The same in a container that already runs."""
        if isinstance(self.engine, Engine) and self._container is None:
            try:
                self._container = self.engine.container()
            except subprocess.SubprocessError as error:
                return Contestant(name, failure=reason(error))
        return self.docker(name, lambda engine: work(engine, self._container or ""), count)
