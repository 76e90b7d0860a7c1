"""The server's API keys, and what in a request may hold one."""

from __future__ import annotations

import hmac
from hashlib import sha256


class Keys:
    """Kept as digests. Every one is compared, in full, so that the time taken tells nothing about any of them."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        self._digests = [sha256(key.encode()).digest() for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def know(self, key: bytes) -> bool:
        digest = sha256(key.strip()).digest()
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0

    def are_in(self, name: bytes, value: bytes) -> bool:
        """Whether a header, by its lower-case name, holds one: `Authorization: Bearer KEY` or `X-API-Key: KEY`."""
        if name == b"authorization":
            kind, _, value = value.partition(b" ")
            return kind.lower() == b"bearer" and self.know(value)
        return name == b"x-api-key" and self.know(value)
