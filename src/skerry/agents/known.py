"""The agent programs there are."""

from __future__ import annotations

from skerry.agents.claude.agent import ClaudeCode
from skerry.agents.contract import Agent
from skerry.agents.opencode.agent import OpenCode
from skerry.errors import InvalidRequestError

OPENCODE = OpenCode()
CLAUDE_CODE = ClaudeCode()
AGENTS: dict[str, Agent] = {OPENCODE.name: OPENCODE, CLAUDE_CODE.name: CLAUDE_CODE}


def agent_of(name: str) -> Agent:
    agent = AGENTS.get(name)
    if agent is None:
        raise InvalidRequestError(f"There is no agent {name[:80]!r}.", hint=f"There are: {', '.join(sorted(AGENTS))}.")
    return agent
