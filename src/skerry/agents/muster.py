"""Where the members of a team wait for each other: first all have their machines, then all begin.

An agent that starts takes all the processor it can get, and the machines of the others would wait for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress

PATIENCE = 2.0
"""Seconds that one waits at most: more members than may work at a time do not all come."""


class Muster:
    def __init__(self, members: Iterable[str]) -> None:
        self._missing = set(members)
        self._complete = asyncio.Event()

    def do_without(self, member: str) -> None:
        """Nobody need wait for this one any more."""
        self._missing.discard(member)
        if not self._missing:
            self._complete.set()

    async def arrive(self, member: str) -> None:
        """One more is there; returns when all are."""
        self.do_without(member)
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE):
                await self._complete.wait()
