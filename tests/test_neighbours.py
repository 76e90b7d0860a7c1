"""Noisy neighbours: whatever one sandbox does, commands in another take about as long as they do in peace."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

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
ROUNDS, COMMANDS = 6, 40
AT_MOST = 3.0


class Pair:
    """A server with a noisy sandbox and a quiet one."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def ask(self, path: str, **body: Any) -> dict[str, Any]:
        answer = await self._http.post(path, json=body)
        assert answer.status_code < 300, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def commands(self, count: int) -> list[float]:
        """How long each took for whoever asked, in milliseconds."""
        took = []
        for _ in range(count):
            began = time.perf_counter()
            assert (await self.ask("/v1/sandboxes/quiet/exec", command="echo hello"))["stdout"] == "hello\n"
            took.append((time.perf_counter() - began) * 1000)
            await asyncio.sleep(0.002)
        return took


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    server = ServerProcess(tmp_path, access_log=False)
    limits = {"memory": 256 << 20, "pids": 128, "disk": 64 << 20}
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        pair = Pair(http)
        await pair.ask("/v1/sandboxes", id="noisy", limits=limits, keepAlive=True)
        await pair.commands(20)
        yield pair
    await asyncio.to_thread(server.stop)


def p95(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.95)]


@pytest.mark.parametrize("noises", [["a busy loop"], ["a log flooder"], ["a disk filler"], list(NOISES)], ids=str)
async def test_commands_beside_noise_take_at_most_three_times_as_long(pair: Pair, noises: list[str]) -> None:
    for noise in noises:
        await pair.ask("/v1/sandboxes/noisy/processes", command=NOISES[noise])
    await asyncio.sleep(1)
    quiet: list[float] = []
    noisy: list[float] = []
    # In turns, because the machine has other things to do, too, and not always as many.
    for _ in range(ROUNDS):
        noisy += await pair.commands(COMMANDS)
        await pair.ask("/v1/sandboxes/noisy/sleep", stage="freeze")
        quiet += await pair.commands(COMMANDS)
        await pair.ask("/v1/sandboxes/noisy/wake")
        await asyncio.sleep(0.2)
    assert p95(noisy) <= AT_MOST * p95(quiet), f"{p95(noisy):.1f} ms beside noise, {p95(quiet):.1f} ms in peace"
