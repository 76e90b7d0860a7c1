"""What an agent may do, asks for, or may not do: OpenCode's ``permission`` as Claude Code's rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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


def rules(permission: object) -> dict[str, list[str]]:
    """By action. To Claude Code a rule that denies comes before one that asks, and that before one that allows."""
    given = {"*": permission} if isinstance(permission, str) else permission
    if not isinstance(given, Mapping):
        raise InvalidRequestError("The permission of an agent is neither an action nor an object of them.")
    found: dict[str, list[str]] = {action: [] for action in ACTIONS}
    default = "allow"
    for name, pattern, action in _given(given):
        if action not in ACTIONS:
            raise InvalidRequestError(
                f"permission.{name}: {str(action)[:50]!r} is no action.", hint=f"There are: {', '.join(ACTIONS)}."
            )
        if name == "*":
            default = str(action)
            continue
        for tool in TOOLS.get(name, ()):
            found[str(action)].append(tool if pattern == "*" else f"{tool}({pattern})")
    named = {rule.partition("(")[0] for listed in found.values() for rule in listed}
    found[default] += [tool for tools in TOOLS.values() for tool in tools if tool not in named]
    return found


def _given(permission: Mapping[str, Any]) -> Iterator[tuple[str, str, object]]:
    for name, what in permission.items():
        for pattern, action in what.items() if isinstance(what, Mapping) else (("*", what),):
            yield name, str(pattern), action
