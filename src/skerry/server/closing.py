"""The server is about to close: what would last as long as its client ends by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Closing(asyncio.Event):
    """An event that also calls back, for the many that would otherwise each need a task to wait in."""

    def __init__(self) -> None:
        super().__init__()
        self._told: dict[object, Callable[[], None]] = {}

    def tell(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call ``listener`` once it is set, soon if it is already; what is returned makes it be forgotten."""
        mark = object()
        self._told[mark] = listener
        if self.is_set():
            asyncio.get_running_loop().call_soon(self._tell, mark)
        return lambda: self._forget(mark)

    def set(self) -> None:
        super().set()
        for mark in list(self._told):
            self._tell(mark)

    def _tell(self, mark: object) -> None:
        listener = self._told.pop(mark, None)
        if listener is not None:
            listener()

    def _forget(self, mark: object) -> None:
        self._told.pop(mark, None)
