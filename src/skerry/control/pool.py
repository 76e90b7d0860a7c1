"""Machines started in advance, so that a new sandbox is there at once."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import structlog

from skerry.control.egress import Egress
from skerry.control.limits import AT_START
from skerry.egress.door import Door
from skerry.errors import SkerryError
from skerry.models import Limits, ProcessInfo
from skerry.providers.contract import Machine, Provider, Spec
from skerry.runtime.faults import Faults
from skerry.runtime.interpreter.pool import Provision
from skerry.runtime.runtime import Runtime

log = structlog.get_logger(__name__)

PREFIX = ".warm-"
IMAGE = "host"
RETRY = 5.0
BREATH = 0.05
"""Seconds before refilling, so that whoever has just taken a machine runs the first command undisturbed."""


async def _nobody(*_: object) -> None:
    return None


@dataclass
class Warm:
    """A machine nobody has asked for yet. What it reports goes to whoever takes it."""

    id: str
    machine: Machine
    runtime: Runtime
    limits: Limits
    door: Door | None
    on_death: Callable[[str], Awaitable[None]] = _nobody
    on_process: Callable[[ProcessInfo], Awaitable[None]] = _nobody


class Pool:
    """Keeps ``size`` machines of the host image ready, and refills itself in the background."""

    def __init__(self, provider: Provider, size: int, provision: Provision, limits: Limits, egress: Egress) -> None:
        """``limits`` are those of a sandbox that asks for none."""
        self._provider = provider
        self._limits = limits
        self._egress = egress
        self._provision = provision
        self._size = size
        self._ready: list[Warm] = []
        self._wanted = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None

    def open(self) -> None:
        if self._size:
            self._wanted.set()
            self._worker = asyncio.get_running_loop().create_task(self._refill())

    @property
    def ready(self) -> int:
        return len(self._ready)

    def take(self, image: str, limits: Limits, toolboxes: Sequence[str] = ()) -> Warm | None:
        fits = not toolboxes and all(getattr(limits, name) == getattr(self._limits, name) for name in AT_START)
        if image != IMAGE or not self._ready or not fits:
            return None
        self._wanted.set()
        return self._ready.pop(0)

    async def _refill(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            await asyncio.sleep(BREATH)
            while len(self._ready) < self._size:
                try:
                    self._ready.append(await self._make())
                except SkerryError as error:
                    log.warning("the warm pool could not be refilled", reason=error.message)
                    await asyncio.sleep(RETRY)

    async def _make(self) -> Warm:
        id = f"{PREFIX}{secrets.token_hex(6)}"
        warm: Warm | None = None

        async def died(reason: str) -> None:
            if warm is not None and warm in self._ready:
                self._ready.remove(warm)
                if warm.door is not None:
                    await warm.door.close()
                await self._provider.forget(id)
                self._wanted.set()
            elif warm is not None:
                await warm.on_death(reason)

        async def process(info: ProcessInfo) -> None:
            if warm is not None:
                await warm.on_process(info)

        machine = await self._provider.start(Spec(id=id, image=IMAGE, limits=self._limits), died)
        door = await self._egress.door(machine)
        faults = Faults(machine.met, self._limits, self._provider.full)
        runtime = machine.runtime(
            machine.portal, env=self._egress.variables(), on_process=process, provision=self._provision, faults=faults
        )
        warm = Warm(id, machine, runtime, self._limits, door)
        await warm.runtime.sessions.warm()
        return warm

    async def close(self) -> None:
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
        for warm in self._ready:
            await warm.runtime.close()
            if warm.door is not None:
                await warm.door.close()
            with contextlib.suppress(SkerryError):
                await warm.machine.stop()
            await self._provider.forget(warm.id)
        self._ready.clear()
