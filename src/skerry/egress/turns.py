"""Whoever moves much waits for its turn: a sandbox in a hurry keeps neither the others nor the server waiting.

Reading from a socket that always has more, and writing to one that always takes it, never comes back to the event
loop by itself.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable

LARGE = 128 * 1024
"""So many bytes are one turn, where they pass through this process."""

Turn = Callable[[], Awaitable[None]]


class Turns:
    """One for each round of the event loop, to one sandbox after the other."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[object, deque[asyncio.Future[None]]] = OrderedDict()
        self._giving = False

    async def take(self, sandbox: object) -> None:
        loop = asyncio.get_running_loop()
        if not self._giving:
            # Nobody has had one in this round.
            self._giving = True
            loop.call_soon(self._give)
            return
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.setdefault(sandbox, deque()).append(turn)
        await turn

    def _give(self) -> None:
        while self._waiting:
            sandbox, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[sandbox] = turns  # behind the others
            if not turn.done():  # whoever left needs none
                turn.set_result(None)
                asyncio.get_running_loop().call_soon(self._give)
                return
        self._giving = False


async def at_once() -> None:
    return None
