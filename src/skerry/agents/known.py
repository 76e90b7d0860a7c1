"""The agent programs there are."""

from __future__ import annotations

from skerry.agents.claude.agent import ClaudeCode
from skerry.agents.contract import Agent
from skerry.agents.opencode.agent import OpenCode

OPENCODE = OpenCode()
CLAUDE_CODE = ClaudeCode()
AGENTS: dict[str, Agent] = {OPENCODE.name: OPENCODE, CLAUDE_CODE.name: CLAUDE_CODE}
