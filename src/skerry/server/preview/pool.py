"""Connections to servers inside sandboxes, opened when needed and kept a while for the next request."""

from __future__ import annotations

import asyncio
import socket
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from skerry.control.exposures import Exposure
from skerry.control.registry import Registry
from skerry.errors import PortNotListeningError, PreviewAsleepError, SandboxLostError
from skerry.server.preview.upstream import Upstream

if TYPE_CHECKING:
    from skerry.runtime.runtime import Runtime

CONNECT_SECONDS = 10.0
IDLE_SECONDS = 15.0
MOST_IDLE = 64

Key = tuple[str, int]
Revive = Callable[[Exposure], Awaitable[bool]]


async def _nobody(_: Exposure) -> bool:
    return False


class Pool:
    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self.revive: Revive = _nobody
        """Whoever can start what should listen there; says whether it has."""
        self._idle: defaultdict[Key, dict[Upstream, asyncio.TimerHandle]] = defaultdict(dict)

    def take(self, exposure: Exposure) -> Upstream | None:
        """One that waits for a request, the latest used first."""
        key = (exposure.sandbox_id, exposure.port)
        waiting = self._idle.get(key)
        if not waiting:
            return None
        runtime = self._registry.peek(exposure.sandbox_id)
        while waiting:
            upstream, timer = waiting.popitem()
            timer.cancel()
            upstream.when_lost = None
            if upstream.runtime is runtime and not upstream.closed:
                return upstream
            upstream.close()  # of a machine that sleeps, or has slept since
        return None

    async def connect(self, exposure: Exposure) -> Upstream:
        """A new one. Wakes a sandbox whose exposure says so."""
        if exposure.wake_on_request:
            async with self._registry.use(exposure.sandbox_id) as woken:
                try:
                    return await self._open(woken, exposure)
                except PortNotListeningError:
                    if not await self.revive(exposure):
                        raise
                return await self._open(woken, exposure)
        runtime = self._registry.peek(exposure.sandbox_id)
        if runtime is None:
            raise _asleep(exposure)
        return await self._open(runtime, exposure)

    def give_back(self, exposure: Exposure, upstream: Upstream) -> None:
        """Keep it for the next request, or close it when it is fit for none."""
        key = (exposure.sandbox_id, exposure.port)
        waiting = self._idle[key]
        if not upstream.reusable or len(waiting) >= MOST_IDLE:
            upstream.forget()
            if not waiting:
                del self._idle[key]
            return
        upstream.rest_idle()
        waiting[upstream] = asyncio.get_running_loop().call_later(IDLE_SECONDS, upstream.close)
        upstream.when_lost = lambda: self._lost(key, upstream)

    def _lost(self, key: Key, upstream: Upstream) -> None:
        timer = self._idle[key].pop(upstream, None)
        if timer is not None:
            timer.cancel()
        if not self._idle[key]:
            del self._idle[key]

    async def _open(self, runtime: Runtime, exposure: Exposure) -> Upstream:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                sock = await runtime.portal.connect(exposure.port)
        except SandboxLostError:
            raise _asleep(exposure) from None
        except (OSError, TimeoutError):
            raise PortNotListeningError(
                f"Service on port {exposure.port} is not responding; nothing in {exposure.sandbox!r} listens there.",
                hint="Start a server inside that listens there; on 127.0.0.1 or on all addresses, both will do.",
                details={"sandboxId": exposure.sandbox, "port": exposure.port, "retryAfter": 2},
            ) from None
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _, upstream = await loop.create_connection(lambda: Upstream(runtime), sock=sock)
        except BaseException:
            sock.close()
            raise
        return upstream


def _asleep(exposure: Exposure) -> PreviewAsleepError:
    return PreviewAsleepError(
        f"Sandbox {exposure.sandbox!r} sleeps, and this preview does not wake it.",
        hint="Use the sandbox to wake it, or expose the port with wake_on_request.",
        details={"sandboxId": exposure.sandbox, "port": exposure.port},
    )
