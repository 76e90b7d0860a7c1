"""What runs in the sandbox of a session: the supervisor and the bridge, and how they start the agent."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from skerry.agents.claude import agent as claude
from skerry.agents.claude import speech
from skerry.agents.config import HOME
from skerry.agents.known import CLAUDE_CODE
from skerry.agents.opencode.agent import ENVIRONMENT, PROGRAM
from skerry.control.session_rows import SessionRow
from skerry.runtime.environment import WORKSPACE

AGENT_PORT = 4096
DIRECTORY = "/var/lib/skerry-session"
INSIDE = (
    "places",
    "ending",
    "git",
    "repository",
    "outbox",
    "said",
    "reach",
    "attachment",
    "websocket",
    "speaker",
    "agent",
    "opencode",
    "claude",
    "claude_host",
    "supervisor",
    "bridge",
    "pull_request",
)
SHARED = ("opencode/turn", "claude/speech", "claude/turn")
"""What runs on both sides, and has the same name on both."""


@dataclass(frozen=True, slots=True)
class AgentCommand:
    """How the supervisor starts the agent, and where it is to be found then."""

    command: tuple[str, ...]
    kind: str = "opencode"
    """How the bridge speaks to it."""
    python: bool = False
    """Whether the command is for the sandbox's Python."""
    port: int = AGENT_PORT
    env: Mapping[str, str] = field(default_factory=dict)
    toolboxes: tuple[str, ...] = ()


AgentOf = Callable[[SessionRow, Mapping[str, Any]], AgentCommand]
"""The agent of a session, and the MCP servers that it is given."""


def directory_of(repo: str | None) -> str:
    """Where the agent works."""
    return WORKSPACE if repo is None else f"{WORKSPACE}/{repo}"


@cache
def inside() -> dict[str, bytes]:
    """What runs in the sandboxes of sessions, by its place there."""
    package = files("skerry.agents")
    found = {f"{name}.py": package.joinpath("inside", f"{name}.py").read_bytes() for name in INSIDE}
    for name in SHARED:
        words = ["skerry", "agents", *name.split("/")]
        for depth in range(1, len(words)):
            found.setdefault("/".join([*words[:depth], "__init__.py"]), b"")
        found["/".join(words) + ".py"] = package.joinpath(*f"{name}.py".split("/")).read_bytes()
    return found


def command(row: SessionRow, tools: Mapping[str, Any]) -> AgentCommand:
    """That of the agent that was asked for."""
    return (claude_code if row.settings.get("agent") == CLAUDE_CODE.name else opencode)(row, tools)


def opencode(row: SessionRow, tools: Mapping[str, Any]) -> AgentCommand:
    """OpenCode, from its toolbox."""
    setup = row.settings["setup"]
    config = json.loads(setup["env"]["OPENCODE_CONFIG_CONTENT"])
    if tools:
        config["mcp"] = {**config.get("mcp", {}), **tools}
    env = {**ENVIRONMENT, **setup["env"], "OPENCODE_CONFIG_CONTENT": json.dumps(config)}
    words = (PROGRAM, "serve", "--port", str(AGENT_PORT), "--hostname", "127.0.0.1")
    return AgentCommand(words, env=env, toolboxes=tuple(setup["toolboxes"]))


def claude_code(row: SessionRow, tools: Mapping[str, Any]) -> AgentCommand:
    """Claude Code, from its toolbox, behind a host that stays."""
    setup = row.settings["setup"]
    servers, rules = f"{HOME}/{speech.SERVERS}", f"{HOME}/{speech.RULES}"
    ours = {name: {"command": tool["command"][0], "args": tool["command"][1:]} for name, tool in tools.items()}
    config = {
        "program": [claude.PROGRAM],
        "directory": directory_of(row.repo_name),
        "port": AGENT_PORT,
        "model": row.model,
        "asks": setup["asks"],
        "servers": [
            *([servers] if servers in setup["files"] else []),
            *([json.dumps({"mcpServers": ours})] if ours else []),
        ],
        "rules": rules if rules in setup["files"] else None,
        "allowed": [f"mcp__{name}" for name in ours],
    }
    env = {**speech.ENVIRONMENT, **setup["env"], "SKERRY_CLAUDE_HOST": json.dumps(config)}
    host = (f"{DIRECTORY}/claude_host.py",)
    return AgentCommand(host, CLAUDE_CODE.name, python=True, env=env, toolboxes=tuple(setup["toolboxes"]))
