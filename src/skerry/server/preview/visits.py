"""Previews on record: who began to look at which, and who was not let in. Not every request: a page makes dozens."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Any

from skerry.control.actor import PREVIEW
from skerry.control.audit import Audit
from skerry.control.inquiry import inquiry
from skerry.errors import SkerryError
from skerry.models import Outcome, shown_id
from skerry.server.allowance import Allowance
from skerry.server.preview.address import Place, Visit

AGAIN = 300.0
"""Seconds without a request after which the next one of the same client is a visit of its own."""
REMEMBERED = 4096
STRANGERS = (20, 60.0, 4096)


class Visits:
    def __init__(self, audit: Audit | None) -> None:
        self._audit = audit if audit is not None and audit.enabled else None
        self._seen: OrderedDict[tuple[str, Place], float] = OrderedDict()
        self._strangers = Allowance(*STRANGERS)

    def opened(self, place: Place, visit: Visit) -> None:
        if (asked := inquiry.get()) is not None:
            asked.sandbox = shown_id(place.id)
        if self._audit is None:
            return
        key, now = (visit.client, place), time.monotonic()
        before = self._seen.get(key)
        self._seen[key] = now
        self._seen.move_to_end(key)
        if len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)
        if before is None or now - before > AGAIN:
            self._note(self._audit, place, visit, "ok", None, {})

    def refused(self, place: Place | None, visit: Visit, error: SkerryError) -> None:
        if (asked := inquiry.get()) is not None:
            asked.sandbox = None if place is None else shown_id(place.id)
        if self._audit is None:
            return
        withheld = self._strangers.take((visit.client, error.code))
        if withheld is not None:
            self._note(self._audit, place, visit, "refused", error, {"withheld": withheld} if withheld else {})

    def _note(
        self,
        audit: Audit,
        place: Place | None,
        visit: Visit,
        outcome: Outcome,
        error: SkerryError | None,
        details: dict[str, Any],
    ) -> None:
        asked = inquiry.get()
        if place is not None:
            details["port"] = place.port
        audit.note(
            {
                "actor": PREVIEW,
                "key": None,
                "owner": None if asked is None else asked.owner,
                "user": None if asked is None else asked.user,
                "client": visit.client,
                "agent": "" if asked is None else asked.agent,
                "request_id": "" if asked is None else asked.request_id,
                "operation": "open_preview",
                "method": visit.method,
                "sandbox_id": None if place is None else shown_id(place.id),
                "outcome": outcome,
                "status": 200 if error is None else error.status,
                "code": None if error is None else error.code,
                "took": None,
                "details": details,
            }
        )
