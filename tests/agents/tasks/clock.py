from __future__ import annotations

from datetime import UTC, datetime


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.set("2026-03-02 08:59")

    def set(self, moment: str) -> None:
        self.moment = datetime.fromisoformat(moment).replace(tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.moment
