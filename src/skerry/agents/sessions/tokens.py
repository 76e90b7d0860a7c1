"""Tokens of clients and of sandboxes: shown once, kept as digests."""

from __future__ import annotations

import hmac
import secrets
from hashlib import sha256


def fresh() -> str:
    return secrets.token_urlsafe(32)


def digest(token: str) -> str:
    return sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


def matches(token: str, kept: str | None) -> bool:
    return kept is not None and hmac.compare_digest(digest(token), kept)
