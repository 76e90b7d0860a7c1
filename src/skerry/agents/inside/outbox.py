"""Events on their way to the control plane: on disk until they are acknowledged, so that no death loses one.

One file for each, named so that they sort as they happened; the name is the event's id. The supervisor and the bridge
both add, the bridge alone sends and removes. Where the disk is full they are kept in memory: the agent may have filled
it, and that it failed must be told all the same.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

Event = dict[str, Any]

LARGEST = 4 * 2**20
"""Characters of an event. The server takes no message of any size, and what it refuses would be sent for ever."""


class Outbox:
    def __init__(self, directory: str) -> None:
        self.directory = directory
        os.makedirs(directory, mode=0o700, exist_ok=True)
        self._last = 0
        self._held: dict[str, Event] = {}
        """Those that the disk had no room for."""

    def add(self, event: Event) -> str:
        self._last = max(self._last + 1, time.time_ns())
        id = f"{self._last:020d}-{os.urandom(4).hex()}"
        event = _bounded({**event, "id": id})
        path = os.path.join(self.directory, id)
        try:
            with open(f"{path}.new", "w", encoding="utf-8") as file:
                json.dump(event, file)
            os.rename(f"{path}.new", path)
        except OSError:
            self._held[id] = event
            _unlink(f"{path}.new")
        return id

    def waiting(self) -> list[str]:
        kept = [name for name in os.listdir(self.directory) if not name.endswith(".new")]
        return sorted([*kept, *self._held])

    def read(self, id: str) -> Event | None:
        if id in self._held:
            return self._held[id]
        try:
            with open(os.path.join(self.directory, id), encoding="utf-8") as file:
                event = json.load(file)
        except FileNotFoundError:
            return None
        except ValueError:  # a machine that lost its power, not only a process
            self.remove(id)
            return None
        return event if isinstance(event, dict) else None

    def remove(self, id: str) -> None:
        if os.sep in id or self._held.pop(id, None) is not None:
            return
        _unlink(os.path.join(self.directory, id))


def _bounded(event: Event) -> Event:
    """What is too long in it is cut, and that is said."""
    if len(json.dumps(event)) <= LARGEST:
        return event
    short = {}
    for name, value in event.items():
        if isinstance(value, str):
            short[name] = value[: LARGEST // 16]
        elif len(json.dumps(value)) <= LARGEST // 16:
            short[name] = value
    return {**short, "truncated": True}


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass
