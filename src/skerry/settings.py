"""What a person may set, and the environment variables that set it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator

HOSTNAME = re.compile(r"(?=[^:]{1,253}(?::|$))(?!.*\.\.)[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?(?::[1-9][0-9]{0,4})?")
"""A host that previews may live under, in lower case, with a port where it is not the usual one."""

_SIZE = re.compile(r"\s*([0-9]{1,18})\s*([KMGT]?)(?:i?B)?\s*", re.IGNORECASE)
_SHIFTS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


def default_home() -> Path:
    if os.geteuid() == 0:
        return Path("/var/lib/skerry")
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "skerry"


def default_cache() -> Path | None:
    """Where what can be made again is kept for all homes of this user; None for one who has no directory."""
    if os.geteuid() == 0:
        return Path("/var/cache/skerry")
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "skerry" if os.path.isabs(base) else None


class Settings(BaseModel):
    model_config = ConfigDict(frozen=True)

    home: Path = Field(default_factory=default_home)
    cache: Path | None = Field(default_factory=default_cache)
    host: str = "127.0.0.1"
    port: int = Field(8787, ge=0, le=65535)
    database_url: str | None = Field(None, repr=False)
    api_keys: tuple[str, ...] = Field((), repr=False)
    warm_pool: int = Field(0, ge=0, le=1000)
    pool_size: int | None = Field(None, ge=0)
    sleep_after: float = Field(600.0, gt=0)
    stop_grace: float = Field(5.0, ge=0, le=3600)
    event_limit: int = Field(1000, ge=1)
    event_days: float = Field(30.0, ge=0)
    metrics_open: bool = False
    python_pool_min_size: int = Field(1, ge=0, le=64)
    python_pool_max_size: int = Field(64, ge=1, le=1024)
    javascript_pool_min_size: int = Field(1, ge=0, le=64)
    javascript_pool_max_size: int = Field(64, ge=1, le=1024)
    typescript_pool_min_size: int = Field(1, ge=0, le=64)
    typescript_pool_max_size: int = Field(64, ge=1, le=1024)
    pool_idle_timeout: float = Field(300.0, gt=0)
    code_timeout: float | None = Field(None, gt=0)
    code_warm: tuple[str, ...] = ()
    preview_domain: str | None = None
    preview_scheme: Literal["http", "https"] | None = None
    public_url: str | None = None
    buckets: Path | None = None
    backup_key: str | None = Field(None, repr=False)
    backup_key_file: Path | None = None
    backup_sweep: float = Field(600.0, gt=0)
    sync_on_hibernate: bool = False
    ship_to: str | None = None
    mount_spool: int = Field(4 * 2**30, ge=2**20)
    mount_timeout: float = Field(15.0, gt=0, le=600)
    max_json_bytes: int = 64 * 2**20
    receive_timeout: float = 60.0

    @field_validator("pool_size", mode="before")
    @classmethod
    def _bytes(cls, value: object) -> object:
        match = _SIZE.fullmatch(value) if isinstance(value, str) else None
        return int(match[1]) << _SHIFTS[match[2].upper()] if match else value

    @field_validator("preview_domain")
    @classmethod
    def _domain(cls, value: str | None) -> str | None:
        if value is None:
            return None
        name = value.strip().lower().removeprefix("*.").rstrip(".")
        if not HOSTNAME.fullmatch(name):
            raise ValueError("write it like preview.example.com, without https:// and without a path")
        return name

    @field_validator("public_url")
    @classmethod
    def _url(cls, value: str | None) -> str | None:
        if value is None:
            return None
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError("write it like https://skerry.example.com")
        return value.rstrip("/")

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ, **overrides: object) -> Settings:
        """The settings of ``SKERRY_*``; what is passed here and is not None comes first."""
        found: dict[str, object] = {}
        for name, field in cls.model_fields.items():
            value = environ.get(f"SKERRY_{name.upper()}")
            if value is None and "_pool_" in name:
                value = environ.get(name.upper())  # as the older SDK spells it
            if value:
                several = field.annotation == tuple[str, ...]
                found[name] = tuple(k for k in value.split(",") if k) if several else value
        found.update({name: value for name, value in overrides.items() if value is not None})
        return cls.model_validate(found)

    @property
    def store_url(self) -> str:
        return self.database_url or f"sqlite:///{self.home / 'skerry.db'}"
