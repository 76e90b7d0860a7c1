"""A Docker Engine of the tests' own: Debian's, on a socket and a data directory of its own, for the whole run."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from skerry.models import Limits
from skerry.portal.contract import Portal
from skerry.providers.contract import Spec
from skerry.providers.docker.base import PACKAGES, bootstrapped, recipe
from skerry.providers.docker.machine import DockerMachine
from skerry.providers.docker.provider import DockerProvider
from skerry.runtime.runtime import Runtime
from skerry.settings import Settings
from tests.agents.sessions.conftest import SCRIPTED
from tests.bench.engine import IMAGE, Engine, cache
from tests.machines import nobody
from tests.server.conftest import ServerProcess

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    if os.geteuid() != 0:
        pytest.skip("only root can start an engine")
    with in_memory() as scratch:
        made = Engine(scratch, base_tarball)
        try:
            made.start()
            yield made
        finally:
            made.stop()


@contextmanager
def in_memory(size: str | None = None) -> Iterator[Path]:
    """A directory for an engine's files: on a disk they cost most of the time, and no test asks how they are kept.
    Given a size, it is one that is full with so much, and never the host's own."""
    place = Path(tempfile.mkdtemp(prefix="skerry-docker-"))
    place.chmod(0o755)  # for the users that an engine maps others to
    (available,) = (line.split()[1] for line in Path("/proc/meminfo").read_text().splitlines() if "MemAvail" in line)
    enough = size is not None or int(available) > 6 << 20
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size or '3g'},mode=755", "skerry-docker", str(place)]
    mounted = enough and subprocess.run(mount, check=size is not None).returncode == 0
    try:
        yield place
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(place)], check=True)
        shutil.rmtree(place)


def base_tarball() -> Path:
    """What `skerry image build-docker` makes an image of, made once and kept."""
    tarball = cache() / f"base-{hashlib.sha256(repr(recipe(PACKAGES)).encode()).hexdigest()[:16]}.tar"
    if not tarball.exists():
        fresh = tarball.with_name(f"{os.getpid()}.tar")
        asyncio.run(_bootstrap(fresh))
        fresh.rename(tarball)
    return tarball


async def _bootstrap(path: Path) -> None:
    with path.open("wb") as file:
        async for part in bootstrapped(PACKAGES):
            file.write(part)


@pytest.fixture(scope="session")
def settings(engine: Engine) -> dict[str, object]:
    """Of a server that uses this engine."""
    return {"provider": "docker", "docker_socket": str(engine.socket), "docker_image": IMAGE}


@pytest.fixture(scope="package")
async def provider(settings: dict[str, object]) -> AsyncIterator[DockerProvider]:
    home = Path(tempfile.mkdtemp(prefix="skerry-docker-home-"))
    provider = DockerProvider(Settings(home=home, **settings))  # type: ignore[arg-type]
    await provider.open()
    yield provider
    await provider.close()
    shutil.rmtree(home)


class Shared:
    """A machine for tests that leave it as it was; another one when some test has ended it."""

    def __init__(self, provider: DockerProvider) -> None:
        self._provider = provider
        self._machine: DockerMachine | None = None

    async def get(self) -> DockerMachine:
        if self._machine is None or self._machine.portal._lost is not None:
            await self.close()
            id = f"shared-{next(_numbers)}"
            self._machine = await self._provider.start(Spec(id=id, image="host", limits=Limits(pids=4096)), nobody)
        return self._machine

    async def close(self) -> None:
        if self._machine is not None:
            await self._machine.stop()
            await self._provider.forget(self._machine.id)
            self._machine = None


@pytest.fixture(scope="package")
async def shared(provider: DockerProvider) -> AsyncIterator[Shared]:
    shared = Shared(provider)
    yield shared
    await shared.close()


@pytest.fixture
async def portal(shared: Shared) -> Portal:
    return (await shared.get()).portal


@pytest.fixture
async def runtime(shared: Shared) -> AsyncIterator[Runtime]:
    machine = await shared.get()
    runtime = Runtime(machine.portal, env={"GREETING": "hello"}, on_process=nobody)
    await runtime.sessions.warm()
    yield runtime
    await runtime.close()
    for entered in machine.portals[1:]:  # which otherwise end with the machine
        await entered.close()
    left = await machine.portal.spawn(
        ["/bin/sh", "-c", "kill -9 -1; rm -rf /tmp/* /workspace/* /workspace/.[!.]*"], env={}, cwd="/", stdio=[]
    )
    await left.wait()


@pytest.fixture
async def machine(provider: DockerProvider) -> AsyncIterator[DockerMachine]:
    id = f"test-{next(_numbers)}"
    machine = await provider.start(Spec(id=id, image="host", limits=Limits(memory=256 << 20, pids=200)), nobody)
    yield machine
    await machine.stop()
    await provider.forget(id)


@pytest.fixture(scope="package")
def server(settings: dict[str, object]) -> Iterator[ServerProcess]:
    home = Path(tempfile.mkdtemp(prefix="skerry-docker-server-"))
    process = ServerProcess(home, first=SCRIPTED, **settings)
    yield process
    assert process.stop() == 0
    shutil.rmtree(home)
