"""What an agent may do, asks for, or may not do: OpenCode's ``permission`` as Claude Code's rules."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from skerry.errors import InvalidRequestError

ACTIONS = ("allow", "ask", "deny")
TOOLS = {
    "bash": ("Bash",),
    "edit": ("Edit", "Write", "NotebookEdit"),
    "glob": ("Glob",),
    "grep": ("Grep",),
    "list": ("LS",),
    "read": ("Read",),
    "skill": ("Skill",),
    "task": ("Agent", "Task"),
    "todowrite": ("TodoWrite",),
    "webfetch": ("WebFetch",),
    "websearch": ("WebSearch",),
}
"""By the names that OpenCode has for what they do."""
_NO_NAME = r"[^A-Za-z0-9_-]"


def rules(permission: object, servers: Iterable[str] = ()) -> dict[str, list[str]]:
    """By action. To Claude Code a rule that denies comes before one that asks, and that before one that allows.

    ``servers`` are the MCP servers that it has.
    """
    given = {"*": permission} if isinstance(permission, str) else permission
    if not isinstance(given, Mapping):
        raise InvalidRequestError("The permission of an agent is neither an action nor an object of them.")
    found: dict[str, list[str]] = {action: [] for action in ACTIONS}
    default = "allow"
    served = {name: f"mcp__{re.sub(_NO_NAME, '_', name)}" for name in servers}
    for name, pattern, action in _given(given):
        if action not in ACTIONS:
            raise InvalidRequestError(
                f"permission.{name}: {str(action)[:50]!r} is no action.", hint=f"There are: {', '.join(ACTIONS)}."
            )
        if name == "*":
            default = str(action)
            continue
        for tool in TOOLS.get(name) or _of_servers(name, served):
            found[str(action)].append(tool if pattern == "*" else f"{tool}({pattern})")
    named = {rule.partition("(")[0] for listed in found.values() for rule in listed}
    tools = [*(tool for tools in TOOLS.values() for tool in tools), *served.values()]
    found[default] += [tool for tool in tools if tool not in named]
    return found


def _of_servers(name: str, served: Mapping[str, str]) -> Iterator[str]:
    """To OpenCode a server's tool is ``server_tool``, and all of them are ``server_*``."""
    for server, rule in served.items():
        if name.startswith(f"{server}_"):
            tool = name[len(server) + 1 :]
            yield rule if tool == "*" else f"{rule}__{tool}"


def _given(permission: Mapping[str, Any]) -> Iterator[tuple[str, str, object]]:
    for name, what in permission.items():
        for pattern, action in what.items() if isinstance(what, Mapping) else (("*", what),):
            yield name, str(pattern), action
