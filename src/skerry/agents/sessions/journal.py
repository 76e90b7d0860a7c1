"""What happened in a session, event by event: in the store, told to those who watch, and not without bound.

When there is more than is kept, the oldest go, and an event ``trimmed`` stands in the place of the last that went: who
asks with a cursor from before is told, first of all, how much is missing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from skerry.agents.sessions.hub import Hub
from skerry.control.session_rows import TRIMMED, EventRow, SessionRows

LARGEST_EVENT = 4 * 2**20
LARGEST_OF_TRUNCATED = 1000
"""Of an event that is too large, what is shorter than so many characters is kept: of what it was, and how it ended."""
DEEPEST = 64
"""Levels of lists and objects in each other; who reads it back may not get further than some hundred."""
KEPT_WHEN_TRIMMED = 0.9
"""Of what is kept at most, so that not every event trims."""
_ENVELOPE = ("id", "type", "sandboxId", "timestamp")


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much is kept of one session."""

    events: int = 20_000
    bytes: int = 64 * 2**20


class Journal:
    def __init__(self, session: str, rows: SessionRows, hub: Hub, bounds: Bounds) -> None:
        self._session = session
        self._rows = rows
        self._hub = hub
        self._bounds = bounds
        self._held: tuple[int, int] | None = None
        """How many there are and their bytes, or more: answers so far that were replaced are counted, too."""

    def row(self, kind: str, message: dict[str, Any]) -> EventRow:
        """What a sandbox says, as it is kept."""
        about = message.get("messageId")
        data = clean({name: value for name, value in message.items() if name not in _ENVELOPE})
        if len(json.dumps(data)) > LARGEST_EVENT:
            short = {name: each for name, each in data.items() if len(json.dumps(each)) < LARGEST_OF_TRUNCATED}
            data = {**dict(list(short.items())[:100]), "truncated": True}
        kind = kind if kind != TRIMMED else "unknown"
        id = clean(str(message["id"])[:200])
        about = clean(str(about)[:200]) if about else None
        return EventRow(self._session, id, clean(kind[:100]), about, data)

    async def add(self, row: EventRow) -> EventRow | None:
        """As it is kept; None if it was there already."""
        added = await self._rows.add_event(row)
        if added is not None and self._held is not None:
            self._held = self._held[0] + 1, self._held[1] + len(json.dumps(added.data))
        return added

    def tell(self, added: EventRow) -> None:
        shown = {"id": added.id, "number": added.number, "type": added.type, "messageId": added.message_id}
        event = {**added.data, **shown, "at": added.at.isoformat()}
        self._hub.tell({"type": "sandbox_event", "event": event})

    async def bound(self) -> None:
        """See to it that there is not too much."""
        if self._held is None or self._too_much(*self._held):
            self._held = await self._rows.weigh_events(self._session)
            if self._too_much(*self._held):
                most = max(1, int(self._bounds.events * KEPT_WHEN_TRIMMED))
                self._held = await self._rows.trim_events(
                    self._session, most, int(self._bounds.bytes * KEPT_WHEN_TRIMMED)
                )

    def _too_much(self, events: int, bytes: int) -> bool:
        return events > self._bounds.events or bytes > self._bounds.bytes


def clean(value: Any, depth: int = DEEPEST) -> Any:
    """Without what no database holds and nobody reads back: the agent's tools may print anything."""
    if isinstance(value, str):
        return value.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode()
    if isinstance(value, dict | list) and not depth:
        return "…"
    if isinstance(value, dict):
        return {clean(str(key)): clean(each, depth - 1) for key, each in value.items()}
    if isinstance(value, list):
        return [clean(each, depth - 1) for each in value]
    if isinstance(value, float) and value - value != 0:
        return None
    return value
