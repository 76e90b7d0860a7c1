"""Who asked for what is being done, from where, and by which request. The audit log and every log line say so."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field

from skerry.models import shown_id


@dataclass(slots=True)
class Inquiry:
    """One request, as those who let it in and those who serve it fill it in. One object for all tasks it begins."""

    request_id: str
    client: str = ""
    agent: str = ""
    key: str | None = None
    owner: str | None = None
    user: str | None = None
    user_id: str | None = None
    """Whom the sandbox is for, where whoever made it has said so."""
    sandbox: str | None = None
    made: list[str] = field(default_factory=list)
    """Sandboxes that this request made."""
    call: str | None = None
    """What of an API that has one route for all was asked for."""
    command: str | None = None
    status: int | None = None
    code: str | None = None
    """Of the error that it was answered with."""


inquiry: ContextVar[Inquiry | None] = ContextVar("inquiry", default=None)
"""None for what the server does of its own accord."""


def made(id: str) -> None:
    """The request under way, if there is one, has made a sandbox."""
    if (found := inquiry.get()) is not None:
        found.made.append(shown_id(id))


def asked_for(call: str) -> None:
    if (found := inquiry.get()) is not None:
        found.call = call


def asked_to_run(command: str) -> None:
    if (found := inquiry.get()) is not None:
        found.command = command


def wanted_for(user_id: str | None) -> None:
    """Whom it is for, what the request asks for."""
    if user_id is not None and (found := inquiry.get()) is not None:
        found.user_id = user_id


def answered(status: int, code: str) -> None:
    """The request under way failed, or was refused."""
    if (found := inquiry.get()) is not None:
        found.status, found.code = status, code
