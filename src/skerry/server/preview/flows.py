"""What is under way between visitors and apps: it counts as use of the sandbox, and ends when the server closes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from skerry.control.exposures import Exposure
from skerry.control.presence import Presence
from skerry.control.reception import Known, Reception
from skerry.control.registry import Registry

TICK = 0.25
LAST_WORDS = 2.0
"""How long what still flows may go on once the server closes. What is silent ends at once."""


class Flow:
    """One exchange or tunnel."""

    def __init__(self, presence: Presence, end: Callable[[], None]) -> None:
        self.end = end
        self._presence = presence
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()

    def stir(self, inward: bool = False) -> None:
        """Bytes have moved."""
        self._last = self._loop.time()
        self._presence.stir(inward)

    def silent_for(self) -> float:
        return self._loop.time() - self._last


class Flows:
    def __init__(self, registry: Registry, closing: asyncio.Event, reception: Reception) -> None:
        self._registry = registry
        self._reception = reception
        self._closing = closing
        self._closing_since: float | None = None
        self._flows: set[Flow] = set()
        self._ticking = False

    @contextmanager
    def begin(self, exposure: Exposure, end: Callable[[], None], known: Known | None = None) -> Iterator[Flow]:
        """A flow to a sandbox, which keeps it awake while bytes move; ``end`` must break it off.

        One that a key (``known``) gave the right to ends with it.
        """
        with ExitStack() as stack:
            if known is not None:
                stack.enter_context(self._reception.visit(known, end))
            presence = stack.enter_context(self._registry.attend(exposure.sandbox_id, wakes=exposure.wake_on_request))
            flow = Flow(presence, end)
            self._flows.add(flow)
            if not self._ticking:
                self._ticking = True
                asyncio.get_running_loop().call_later(TICK, self._tick)
            try:
                yield flow
            finally:
                self._flows.discard(flow)

    def _tick(self) -> None:
        if self._closing.is_set():
            now = asyncio.get_running_loop().time()
            self._closing_since = self._closing_since or now
            for flow in list(self._flows):
                if flow.silent_for() > TICK or now - self._closing_since > LAST_WORDS:
                    flow.end()
        self._ticking = bool(self._flows)
        if self._ticking:
            asyncio.get_running_loop().call_later(TICK, self._tick)
