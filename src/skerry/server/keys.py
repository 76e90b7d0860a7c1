"""What in a request may hold a key."""

from __future__ import annotations

from skerry.control.keys import is_key
from skerry.control.reception import Reception
from skerry.signatures import is_service_token


def key_in(name: bytes, value: bytes) -> bytes | None:
    """What a header, by its lower-case name, gives as a key: `Authorization: Bearer KEY` or `X-API-Key: KEY`."""
    if name == b"authorization":
        kind, _, value = value.partition(b" ")
        return value.strip() if kind.lower() == b"bearer" else None
    return value.strip() if name == b"x-api-key" else None


def is_ours(reception: Reception, name: bytes, value: bytes) -> bool:
    """Whether a header holds a key of this server, or one that it may have had: no app is to see it."""
    key = key_in(name, value)
    return key is not None and (reception.number(key) > 0 or is_key(key.decode("latin-1")) or is_service_token(key))
