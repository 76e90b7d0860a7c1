"""The server itself."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import Field

from skerry.models.base import Result, now


class Health(Result):
    ok: bool = True
    status: Literal["ok"] = "ok"
    timestamp: datetime = Field(default_factory=now)
    service: str = "skerry"
    version: str
    provider: str
    isolation: dict[str, Any] = Field(default_factory=dict)
    bindings: dict[str, bool] = Field(default_factory=dict)
    snapshots: str = Field("none", description="`instant`, `copy` where they take as long as one, or `none`.")
