"""What a person may set, and the environment variables that set it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from skerry.limits import parse_limits, parse_size
from skerry.models import Limits

HOSTNAME = re.compile(r"(?=[^:]{1,253}(?::|$))(?!.*\.\.)[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?(?::[1-9][0-9]{0,4})?")
"""A host that previews may live under, in lower case, with a port where it is not the usual one."""

SPARES = 5
"""Machines that `skerry serve` keeps half started unless it is told otherwise."""
PROVIDERS = ("local", "docker", "cloudflare", "modal")
_ORIGIN = re.compile(r"https?://[^/*\s]+")
_ALSO = {
    "provider": ("SANDBOX_BACKEND", "DEFAULT_SANDBOX_PROVIDER"),
    "docker_socket": ("DOCKER_HOST",),
    "cloudflare_enabled": ("ENABLE_CLOUDFLARE_SANDBOXES",),
    "cloudflare_url": ("CLOUDFLARE_WORKER_URL", "CLOUDFLARE_SANDBOX_URL"),
    "forge_token": ("GITHUB_APP_TOKEN",),
    "cloudflare_token": ("CLOUDFLARE_API_TOKEN", "CLOUDFLARE_SANDBOX_API_KEY"),
    "worker_token": ("AGENTPOD_API_TOKEN",),
    "report_to": ("AGENTPOD_API_URL",),
}
"""Names that other programs use for the same."""


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


def unusable(error: ValidationError, environ: Mapping[str, str] = os.environ) -> str:
    """What is wrong with the settings, by the name that the variable was given by."""
    first = error.errors(include_input=False, include_url=False)[0]
    field = str(first["loc"][0])
    names = (f"SKERRY_{field.upper()}", *_ALSO.get(field, ()))
    name = next((each for each in names if environ.get(each)), names[0])
    return f"{name} cannot be used: {first['msg'].removeprefix('Value error, ')}."


class Settings(BaseModel):
    model_config = ConfigDict(frozen=True, hide_input_in_errors=True)  # some of it is secret

    home: Path = Field(default_factory=default_home)
    cache: Path | None = Field(default_factory=default_cache)
    provider: Literal["local", "docker", "cloudflare", "modal"] = "local"
    providers: tuple[str, ...] = ()
    docker_socket: str = "/var/run/docker.sock"
    docker_image: str = "skerry:base"
    docker_timeout: float = Field(60.0, gt=0, le=3600)
    modal_app: str = Field("skerry", min_length=1, max_length=64)
    modal_image: str | None = None
    modal_lifetime: int = Field(86400, ge=60, le=86400)
    modal_ports: tuple[str, ...] = ("3000", "5000", "8000", "8080")
    modal_block_network: bool = False
    cloudflare_enabled: bool = True
    cloudflare_url: str | None = None
    cloudflare_token: str | None = Field(None, repr=False)
    cloudflare_token_file: Path | None = None
    cloudflare_timeout: float = Field(60.0, gt=0, le=600)
    host: str = "127.0.0.1"
    port: int = Field(8787, ge=0, le=65535)
    database_url: str | None = Field(None, repr=False)
    api_keys: tuple[str, ...] = Field((), repr=False)
    service_secret: str | None = Field(None, repr=False, min_length=16)
    warm_pool: int = Field(0, ge=0, le=1000)
    spares: int = Field(0, ge=0, le=100)
    pool_size: int | None = Field(None, ge=0)
    limits: str | None = None
    sleep_after: float = Field(600.0, gt=0)
    stop_grace: float = Field(5.0, ge=0, le=3600)
    event_limit: int = Field(1000, ge=1)
    event_days: float = Field(30.0, ge=0)
    metrics_open: bool = False
    log_format: Literal["console", "json"] = "console"
    access_log: bool = True
    audit: bool = True
    audit_days: float = Field(365.0, ge=0)
    audit_commands: bool = False
    audit_required: bool = False
    webhook_targets: Literal["public", "loopback", "private"] | None = None
    webhook_timeout: float = Field(10.0, gt=0, le=60)
    webhook_attempts: int = Field(8, ge=1, le=100)
    webhook_delay: float = Field(5.0, gt=0, le=3600)
    webhook_days: float = Field(7.0, gt=0)
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
    region: str | None = Field(None, pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    buckets: Path | None = None
    backup_key: str | None = Field(None, repr=False)
    backup_key_file: Path | None = None
    backup_sweep: float = Field(600.0, gt=0)
    sync_on_hibernate: bool = False
    ship_to: str | None = None
    worker_bucket: str | None = None
    mount_spool: int = Field(4 * 2**30, ge=2**20)
    mount_timeout: float = Field(15.0, gt=0, le=600)
    rate_limit: float | None = Field(None, gt=0)
    session_days: float = Field(14.0, gt=0, le=365)
    quota_sandboxes: int | None = Field(None, ge=0)
    quota_running: int | None = Field(None, ge=0)
    quota_memory_mb: int | None = Field(None, ge=0)
    quota_cpu_seconds_day: float | None = Field(None, ge=0)
    quota_cpu_seconds_month: float | None = Field(None, ge=0)
    quota_disk_mb: int | None = Field(None, ge=0)
    quota_creates_per_minute: int | None = Field(None, ge=0)
    usage_every: float = Field(10.0, gt=0, le=3600)
    currency: str = Field("EUR", max_length=10)
    price_cpu_hour: float = Field(0.0, ge=0)
    price_memory_gib_hour: float = Field(0.0, ge=0)
    price_disk_gib_month: float = Field(0.0, ge=0)
    price_egress_gib: float = Field(0.0, ge=0)
    egress: tuple[str, ...] = ()
    egress_transparent: bool = True
    secret_sources: tuple[str, ...] | None = Field(None, repr=False)
    mount_endpoints: tuple[str, ...] | None = None
    task_slots: int = Field(16, ge=1, le=10_000)
    task_days: float = Field(30.0, gt=0)
    worker_token: str | None = Field(None, repr=False, min_length=16)
    report_to: str | None = None
    session_inactivity: float = Field(600.0, gt=0)
    session_warm: int = Field(2, ge=0, le=1000)
    session_events: int = Field(20_000, ge=10)
    session_event_bytes: int = Field(64 * 2**20, ge=2**16)
    forge_url: str = "https://api.github.com"
    forge_git_url: str = "https://github.com"
    forge_token: str | None = Field(None, repr=False)
    max_json_bytes: int = 64 * 2**20
    receive_timeout: float = 60.0
    head_timeout: float = Field(20.0, gt=0)
    send_timeout: float = Field(600.0, gt=0)
    max_connections: int = Field(8192, ge=1)
    max_connections_per_client: int = Field(1024, ge=1)

    @field_validator("pool_size", "session_event_bytes", mode="before")
    @classmethod
    def _bytes(cls, value: object) -> object:
        return parse_size(value)

    @field_validator("limits")
    @classmethod
    def _limits(cls, value: str | None) -> str | None:
        if value is not None and value != "none":
            Limits.model_validate(parse_limits(value))
        return value

    @field_validator("preview_domain")
    @classmethod
    def _domain(cls, value: str | None) -> str | None:
        if value is None:
            return None
        name = value.strip().lower().removeprefix("*.").rstrip(".")
        if not HOSTNAME.fullmatch(name):
            raise ValueError("write it like preview.example.com, without https:// and without a path")
        return name

    @field_validator("public_url", "cloudflare_url", "forge_url", "forge_git_url", "report_to")
    @classmethod
    def _url(cls, value: str | None) -> str | None:
        if value is None:
            return None
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError("write it like https://skerry.example.com")
        return value.rstrip("/")

    @field_validator("providers")
    @classmethod
    def _providers(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(name.strip() for name in value))
        if not all(name in PROVIDERS for name in names):
            raise ValueError(f"there are {', '.join(PROVIDERS)}; write them like docker,local")
        return names

    @field_validator("modal_ports")
    @classmethod
    def _ports(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not all(port.strip().isdigit() and 0 < int(port) < 65536 for port in value):
            raise ValueError("write them like 3000,8080")
        return tuple(port.strip() for port in value)

    @field_validator("hosts")
    @classmethod
    def _hosts(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        names = tuple(name.strip().lower().rstrip(".") for name in value)
        if not all(name == "*" or HOSTNAME.fullmatch(name.removeprefix("*.")) for name in names):
            raise ValueError("write them like skerry.example.com,*.example.org, without https://; * for any")
        return names

    @field_validator("origins")
    @classmethod
    def _origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        pages = tuple(origin.strip().lower().rstrip("/") for origin in value)
        if not all(_ORIGIN.fullmatch(page) for page in pages):
            raise ValueError("write them like https://app.example.com,http://localhost:3000, without a path")
        return pages

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ, **overrides: object) -> Settings:
        """The settings of ``SKERRY_*``; what is passed here and is not None comes first."""
        found: dict[str, object] = {}
        for name, field in cls.model_fields.items():
            value = environ.get(f"SKERRY_{name.upper()}")
            if value is None and "_pool_" in name:
                value = environ.get(name.upper())  # as the older SDK spells it
            if not value:
                value = next((environ[other] for other in _ALSO.get(name, ()) if environ.get(other)), value)
            if value:
                several = field.annotation in (tuple[str, ...], tuple[str, ...] | None)
                found[name] = tuple(k for k in value.split(",") if k) if several else value
        found.update({name: value for name, value in overrides.items() if value is not None})
        return cls.model_validate(found)

    @property
    def store_url(self) -> str:
        return self.database_url or f"sqlite:///{self.home / 'skerry.db'}"
