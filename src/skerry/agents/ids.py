"""Names for what is new."""

from __future__ import annotations

import secrets
import string

_LETTERS = string.ascii_lowercase + string.digits
"""Those that a sandbox's id may have."""


def nanoid(length: int = 12) -> str:
    return "".join(secrets.choice(_LETTERS) for _ in range(length))
