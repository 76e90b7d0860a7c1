"""On whose behalf a session acts: its owner's, whoever asks."""

from __future__ import annotations

from contextvars import Context

from skerry.control.actor import Caller, actor, caller
from skerry.models import KeyScope

ACTOR = "session"


def on_behalf_of(owner: str) -> Context:
    """In which what is done is done for an owner, whoever asks."""
    context = Context()
    context.run(caller.set, Caller(ACTOR, owner=owner, scope=KeyScope.USE))
    context.run(actor.set, ACTOR)
    return context
