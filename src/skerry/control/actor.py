"""On whose behalf something is done: for the record of what happened, and for what may be seen and made."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

from skerry.control.identity import LOCAL, checked_id, mark_of
from skerry.errors import ForbiddenError
from skerry.models import KeyScope

SERVER = "server"
IDLE_TIMER = "idle timer"
LOCAL_CLIENT = "local client"
PREVIEW = "preview"
STRANGER = "stranger"
"""Somebody who asked and has not been let in, or did not need to be."""
SANDBOX = "sandbox"

actor: ContextVar[str] = ContextVar("actor", default=SERVER)
"""Set for each request by whoever lets it in. What runs in no request does so on behalf of the server."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, for whom, and how far that goes."""

    name: str
    owner: str = LOCAL
    scope: KeyScope = KeyScope.ADMIN
    sandbox: str | None = None
    """The only sandbox it may see, by the id that the server knows it by."""
    credential: str | None = None
    """The key of the store, or the session, that it came with. Ending it ends what is under way."""
    rate: float | None = None

    @property
    def mark(self) -> str:
        return mark_of(self.owner)

    @property
    def may_make(self) -> bool:
        return self.scope is not KeyScope.READ_ONLY

    def id(self, raw: str) -> str:
        """The id within the server of the sandbox that this caller means."""
        id = checked_id(raw) + mark_of(self.owner)
        if self.sandbox is not None and id != self.sandbox:
            raise ForbiddenError("This key is for one sandbox, and not for that one.")
        return id

    def owns(self, id: str) -> bool:
        """Whether what belongs to the sandbox with this id within the server is the caller's to see."""
        mark = mark_of(self.owner)
        mine = id.endswith(mark) if mark else not id.endswith("-")
        return mine and self.sandbox in (None, id)

    def sees(self, id: str) -> bool:
        """The same, for one who came with no word of whose it is; admins see everybody's."""
        return (self.scope is KeyScope.ADMIN and self.sandbox is None) or self.owns(id)


caller: ContextVar[Caller] = ContextVar("caller", default=Caller(SERVER))  # noqa: B039 - it is frozen
"""Set beside ``actor``. What runs in no request, or in that of a server without keys, is the local owner's."""


def own_id(raw: str) -> str:
    """The id within the server of the sandbox that whoever asks means."""
    return caller.get().id(raw)
