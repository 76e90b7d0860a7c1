"""Noisy neighbours: whatever one sandbox does, commands in another take about as long as they do in peace."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import httpx
import pytest

from skerry.control.open import open_registry
from skerry.control.registry import Registry
from skerry.models import CreateSandbox, ExecRequest, Limits, SleepSandbox, StartProcess
from skerry.providers.local.turns import NICE, come_first
from skerry.settings import Settings
from tests.providers.users import needs_root
from tests.server.conftest import ServerProcess

pytestmark = [needs_root, pytest.mark.timeout(240)]

NOISES = {
    "a busy loop": "for i in 1 2 3 4; do while :; do :; done & done; wait",
    "a fork bomb": "bomb() { bomb | bomb & }; while :; do bomb 2>/dev/null; sleep 0.1; done",
    "a memory hog": "while :; do python3 -c 'bytearray(1 << 30)'; done",
    "a disk filler": "while :; do head -c 1G /dev/zero >/workspace/big; rm -f /workspace/big; done",
    "a log flooder": "yes 'what it says is of no interest to anyone'",
}
LIMITS = Limits(memory=256 << 20, pids=128, disk=64 << 20)
ROUNDS, COMMANDS = 6, 40
AT_MOST = 3.0


class Pair(Protocol):
    """A noisy sandbox and a quiet one."""

    async def noise(self, command: str) -> None: ...

    async def command(self) -> str:
        """What a command in the quiet one says."""
        ...

    async def freeze(self) -> None: ...

    async def wake(self) -> None: ...


class Near:
    """Within the process, as the server itself sees it: what the way to it takes is not in the measure."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def noise(self, command: str) -> None:
        async with self._registry.use("noisy") as runtime:
            await runtime.processes.start(StartProcess(command=command))

    async def command(self) -> str:
        async with self._registry.use("quiet") as runtime:
            return (await runtime.exec(ExecRequest(command="echo hello"))).stdout

    async def freeze(self) -> None:
        await self._registry.sleep("noisy", SleepSandbox(stage="freeze"))

    async def wake(self) -> None:
        await self._registry.wake("noisy")


class Far:
    """As a client sees it, which has no place before the others."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def ask(self, path: str, **body: Any) -> dict[str, Any]:
        answer = await self._http.post(path, json=body)
        assert answer.status_code < 300, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def noise(self, command: str) -> None:
        await self.ask("/v1/sandboxes/noisy/processes", command=command)

    async def command(self) -> str:
        return str((await self.ask("/v1/sandboxes/quiet/exec", command="echo hello"))["stdout"])

    async def freeze(self) -> None:
        await self.ask("/v1/sandboxes/noisy/sleep", stage="freeze")

    async def wake(self) -> None:
        await self.ask("/v1/sandboxes/noisy/wake")


def weigh(nice: int) -> None:
    """This session against others, where the kernel weighs them. Processes of no session stand for themselves."""
    with suppress(FileNotFoundError):
        try:
            Path("/proc/self/autogroup").write_text(str(nice))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise


@contextmanager
def as_a_server() -> Iterator[None]:
    """This thread has the place that the thread of a server has, which leads a session of its own."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    weigh(NICE)
    os.setpriority(os.PRIO_PROCESS, 0, 0)
    come_first()
    assert os.getpriority(os.PRIO_PROCESS, 0) < 0
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, 0, before)
        weigh(0)


@asynccontextmanager
async def near(home: Path) -> AsyncIterator[Near]:
    with as_a_server():
        registry = await open_registry(Settings(home=home / "home"))
        try:
            await registry.create(CreateSandbox(id="noisy", limits=LIMITS, keep_alive=True))
            yield Near(registry)
        finally:
            await registry.close()


@asynccontextmanager
async def far(home: Path) -> AsyncIterator[Far]:
    server = ServerProcess(home, access_log=False)
    try:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            pair = Far(http)
            limits = LIMITS.model_dump(mode="json", by_alias=True, exclude_none=True)
            await pair.ask("/v1/sandboxes", id="noisy", limits=limits, keepAlive=True)
            yield pair
    finally:
        await asyncio.to_thread(server.stop)


@pytest.fixture(params=[near, far])
async def pair(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Pair]:
    async with request.param(tmp_path) as pair:
        await commands(pair, 20)
        yield pair


async def commands(pair: Pair, count: int) -> list[float]:
    """How long each took, in milliseconds."""
    took = []
    for _ in range(count):
        began = time.perf_counter()
        assert await pair.command() == "hello\n"
        took.append((time.perf_counter() - began) * 1000)
        await asyncio.sleep(0.002)
    return took


def p95(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.95)]


@pytest.mark.parametrize("noises", [["a busy loop"], ["a log flooder"], ["a disk filler"], list(NOISES)], ids=str)
async def test_commands_beside_noise_take_at_most_three_times_as_long(pair: Pair, noises: list[str]) -> None:
    for noise in noises:
        await pair.noise(NOISES[noise])
    await asyncio.sleep(1)
    quiet: list[float] = []
    noisy: list[float] = []
    # In turns, because the machine has other things to do, too, and not always as many.
    for _ in range(ROUNDS):
        noisy += await commands(pair, COMMANDS)
        await pair.freeze()
        quiet += await commands(pair, COMMANDS)
        await pair.wake()
        await asyncio.sleep(0.2)
    assert p95(noisy) <= AT_MOST * p95(quiet), f"{p95(noisy):.1f} ms beside noise, {p95(quiet):.1f} ms in peace"
