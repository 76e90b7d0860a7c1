"""Security events: what was refused because it may be an attack, for whoever watches the log.

They say what was tried, on which sandbox and from where, and never the key, token, link or ticket that was tried with.
"""

from __future__ import annotations

import re
from typing import Literal

import structlog

from skerry.server.allowance import Allowance

log = structlog.get_logger("skerry.security")

Severity = Literal["low", "medium", "high", "critical"]

KINDS: dict[str, Severity] = {
    "host_refused": "high",
    "origin_refused": "high",
    "request_malformed": "medium",
    "csrf_refused": "high",
    "api_key_wrong": "medium",
    "sign_in_failed": "medium",
    "scope_refused": "low",
    "rate_limited": "low",
    "ticket_wrong": "medium",
    "preview_token_wrong": "medium",
    "preview_link_wrong": "medium",
    "service_worker_refused": "medium",
    "browser_refused": "medium",
    "connections_exceeded": "medium",
    "client_slow": "low",
    "sandbox_id_refused": "low",
    "api_key_missing": "low",
    "preview_unknown": "low",
    "preview_private": "low",
    "headers_too_large": "low",
}
"""What may happen, and how serious it is. ``docs/security.md`` says what each means."""

AT_ONCE = 10
"""So many of one kind from one client are written in a minute. How many more there were is said with the next."""
PERIOD = 60.0
REMEMBERED = 4096

_LEVELS = {"low": "info", "medium": "warning", "high": "error", "critical": "critical"}
_HOST = re.compile(r"[A-Za-z0-9._:\[\]-]{1,255}")
_PREVIEW = re.compile(r"[0-9]+-[^.]*\.")


class Events:
    """Bounded: whoever asks often enough must fill neither the log nor the memory."""

    def __init__(self) -> None:
        self._allowance = Allowance(AT_ONCE, PERIOD, REMEMBERED)

    def report(self, kind: str, client: str = "", **facts: str | int | None) -> None:
        withheld = self._allowance.take((kind, client))
        if withheld is None:
            return
        known = {name: value for name, value in facts.items() if value is not None}
        if withheld:
            known["withheld"] = withheld
        severity = KINDS[kind]
        write = getattr(log, _LEVELS[severity])
        write("security", kind=kind, severity=severity, client=shown_host(client), **known)


_events = Events()
report = _events.report


def shown_host(host: str) -> str:
    """A host as a log may hold it: without a preview's token, and nothing that a terminal would obey."""
    if not _HOST.fullmatch(host):
        return "" if not host else "unreadable"
    return _PREVIEW.sub("….", host, count=1) if _PREVIEW.match(host) else host
