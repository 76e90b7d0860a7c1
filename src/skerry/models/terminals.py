"""Terminals."""

from __future__ import annotations

from datetime import datetime

from skerry.models.base import Result


class TerminalInfo(Result):
    id: str
    session: str
    """The session whose directory and variables it began with."""
    shell: str
    cols: int
    rows: int
    viewers: int
    created_at: datetime
    silent_for: float
    """Seconds since something was typed or shown."""


class TerminalList(Result):
    terminals: list[TerminalInfo]


class TerminalTicket(Result):
    ticket: str
    """Opens one terminal of the sandbox, once, as `?ticket=`."""
    expires_in: int
