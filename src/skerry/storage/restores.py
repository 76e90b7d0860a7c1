"""Which restores are under way in a sandbox, or were cut off: what a copy of its files made meanwhile must put right.

Whoever starts a sandbox settles what is on record for it first, so that nothing of a half restored tree is ever seen.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from skerry.storage.unfinished import Unfinished

Facts = dict[str, Any]
"""Where in the sandbox a restore is staged, and what it is for."""


class Restores:
    def __init__(self, directory: Path) -> None:
        self._records = Unfinished(directory)
        self._running: dict[str, tuple[str, Facts]] = {}
        self._watchers: list[tuple[str, list[Facts]]] = []

    @contextmanager
    def begun(self, sandbox: str, facts: Facts) -> Iterator[str]:
        """On record, under the name that is yielded, until the block has ended without an error."""
        name = f"{sandbox}.{secrets.token_hex(6)}"
        with self._records.begun(name, facts):
            self._running[name] = sandbox, facts
            for watched, seen in self._watchers:
                if watched == sandbox:
                    seen.append(facts)
            try:
                yield name
            finally:
                del self._running[name]

    @contextmanager
    def watched(self, sandbox: str) -> Iterator[list[Facts]]:
        """Those that a copy of the sandbox's files, made in this block, may hold unfinished; complete at its end."""
        seen = [facts for running, facts in self._running.values() if running == sandbox]
        seen += [facts for _, facts in self.left(sandbox)]
        watcher = (sandbox, seen)
        self._watchers.append(watcher)
        try:
            yield seen
        finally:
            self._watchers = [each for each in self._watchers if each is not watcher]

    def inherit(self, sandbox: str, found: Iterable[Facts]) -> None:
        """The sandbox has such a copy, or is about to: to be settled when it next starts."""
        for facts in found:
            self._records.leave(f"{sandbox}.{secrets.token_hex(6)}", facts)

    def left(self, sandbox: str) -> list[tuple[str, Facts]]:
        """Those nobody works on any more, by name."""
        return self._records.left(f"{sandbox}.")

    def settled(self, name: str) -> None:
        self._records.settled(name)

    def forget(self, sandbox: str) -> None:
        """Its files are gone, and with them all that was left to put right in them."""
        for name, _ in self.left(sandbox):
            self._records.settled(name)

    def forget_all_but(self, sandboxes: set[str]) -> None:
        for name, _ in self._records.left():
            if name.partition(".")[0] not in sandboxes:
                self._records.settled(name)
