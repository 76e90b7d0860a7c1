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
        return self.number(key) > 0

    def number(self, key: bytes) -> int:
        """Which of them it is, from 1; 0 for none."""
        digest = sha256(key.strip()).digest()
        same = (place * hmac.compare_digest(digest, known) for place, known in enumerate(self._digests, 1))
        return max(same, default=0)

    def are_in(self, name: bytes, value: bytes) -> bool:
        """Whether a header, by its lower-case name, holds one: `Authorization: Bearer KEY` or `X-API-Key: KEY`."""
        return self.number_in(name, value) > 0

    def number_in(self, name: bytes, value: bytes) -> int:
        """The same, as the number of the key."""
        if name == b"authorization":
            kind, _, value = value.partition(b" ")
            return self.number(value) if kind.lower() == b"bearer" else 0
        return self.number(value) if name == b"x-api-key" else 0
