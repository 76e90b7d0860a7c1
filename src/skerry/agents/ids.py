"""Names for what is new."""

from __future__ import annotations

import secrets
import string

_LETTERS = string.ascii_lowercase + string.digits
"""Those that a sandbox's id may have."""


def nanoid(length: int = 12) -> str:
    number, letters = secrets.randbelow(len(_LETTERS) ** length), ""
    for _ in range(length):
        number, letter = divmod(number, len(_LETTERS))
        letters += _LETTERS[letter]
    return letters
