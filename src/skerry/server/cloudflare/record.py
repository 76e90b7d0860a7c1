"""Calls that come one after the other on one connection, each on record as if it had come by itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from skerry.control.actor import actor
from skerry.control.audit import Audit, clean
from skerry.control.inquiry import inquiry
from skerry.errors import SkerryError
from skerry.redaction import redact
from skerry.server.cloudflare.faults import Fault, fault_of

LONGEST = 200


class Record:
    def __init__(self, audit: Audit | None) -> None:
        self._audit = audit if audit is not None and audit.enabled else None

    @contextmanager
    def call(self, method: str, called: str) -> Iterator[None]:
        """What is done within. Who only looks is not on record, as everywhere."""
        connection = inquiry.get()
        if self._audit is None or connection is None or method == "GET":
            yield
            return
        self._audit.require()
        asked = replace(connection, made=[], command=None, status=None, code=None)
        inquiry.set(asked)
        began, failed = time.perf_counter(), None
        try:
            yield
        except (Fault, SkerryError) as error:
            failed = error if isinstance(error, Fault) else fault_of(error)
            raise
        finally:
            self._audit.note(
                {
                    "actor": actor.get(),
                    "key": asked.key,
                    "owner": asked.owner,
                    "user": asked.user,
                    "client": asked.client,
                    "agent": asked.agent,
                    "request_id": asked.request_id,
                    "operation": "container",
                    "method": method,
                    "sandbox_id": asked.sandbox,
                    "outcome": "ok" if failed is None else "failed",
                    "status": 200 if failed is None else failed.status,
                    "code": None if failed is None else failed.code,
                    "took": int((time.perf_counter() - began) * 1_000_000),
                    "command": asked.command,
                    "details": {"call": clean(redact(called[:LONGEST]))}
                    | ({"made": list(asked.made)} if asked.made else {}),
                }
            )
