"""The limits a sandbox can have: their names, the tiers, and how sizes and times are written."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

Limit = Literal["memory", "cpu", "pids", "open_files", "disk", "tmpfs", "output", "log", "lifetime"]
LIMITS: tuple[Limit, ...] = Limit.__args__  # type: ignore[attr-defined]

SIZES = ("memory", "disk", "tmpfs", "output", "log")
"""Those that are written as sizes, and kept in bytes."""

_MB, _GB = 1 << 20, 1 << 30


def _tier(memory: int, cpu: float, pids: int, disk: int) -> dict[str, float]:
    return {"memory": memory, "cpu": cpu, "pids": pids, "disk": disk}


TIERS: Mapping[str, Mapping[str, float]] = {
    "starter": _tier(512 * _MB, 0.5, 100, 2 * _GB),
    "builder": _tier(2 * _GB, 1, 256, 8 * _GB),
    "creator": _tier(4 * _GB, 2, 512, 16 * _GB),
    "power": _tier(8 * _GB, 4, 1024, 32 * _GB),
    "lite": _tier(256 * _MB, 1 / 16, 128, 2 * _GB),
    "basic": _tier(1 * _GB, 1 / 4, 256, 4 * _GB),
    "standard-1": _tier(4 * _GB, 1 / 2, 512, 8 * _GB),
    "standard-2": _tier(6 * _GB, 1, 512, 12 * _GB),
    "standard-3": _tier(8 * _GB, 2, 1024, 16 * _GB),
    "standard-4": _tier(12 * _GB, 4, 1024, 20 * _GB),
}

_SIZE = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{1,6})?)\s*([KMGT]?)(?:i?B)?\s*", re.IGNORECASE)
_SHIFTS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
_TIME = re.compile(r"\s*([0-9]{1,12}(?:\.[0-9]{1,6})?)\s*([smhd]?)\s*", re.IGNORECASE)
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_size(value: object) -> object:
    """``512M`` and ``1.5G`` as bytes, in powers of 1024; what is no such text is returned as it is."""
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    return int(float(match[1]) * (1 << _SHIFTS[match[2].upper()])) if match else value


def parse_time(value: object) -> object:
    """``90``, ``30s``, ``10m``, ``2h`` and ``7d`` as seconds; what is no such text is returned as it is."""
    match = _TIME.fullmatch(value) if isinstance(value, str) else None
    return float(match[1]) * _SECONDS[match[2].lower()] if match else value


def shown_size(count: float) -> str:
    """As a person would write it: 512 MB, 1.5 GB."""
    for unit, shift in (("TB", 40), ("GB", 30), ("MB", 20), ("KB", 10)):
        if count >= 1 << shift:
            return f"{count / (1 << shift):.4g} {unit}"
    return f"{count:g} bytes"


def host_memory() -> int:
    """Bytes of memory that this machine has, or that the container it is may have of it."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            found = min(found, int(Path(path).read_text()))
    return found


def parse_limits(text: str) -> dict[str, str]:
    """``builder``, ``memory=2G,cpu=1`` or ``builder,disk=20G``, as a setting has them; raises ``ValueError``."""
    found: dict[str, str] = {}
    for word in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = word.partition("=")
        name = name.strip().replace("-", "_") if equals else "tier"
        if name in found:
            raise ValueError(f"{name} is given twice")
        found[name] = (value if equals else word).strip()
    return found
