"""What a person may set, and the environment variables that set it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field


def default_home() -> Path:
    if os.geteuid() == 0:
        return Path("/var/lib/skerry")
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "skerry"


class Settings(BaseModel):
    model_config = ConfigDict(frozen=True)

    home: Path = Field(default_factory=default_home)
    host: str = "127.0.0.1"
    port: int = Field(8787, ge=0, le=65535)
    database_url: str | None = Field(None, repr=False)
    api_keys: tuple[str, ...] = Field((), repr=False)
    warm_pool: int = Field(0, ge=0, le=1000)
    sleep_after: float = Field(600.0, gt=0)
    max_json_bytes: int = 64 * 2**20
    receive_timeout: float = 60.0

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ, **overrides: object) -> Settings:
        """The settings of ``SKERRY_*``; what is passed here and is not None comes first."""
        found: dict[str, object] = {}
        for name in cls.model_fields:
            value = environ.get(f"SKERRY_{name.upper()}")
            if value:
                found[name] = tuple(k for k in value.split(",") if k) if name == "api_keys" else value
        found.update({name: value for name, value in overrides.items() if value is not None})
        return cls.model_validate(found)

    @property
    def store_url(self) -> str:
        return self.database_url or f"sqlite:///{self.home / 'skerry.db'}"
