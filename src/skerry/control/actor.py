"""On whose behalf something is done, for the record of what happened to a sandbox."""

from __future__ import annotations

from contextvars import ContextVar

SERVER = "server"
IDLE_TIMER = "idle timer"
LOCAL_CLIENT = "local client"
PREVIEW = "preview"

actor: ContextVar[str] = ContextVar("actor", default=SERVER)
"""Set for each request by whoever lets it in. What runs in no request does so on behalf of the server."""
