"""What a server does with agents: the kinds it knows, and what they are asked to do."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from skerry.agents.contract import Agent
from skerry.agents.known import AGENTS
from skerry.agents.schedules import Schedules
from skerry.agents.tasks import Tasks
from skerry.agents.teams import Teams
from skerry.control.registry import Registry


class Workforce:
    def __init__(self, registry: Registry, agents: Mapping[str, Agent] | None = None, *, lasting: bool = True) -> None:
        """``lasting``: whether this is a server, which goes on with what one before it began, and keeps schedules; a
        program that has a server in itself does neither."""
        self.registry = registry
        self.agents = AGENTS if agents is None else agents
        self._lasting = lasting

    @cached_property
    def tasks(self) -> Tasks:
        return Tasks(self.registry, self.agents, resume=self._lasting)

    @cached_property
    def teams(self) -> Teams:
        return Teams(self.registry, self.tasks)

    @cached_property
    def schedules(self) -> Schedules:
        return Schedules(self.registry, self.tasks, self.teams)

    async def open(self) -> None:
        await self.tasks.open()
        await self.teams.open()
        if self._lasting:
            self.schedules.open()

    async def close(self) -> None:
        """Before the registry is closed."""
        await self.schedules.close()
        await self.teams.close()
        await self.tasks.close()
