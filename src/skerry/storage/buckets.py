"""Which buckets there are: the default directory, those of a file, and the one that the environment names.

[archive]
url = "s3://my-bucket/skerry"           # or gs://bucket/prefix, or file:///a/directory
endpoint = "https://s3.example.com"     # where it is not Amazon's own
region = "eu-central-1"
access_key_env = "ARCHIVE_KEY"          # the name of a variable; or access_key = "…"
secret_key_env = "ARCHIVE_SECRET"
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from obstore.store import GCSStore, LocalStore, ObjectStore, S3Store
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from skerry.errors import BucketNotConfiguredError, BucketNotFoundError, BucketSettingsError, InvalidRequestError
from skerry.models import BucketInfo
from skerry.redaction import keep
from skerry.storage.bucket import TIMEOUT, Bucket, Item, Kind, check_key

__all__ = ["Bucket", "Buckets", "Item"]

DEFAULT = "default"
REMOTE = ("R2_ENDPOINT", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "PROJECT_DATA_BUCKET_NAME")
SESSION = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
"""They belong together: the token is none of other keys."""
_KINDS: dict[str, Kind] = {"file": "directory", "s3": "s3", "gs": "gcs"}

Keys = Callable[[], dict[str, Any]]


class Entry(BaseModel):
    """One table of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    url: str
    endpoint: str | None = None
    region: str | None = None
    access_key: str | None = Field(None, repr=False)
    secret_key: str | None = Field(None, repr=False)
    access_key_env: str | None = None
    secret_key_env: str | None = None
    credentials_file: Path | None = None
    timeout: float = Field(TIMEOUT, gt=0, le=3600)

    @field_validator("url", "endpoint")
    @classmethod
    def _without_credentials(cls, value: str | None) -> str | None:
        if value is None:
            return None
        parts = urlsplit(value)
        if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
            raise ValueError("write it without credentials, '?' and '#': keys have settings of their own")
        return value

    @property
    def kind(self) -> Kind:
        return _KINDS[urlsplit(self.url).scheme]

    @property
    def location(self) -> str:
        return self.url if self.endpoint is None else f"{self.url} at {self.endpoint}"


@dataclass
class Buckets:
    """Those that are configured. ``open()`` without a name is the default, a directory that needs nothing."""

    home: Path
    path: Path | None = None
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ, repr=False)

    def __post_init__(self) -> None:
        default = Entry(url=(self.home.absolute() / "buckets" / DEFAULT).as_uri())
        self._entries: dict[str, Entry] = {
            DEFAULT: default,
            **_read(self.path or self.home / "buckets.toml", self.path),
        }
        self._open: dict[str, Bucket] = {}

    @property
    def names(self) -> list[str]:
        return sorted({*self._entries, *self._remote()})

    def list(self) -> list[BucketInfo]:
        entries = {**self._entries, **self._remote()}
        return [
            BucketInfo(name=name, kind=entry.kind, location=entry.location, default=name == DEFAULT)
            for name, entry in sorted(entries.items())
        ]

    def open(self, name: str | None = None) -> Bucket:
        name = name or DEFAULT
        if name not in self._open:
            entry = self._entries.get(name) or self._remote().get(name)
            if entry is None:
                raise BucketNotFoundError(
                    f"There is no bucket {name!r}; those that are configured are {', '.join(self.names)}.",
                    hint="Name it in buckets.toml in Skerry's home.",
                    details={"bucket": name, "known": self.names},
                )
            self._open[name] = _opened(name, entry, self.environ)
        return self._open[name]

    def remote(self) -> Bucket:
        """The bucket that ``R2_ENDPOINT`` and its companions name."""
        missing = [name for name in REMOTE if not self.environ.get(name)]
        if missing:
            raise BucketNotConfiguredError(
                f"missing env vars: {', '.join(missing)}",
                hint="Set them for the server, or use a bucket of buckets.toml or the local one.",
                details={"missing": missing},
            )
        return self.open(self.environ["PROJECT_DATA_BUCKET_NAME"])

    def _remote(self) -> dict[str, Entry]:
        if not all(self.environ.get(name) for name in REMOTE):
            return {}
        name = self.environ["PROJECT_DATA_BUCKET_NAME"]
        try:
            entry = Entry(
                url=f"s3://{name}",
                endpoint=self.environ["R2_ENDPOINT"],
                region=self.environ.get("AWS_REGION") or "auto",
                access_key_env="AWS_ACCESS_KEY_ID",
                secret_key_env="AWS_SECRET_ACCESS_KEY",
            )
        except ValidationError as error:
            raise _unusable("R2_ENDPOINT or PROJECT_DATA_BUCKET_NAME", error) from None
        return {name: entry}


def _read(path: Path, asked_for: Path | None) -> dict[str, Entry]:
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read().decode()
        tables = tomllib.loads(text)
    except FileNotFoundError:
        if asked_for is None:
            return {}
        raise BucketSettingsError(f"The file of SKERRY_BUCKETS, {str(path)!r}, does not exist.") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        where = error.strerror if isinstance(error, OSError) else error
        raise BucketSettingsError(f"The buckets' file {str(path)!r} cannot be read: {where}.") from None
    entries = {name: _entry(name, table, f"{str(path)!r}, line {_line(text, name)}") for name, table in tables.items()}
    if stat.S_IMODE(mode) & 0o077 and any(entry.access_key or entry.secret_key for entry in entries.values()):
        raise BucketSettingsError(
            f"The buckets' file {str(path)!r} holds keys and may be read by others.",
            hint=f"chmod 600 {path}, or name environment variables in it (access_key_env, secret_key_env).",
        )
    return entries


def _line(text: str, name: str) -> int:
    """Where a table begins; tomllib does not tell."""
    begins = re.compile(rf"""\s*(\[\s*)?["']?{re.escape(name)}["']?\s*[].=]""")
    return next((number for number, line in enumerate(text.splitlines(), 1) if begins.match(line)), 1)


def _entry(name: str, table: Any, place: str) -> Entry:
    where = f"[{name}] in {place},"
    if not isinstance(table, dict):
        raise BucketSettingsError(f"{name!r} in {place}, is no table.", hint='Write [name] and url = "…" below it.')
    try:
        entry = Entry.model_validate(table)
    except ValidationError as error:
        raise _unusable(where, error) from None
    parts = urlsplit(entry.url)
    if parts.scheme not in _KINDS or (parts.scheme == "file") != (not parts.netloc):
        raise BucketSettingsError(
            f"The url of {where} is not one Skerry knows.", hint="Write s3://bucket, gs://bucket or file:///directory."
        )
    return entry


def _unusable(where: str, error: ValidationError) -> BucketSettingsError:
    said = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors(include_input=False)[:5])
    return BucketSettingsError(f"{where} cannot be used: {said}.")


def _opened(name: str, entry: Entry, environ: Mapping[str, str]) -> Bucket:
    parts = urlsplit(entry.url)
    prefix = parts.path.strip("/") if entry.kind != "directory" else ""
    if prefix:
        check_key(prefix)
    return Bucket(name, entry.kind, _store(name, entry, parts.netloc, parts.path, environ), prefix, entry.timeout)


def _store(
    name: str,
    entry: Entry,
    bucket: str,
    path: str,
    environ: Mapping[str, str],
    keys: Keys | None = None,
) -> ObjectStore:
    limit = timedelta(seconds=entry.timeout)
    client: Any = {
        "connect_timeout": min(limit, timedelta(seconds=5)),
        "read_timeout": limit,
        "timeout": timedelta(seconds=entry.timeout * 15),
        "allow_http": bool(entry.endpoint and entry.endpoint.startswith("http:")),
    }
    retry: Any = {
        "max_retries": 3,
        "retry_timeout": limit,
        "backoff": {"init_backoff": timedelta(milliseconds=50), "max_backoff": timedelta(seconds=2), "base": 2},
    }
    if entry.kind == "directory":
        try:
            Path(path).mkdir(parents=True, exist_ok=True, mode=0o700)
            return LocalStore(path, automatic_cleanup=True, mkdir=True)
        except OSError as error:
            raise BucketSettingsError(
                f"The directory {path!r} of bucket {name!r} cannot be used: {error.strerror}."
            ) from None
    if entry.kind == "gcs":
        google: Any = {"application_credentials": str(entry.credentials_file)} if entry.credentials_file else {}
        return GCSStore(bucket, config=google, client_options=client, retry_config=retry)
    options: Any = {"region": entry.region or "us-east-1", "virtual_hosted_style_request": False}
    if entry.endpoint:
        options["endpoint"] = entry.endpoint
    given: Any = keys or _keys(name, entry, environ)
    if given is None:
        return S3Store(bucket, config=options, client_options=client, retry_config=retry)
    return S3Store(bucket, config=options, client_options=client, retry_config=retry, credential_provider=given)


def opened_with(name: str, endpoint: str, access_key: str, secret_key: str) -> Bucket:
    """One that is not configured, with these keys and nothing that the machine itself offers."""
    try:
        entry = Entry(url=f"s3://{name}", endpoint=endpoint, region=_region(endpoint))
    except ValidationError as error:
        raise InvalidRequestError(
            f"The endpoint cannot be used: {error.errors(include_input=False)[0]['msg']}"
        ) from None
    keep(secret_key)
    keys = _provider(access_key, secret_key)
    return Bucket(name, "s3", _store(name, entry, name, "", {}, keys), "", entry.timeout)


def _provider(access_key: str, secret_key: str, token: str | None = None) -> Keys:
    """In place of the environment's, of which a session's token would otherwise be sent along."""
    found = {"access_key_id": access_key, "secret_access_key": secret_key, "token": token, "expires_at": None}
    return lambda: found


def _region(endpoint: str) -> str:
    named = re.fullmatch(
        r"s3[.-](?:dualstack\.)?([a-z0-9-]+)\.amazonaws\.com(?:\.cn)?", urlsplit(endpoint).hostname or ""
    )
    return named[1] if named else "us-east-1"


def _keys(name: str, entry: Entry, environ: Mapping[str, str]) -> Keys | None:
    """None configured means whatever the machine itself offers (its environment, its role)."""
    access = _key(name, entry.access_key, entry.access_key_env, environ)
    secret = _key(name, entry.secret_key, entry.secret_key_env, environ)
    if access is None and secret is None:
        return None
    if access is None or secret is None:
        raise BucketSettingsError(
            f"Bucket {name!r} has one of its two keys.", hint="Name both, or neither to use what the machine offers."
        )
    session = (entry.access_key_env, entry.secret_key_env) == SESSION[:2]
    return _provider(access, secret, (environ.get(SESSION[2]) or None) if session else None)


def _key(name: str, value: str | None, variable: str | None, environ: Mapping[str, str]) -> str | None:
    if variable is not None and not environ.get(variable):
        raise BucketNotConfiguredError(
            f"missing env vars: {variable}",
            hint=f"Bucket {name!r} takes a key from it; set it for the server.",
            details={"missing": [variable]},
        )
    if found := value or environ.get(variable or ""):
        keep(found)
        return found
    return None
