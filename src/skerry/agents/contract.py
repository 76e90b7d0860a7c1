"""An agent program: how it is installed on the host, started in a sandbox, and spoken to."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from skerry.agents.models import AgentEvent
from skerry.runtime.runtime import Runtime

DIRECTORY = "/home/user/workspace"
"""Where an agent works unless told otherwise."""


@dataclass(frozen=True, slots=True)
class Prompt:
    text: str
    message_id: str
    model: str | None = None
    """``provider/model``; the agent's own default unless given."""
    system: str | None = None
    attachments: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Setup:
    """How an agent is to be started: where, with which files and variables. No secret is in it."""

    directory: str = DIRECTORY
    files: Mapping[str, bytes] = field(default_factory=dict)
    """What to write before it starts, by absolute path (``config.py`` makes them from a user's configuration)."""
    env: Mapping[str, str] = field(default_factory=dict)
    model: str | None = None
    asks: bool = False
    """Whether it is to ask before it uses a tool, where its own settings do not say so (Claude Code)."""


class Running(Protocol):
    """An agent that was started in a sandbox."""

    @property
    def port(self) -> int | None:
        """Where inside it serves an API and a page of its own, if it does."""
        ...

    async def health(self) -> str:
        """Its version. Raises ``AgentUnreadyError`` if it does not answer."""
        ...

    async def create_session(self, title: str | None = None) -> str: ...

    def prompt(self, session: str, prompt: Prompt) -> AsyncGenerator[AgentEvent, None]:
        """What it does about a prompt, as it does it; ends with ``execution_complete``, whatever happens.

        Closing the generator early lets the agent go on; ``abort`` stops it.
        """
        ...

    async def answer(self, permission: str, reply: Literal["once", "always", "reject"]) -> None:
        """Let it do what it waits for leave to do, or not."""
        ...

    async def abort(self, session: str) -> None:
        """Stop what it does about a prompt; the session can be used again."""
        ...

    async def stop(self) -> None:
        """End the program. What it has written stays."""
        ...


class Agent(Protocol):
    """A kind of agent program."""

    name: str
    toolbox: str
    """The toolbox that a sandbox must have been made with to run it."""

    async def start(self, runtime: Runtime, setup: Setup) -> Running:
        """Start it, or find it running already; returns when it is healthy. Raises ``AgentUnreadyError``."""
        ...
