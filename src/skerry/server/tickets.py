"""Tickets: what lets a browser open a terminal, where it cannot send a header.

A query string ends up in histories and logs, so a ticket is worth little there: it opens one terminal page or one
connection of one sandbox, once, and soon not even that. They are kept in memory only, as digests.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from hashlib import sha256

from skerry.control.actor import Caller, caller

LIFETIME = 60
# How long a page that lost its connection may take to come back.
RESUME = 3600
_MOST = 10_000


@dataclass(slots=True)
class _Ticket:
    sandbox: str
    expires: float
    who: Caller
    """On whose behalf it was issued: it goes no further than they could, and ends with their key."""


class Tickets:
    def __init__(self) -> None:
        self._tickets: dict[bytes, _Ticket] = {}

    def issue(self, sandbox: str, lifetime: float = LIFETIME) -> str:
        """A new ticket for a sandbox, good for ``lifetime`` seconds."""
        now = time.monotonic()
        if len(self._tickets) >= _MOST:
            self._tickets = {key: ticket for key, ticket in self._tickets.items() if ticket.expires > now}
        while len(self._tickets) >= _MOST:
            del self._tickets[next(iter(self._tickets))]
        ticket = secrets.token_urlsafe(32)
        self._tickets[_digest(ticket)] = _Ticket(sandbox, now + lifetime, caller.get())
        return ticket

    def expire(self, ticket: str, lifetime: float) -> None:
        """Let a ticket that has not been used yet end in ``lifetime`` seconds."""
        known = self._tickets.get(_digest(ticket))
        if known is not None:
            known.expires = time.monotonic() + lifetime

    def redeem(self, ticket: str, sandbox: str) -> Caller | None:
        """On whose behalf it lets its bearer into this sandbox, by its owner's name for it; it does so once."""
        known = self._tickets.pop(_digest(ticket), None)
        if known is None or known.sandbox != sandbox + known.who.mark or time.monotonic() >= known.expires:
            return None
        return known.who


def _digest(ticket: str) -> bytes:
    return sha256(ticket.encode("utf-8", "surrogateescape")).digest()
