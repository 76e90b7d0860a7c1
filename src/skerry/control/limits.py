"""What sandboxes may use on this server: what each asked for, over the server's defaults, and what of it is held."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from skerry.limits import LIMITS, parse_limits
from skerry.models import Limits, LimitsInfo
from skerry.providers.contract import Capabilities

SHARE = 0.75
"""Of the machine's memory, that one sandbox may have where nothing else is said: it cannot take the host down."""
PIDS = 4096
AT_START = ("open_files", "tmpfs")
"""Limits that a machine is started with and keeps."""


class SandboxLimits:
    def __init__(self, setting: str | None, memory: int, capabilities: Callable[[], Capabilities]) -> None:
        """``memory`` is the machine's."""
        self._default = defaults(setting, memory)
        self._capabilities = capabilities

    def of(self, asked: Mapping[str, Any]) -> Limits:
        """What a sandbox that asked for this may use."""
        return Limits.model_validate({**self._default, **Limits.model_validate(asked).resolved()})

    def info(self, asked: Mapping[str, Any], started_with: Limits | None = None) -> LimitsInfo:
        """The same as it is told, with what is held; ``started_with`` is what a machine that runs was given."""
        limits, unheld = self.of(asked), self._capabilities().unheld
        found = limits.model_dump(exclude_none=True, by_alias=True)
        names: dict[str, str] = {name: Limits.model_fields[name].alias or name for name in LIMITS}
        pending = [
            names[name]
            for name in AT_START
            if started_with is not None and getattr(started_with, name) != getattr(limits, name)
        ]
        enforced = {alias: name not in unheld for name, alias in names.items() if alias in found}
        return LimitsInfo(**found, enforced=enforced, pending=pending)


def defaults(setting: str | None, memory: int) -> dict[str, Any]:
    """Of the setting: `builder`, `memory=2G,cpu=1`, `none`; or, where there is none, what keeps the host safe."""
    if setting is None:
        return Limits(memory=max(16 << 20, int(memory * SHARE)), pids=PIDS).resolved()
    return {} if setting == "none" else Limits.model_validate(parse_limits(setting)).resolved()


def changed(asked: Mapping[str, Any], change: Limits) -> dict[str, Any]:
    """What a sandbox asks for after a change: a tier replaces all, a number one, and null takes one away."""
    if change.tier is not None:
        return change.resolved()
    kept = Limits.model_validate(asked).resolved()
    for name in change.model_fields_set:
        alias = Limits.model_fields[name].alias or name
        value = getattr(change, name)
        if value is None:
            kept.pop(alias, None)
        else:
            kept[alias] = value
    if kept.get("tier") is not None and change.model_fields_set:
        del kept["tier"]  # its numbers stay, but it is no longer that tier
    return kept
