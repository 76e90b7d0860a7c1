"""The agents that sessions have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.agents.conftest import KEY
from tests.agents.model import Model, config

PERMISSION = {"*": "allow", "bash": {"*": "allow", "rm *": "ask"}}


@dataclass(frozen=True)
class Kind:
    """What differs between them for whoever uses a session."""

    name: str
    shell: str
    states: int
    """Of a call of a tool."""
    served: str
    """What it calls a tool of an MCP server."""
    finishes: int
    """Of two steps."""
    programs: tuple[str, ...]
    """Each of which may be killed."""
    other_model: str

    def config(self, model: Model) -> dict[str, Any]:
        if self.name == "opencode":
            return config(model, key=KEY, permission=PERMISSION)
        options = {"apiKey": KEY, "baseUrl": f"{model.url}/v1"}
        return {"provider": {"anthropic": {"options": options}}, "permission": PERMISSION}


KINDS = [
    Kind(
        name="opencode",
        shell="bash",
        states=3,
        served="{server}_{tool}",
        finishes=2,
        programs=("opencode serve",),
        other_model="scripted/scripted-2",
    ),
    Kind(
        name="claude-code",
        shell="Bash",
        states=2,
        served="mcp__{server}__{tool}",
        finishes=1,
        programs=("bin/claude", "claude_host.py"),
        other_model="anthropic/claude-haiku-4-5",
    ),
]
