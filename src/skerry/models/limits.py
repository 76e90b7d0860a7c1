"""Limits of a sandbox."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator, model_validator

from skerry.limits import SIZES, TIERS, parse_size, parse_time
from skerry.models.base import Request, Result

_MEBIBYTE = 1 << 20
_OLDER = {"memoryMb": "memory", "memory_mb": "memory", "diskMb": "disk", "disk_mb": "disk", "cpus": "cpu"}


class Limits(Request):
    """What a sandbox may use: a tier, numbers, or a tier with numbers of its own. A tier can be given alone, as text.

    Sizes are bytes or text such as `512M` and `2G`.
    """

    tier: str | None = Field(None, description=f"One of {', '.join(TIERS)}.")
    memory: int | None = Field(None, ge=16 * _MEBIBYTE, le=1 << 50, description="Bytes of memory, without swap.")
    cpu: float | None = Field(None, ge=0.01, le=4096, description="Processors; 0.5 is half of one.")
    pids: int | None = Field(None, ge=16, le=1 << 22, description="Processes and threads at a time.")
    open_files: int | None = Field(None, ge=64, le=1 << 20, description="Files each process may have open.")
    disk: int | None = Field(None, ge=16 * _MEBIBYTE, le=1 << 50, description="Bytes of files of its own.")
    tmpfs: int | None = Field(None, ge=_MEBIBYTE, le=1 << 50, description="Bytes in /dev/shm; they are memory, too.")
    output: int | None = Field(None, ge=1024, le=1 << 30, description="Bytes of each stream of a command's result.")
    log: int | None = Field(None, ge=64 * 1024, le=1 << 30, description="Bytes kept of a background process's output.")
    lifetime: float | None = Field(None, gt=0, le=1e10, description="Seconds from its creation until it is stopped.")

    @model_validator(mode="before")
    @classmethod
    def _written(cls, given: object) -> object:
        if isinstance(given, str):
            given = {"tier": given}
        if not isinstance(given, dict):
            return given
        found = dict(given)
        for old, name in _OLDER.items():
            if old in found:
                value = found.pop(old)
                megabytes = old != "cpus" and isinstance(value, int)
                found.setdefault(name, value * _MEBIBYTE if megabytes else value)
        for name in SIZES:
            if name in found:
                found[name] = parse_size(found[name])
        if "lifetime" in found:
            found["lifetime"] = parse_time(found["lifetime"])
        return found

    @field_validator("tier")
    @classmethod
    def _known(cls, tier: str | None) -> str | None:
        if tier is not None and tier not in TIERS:
            raise ValueError(f"there is no tier {tier[:40]!r}; there are {', '.join(TIERS)}")
        return tier

    def resolved(self) -> dict[str, Any]:
        """The numbers of the tier, and over them those that were given, by their names in JSON."""
        own = self.model_dump(exclude_none=True, by_alias=True)
        return {**TIERS[self.tier], **own} if self.tier else own


class LimitsInfo(Result):
    """What a sandbox may use, the server's defaults included, and which of that this host holds it to."""

    tier: str | None = None
    memory: int | None = None
    cpu: float | None = None
    pids: int | None = None
    open_files: int | None = None
    disk: int | None = None
    tmpfs: int | None = None
    output: int | None = None
    log: int | None = None
    lifetime: float | None = None
    enforced: dict[str, bool] = Field(
        default_factory=dict, description="For each limit it has, whether the host holds it; `skerry doctor` says why."
    )
    pending: list[str] = Field(default_factory=list, description="Those that change with the next start.")
