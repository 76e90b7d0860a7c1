"""Buckets of a caller's own: where they are and their keys came with the request, and are kept, sealed, with the mount.

The server connects to the address it is given. Where others may ask, that is only to the stores everybody knows, or to
those that its operator names; otherwise a caller could have it knock at doors of its own network.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from skerry.errors import BucketEndpointError, BucketNotConfiguredError, InvalidRequestError
from skerry.models import MountBucket
from skerry.settings import Settings

if TYPE_CHECKING:
    from skerry.control.store import MountRow
    from skerry.egress.vault import Vault
    from skerry.storage.bucket import Bucket

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_KNOWN = re.compile(
    r"[a-z0-9-]+(?:\.(?:eu|fedramp))?\.r2\.cloudflarestorage\.com"
    r"|s3(?:[.-](?:dualstack\.)?[a-z0-9-]+)?\.amazonaws\.com(?:\.cn)?"
    r"|storage\.googleapis\.com"
)

Own = dict[str, Any]


class OwnBuckets:
    def __init__(self, settings: Settings, closed: Callable[[], bool], vault: Callable[[], Vault]) -> None:
        """``closed``: whether the server wants keys; ``vault``: the server's, once it is open."""
        self._settings = settings
        self._closed = closed
        self._vault = vault

    def kept(self, request: MountBucket, id: str, path: str) -> Own | None:
        """What is stored of a bucket that the request describes; None where it means one that is configured."""
        if request.credentials is None:
            return None
        if request.endpoint is None or request.bucket is None or request.local_bucket:
            raise InvalidRequestError(
                "Credentials belong to a bucket of one's own.", hint="Send bucket and endpoint with them."
            )
        if not _NAME.fullmatch(request.bucket):
            raise InvalidRequestError(f"{request.bucket[:100]!r} is not the name of a bucket.")
        self._check(request.endpoint)
        keys = request.credentials
        sealed = json.dumps([keys.access_key_id, keys.secret_access_key.get_secret_value()])
        return {"endpoint": request.endpoint.rstrip("/"), "sealed": self._vault().seal(sealed, _purpose(id, path))}

    def opened(self, row: MountRow) -> Bucket:
        """Judged again: what may be reached can have changed since it was mounted."""
        from skerry.storage.buckets import opened_with

        own = row.own or {}
        self._check(own["endpoint"])
        keys = self._keys(row)
        if keys is None:
            raise BucketNotConfiguredError(
                f"The keys of bucket {row.bucket!r} cannot be opened with this server's key.",
                hint="Unmount it, and mount it again.",
            )
        return opened_with(row.bucket, own["endpoint"], *keys)

    def same(self, one: MountRow, other: MountRow) -> bool:
        if one.own is None or other.own is None:
            return one.own is other.own
        return bool(one.own["endpoint"] == other.own["endpoint"] and self._keys(one) == self._keys(other))

    def _keys(self, row: MountRow) -> tuple[str, str] | None:
        from skerry.egress.secret import SecretUnavailable

        try:
            sealed = (row.own or {})["sealed"]
            access, secret = json.loads(self._vault().open(sealed, _purpose(row.sandbox_id, row.path)))
        except SecretUnavailable:
            return None
        return access, secret

    def _check(self, endpoint: str) -> None:
        try:
            parts = urlsplit(endpoint)
            host, port = (parts.hostname or "").rstrip("."), parts.port
        except ValueError:
            host, port = "", None
        plain = endpoint.isascii() and endpoint.isprintable() and " " not in endpoint
        if not host or not plain or parts.scheme not in ("http", "https") or parts.query or parts.fragment:
            raise InvalidRequestError("The endpoint is not the address of a store.", hint="https://s3.example.com")
        if parts.username is not None or parts.password is not None:
            raise InvalidRequestError("The endpoint holds credentials.", hint="Send them as credentials.")
        allowed = self._settings.mount_endpoints
        if allowed is None:
            known = parts.scheme == "https" and port in (None, 443) and _KNOWN.fullmatch(host) is not None
            if known or not self._closed():
                return
        elif any(_names(rule, host, port) for rule in allowed):
            return
        raise BucketEndpointError(
            f"This server does not mount buckets at {host}.",
            hint="Its operator can allow it with SKERRY_MOUNT_ENDPOINTS, or name the bucket in buckets.toml.",
            details={"endpoint": f"{parts.scheme}://{host}"},
        )


def _names(rule: str, host: str, port: int | None) -> bool:
    name, _, wanted = rule.strip().lower().partition(":")
    if wanted and wanted != str(port):
        return False
    return name in ("*", host) or (name.startswith("*.") and host.endswith(name[1:]))


def _purpose(id: str, path: str) -> str:
    return f"mount {id} {path}"
