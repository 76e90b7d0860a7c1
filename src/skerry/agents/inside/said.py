"""What the bridge has said about one prompt: nothing twice, the answer so far not too often, and an end once."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from typing import Any

import places
from outbox import Event, Outbox

TOKENS_EVERY = 0.1
"""Of the answer so far at most one event in so many seconds."""


class Said:
    def __init__(self, message: str, emit: Any) -> None:
        self.message = message
        self._put = emit
        self.complete = False
        self._known: Counter[str] = Counter()
        self._token: Event | None = None
        self._last = ("", "")
        """Which text was said last, and how far."""
        self._at = 0.0

    def forget(self) -> None:
        try:
            open(places.SAID, "w").close()
        except OSError:
            pass

    def recall(self, outbox: Outbox) -> None:
        """After a death: what was written down, and what is in the outbox and was not written down any more."""
        try:
            with open(places.SAID, encoding="utf-8") as file:
                self._known = Counter(file.read().split())
        except OSError:
            pass
        waiting = [event for event in map(outbox.read, outbox.waiting()) if event is not None]
        self._known |= Counter(_key(event) for event in waiting if event.get("messageId") == self.message)

    def _emit(self, event: Event) -> None:
        self._put(event)  # first: rather twice than never
        try:
            with open(places.SAID, "a", encoding="utf-8") as file:
                file.write(_key(event) + "\n")
        except OSError:
            pass  # the disk is full: after a death it is said twice

    def take(self, events: list[Event]) -> None:
        for event in events:
            event = {**event, "messageId": self.message}
            if event["type"] == "permission":
                event["permissionId"] = event.pop("id")  # an event has an id of its own
            if event["type"] == "token":
                self._answer(event)
                continue
            key = _key(event)
            if self._known[key] > 0:
                self._known[key] -= 1
                continue
            self.flush()
            self._emit(event)
            if event["type"] == "execution_complete":
                self.complete = True
                return

    def _answer(self, event: Event) -> None:
        if _text(event) == self._last:
            return
        if self._token is not None and _text(self._token)[0] != _text(event)[0]:
            self.flush()  # another text: the one before is not said by this one
        self._token = event
        if time.monotonic() - self._at >= TOKENS_EVERY:
            self.flush()

    def flush(self) -> None:
        if self._token is not None:
            self._last, self._at = _text(self._token), time.monotonic()
            self._emit(self._token)
            self._token = None

    def fail(self, error: str, code: str) -> None:
        self.flush()
        self.complete = True
        self._emit({"type": "error", "messageId": self.message, "error": error, "code": code})
        ended = {"type": "execution_complete", "success": False, "error": error, "code": code}
        self._emit({**ended, "messageId": self.message})


def _text(event: Event) -> tuple[str, str]:
    return str(event.get("textId", "")), str(event.get("content"))


def _key(event: Event) -> str:
    said = {name: value for name, value in event.items() if name != "id"}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:24]
