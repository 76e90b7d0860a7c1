"""What all runs of agents share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from skerry.agents.config import Environment, Preparation, prepare, server_variables
from skerry.agents.contract import Agent, Setup
from skerry.agents.opencode.catalogue import VARIABLE, Catalogue
from skerry.agents.task_models import Work
from skerry.control.registry import Registry
from skerry.control.task_rows import TaskRows


@dataclass(frozen=True, slots=True)
class Desk:
    registry: Registry
    rows: TaskRows
    agents: Mapping[str, Agent]
    told: Callable[[str], None]
    catalogue: Catalogue

    def prepared(
        self, request: Work, model: str | None, directory: str, config: Mapping[str, Any] | None
    ) -> Preparation:
        """What it takes to run the agent that is asked for. Raises ``InvalidRequestError``."""
        if not self.agents[request.agent].toolbox:
            return Preparation(Setup(directory=directory, model=model))
        asked = dict(config or {}) | ({} if model is None else {"model": model})
        return prepare(request.agent, asked, directory=directory, has=self._variables())

    async def narrowed(self, prepared: Preparation, env: Mapping[str, str]) -> Setup:
        """For an agent that need not know of models that it cannot reach. ``env``: what the sandbox has."""
        setup = prepared.setup
        known = await self.catalogue.file(prepared.providers, env) if prepared.providers else None
        if known is None:
            return setup
        path, content = known
        return replace(setup, files={**setup.files, path: content}, env={**setup.env, VARIABLE: path})

    def _variables(self) -> Environment:
        return server_variables(self.registry.settings, self.registry.reception.closed)
