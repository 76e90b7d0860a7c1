"""Where things are inside a session's sandbox."""

from __future__ import annotations

import json
import os
from typing import Any

HERE = os.environ.get("SKERRY_SESSION_DIRECTORY") or os.path.dirname(os.path.abspath(__file__))
OUTBOX = os.path.join(HERE, "outbox")
STATE = os.path.join(HERE, "bridge.json")
"""What the bridge must know after it was killed: the prompt it is at, and those it has done."""
SAID = os.path.join(HERE, "said")
"""Digests of what was said about that prompt."""
AGENT = os.path.join(HERE, "agent.json")
"""Which start of the agent is the present one; written by the supervisor."""
ACCESS = os.path.join(HERE, "access.json")
"""How the control plane is reached, for the agent's tools."""
PHASE = os.path.join(HERE, "phase.json")
"""What the supervisor is at: fetching the repository, starting the agent, or through with both."""
IDENTITY = os.path.join(HERE, "identity")
"""A configuration of git's: who the author of the present prompt is."""
INDEX = os.path.join(HERE, "diff.index")
LOG = os.path.join(HERE, "agent.log")
TURN = os.path.join(HERE, "turn.jsonl")
"""What Claude Code's host has told about the prompt it is at."""
PAID = os.path.join(HERE, "paid.json")
"""What Claude Code's sessions have cost, as it says it."""
ERRORS = os.path.join(HERE, "claude.err")
AGENT_SESSION = "/tmp/opencode-session-id"


def read_json(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def phase() -> str:
    return str(read_json(PHASE).get("phase", "ready"))


def tail(path: str, length: int = 2000) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - length))
            return file.read().decode("utf-8", "replace").strip()
    except OSError:
        return ""


def remove(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def write_json(path: str, value: dict[str, Any]) -> None:
    """All of it or nothing, readable by nobody else."""
    fresh = f"{path}.{os.getpid()}"
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        json.dump(value, file)
    os.rename(fresh, path)
