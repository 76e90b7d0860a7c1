"""Events on their way to the control plane: on disk until they are acknowledged, so that no death loses one.

One file for each, named so that they sort as they happened; the name is the event's id. The supervisor and the bridge
both add, the bridge alone sends and removes.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

Event = dict[str, Any]


class Outbox:
    def __init__(self, directory: str) -> None:
        self.directory = directory
        os.makedirs(directory, mode=0o700, exist_ok=True)
        self._last = 0

    def add(self, event: Event) -> str:
        self._last = max(self._last + 1, time.time_ns())
        id = f"{self._last:020d}-{os.urandom(4).hex()}"
        path = os.path.join(self.directory, id)
        with open(f"{path}.new", "w", encoding="utf-8") as file:
            json.dump({**event, "id": id}, file)
        os.rename(f"{path}.new", path)
        return id

    def waiting(self) -> list[str]:
        return sorted(name for name in os.listdir(self.directory) if not name.endswith(".new"))

    def read(self, id: str) -> Event | None:
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
        if os.sep in id:
            return
        try:
            os.unlink(os.path.join(self.directory, id))
        except FileNotFoundError:
            pass
