"""How a sandbox may be named, and how long "10m" is."""

from __future__ import annotations

import base64
import math
import re
from functools import lru_cache
from hashlib import sha256

from skerry.errors import InvalidRequestError, InvalidSandboxIdError
from skerry.models import MARK

RESERVED = frozenset({"www", "api", "admin", "root", "system", "cloudflare", "workers"})
LONGEST = 63

OWNER = re.compile(r"[a-z0-9][a-z0-9._@+-]{0,99}")
"""How an owner may be named."""

_ID = re.compile(r"[a-z0-9][a-z0-9_-]*")
_MARKED = re.compile(r"[a-z0-9](?:[a-z0-9_-]{0,61}[a-z0-9_])?-[a-z2-7]{8}-")
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([smhd]?)")
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_LONGEST_SECONDS = 36_500 * 86400


LOCAL = "local"
"""The owner of all that was made without an API key of the store: where there are no others, of everything."""


@lru_cache(maxsize=4096)
def mark_of(owner: str) -> str:
    """What the ids of an owner's sandboxes end in, within the server; nothing for the local one.

    So the same id means another sandbox for each owner, and what is another's cannot even be named. Nobody's id ends in
    a hyphen, and a host name may hold one.
    """
    if owner == LOCAL:
        return ""
    digest = sha256(b"owner of sandboxes\0" + owner.encode()).digest()
    return f"-{base64.b32encode(digest[:5]).decode().lower()}-"


def mark_in(id: str) -> str:
    """The mark that an id of the server's ends in."""
    return id[-MARK:] if id.endswith("-") else ""


def normalise_id(raw: str) -> str:
    """The one spelling of a sandbox's id, with the mark of its owner if it has one already."""
    return raw if raw.endswith("-") and _MARKED.fullmatch(raw) else checked_id(raw)


def checked_id(raw: str) -> str:
    """An id as people give it: trimmed and lower-cased. What cannot be used is refused, never mended."""
    id = raw.strip()
    if not 1 <= len(id) <= LONGEST:
        raise _invalid(f"A sandbox id has 1 to {LONGEST} characters, not {len(id)}.", "INVALID_SANDBOX_ID_LENGTH")
    if id.startswith("-") or id.endswith("-"):
        raise _invalid(f"The sandbox id {id!r} begins or ends with a hyphen.", "INVALID_SANDBOX_ID_HYPHENS")
    # Lower-casing comes after the test for ASCII: it would turn the Kelvin sign into a plain k.
    if not id.isascii() or not _ID.fullmatch(id := id.lower()):
        raise _invalid(
            f"The sandbox id {id!r} has characters other than a-z, 0-9, - and _, or begins with _.",
            "INVALID_SANDBOX_ID_CHARACTERS",
        )
    if id in RESERVED:
        raise _invalid(f"The sandbox id {id!r} is reserved.", "RESERVED_SANDBOX_ID")
    return id


def parse_duration(value: str | float | None) -> float | None:
    """Seconds, from a number of them or a text such as '30s', '10m', '1h', '2d'; None, 0 and 'never' are None."""
    if value is None:
        return None
    seconds = _seconds(value)
    if seconds is None or not 0 <= seconds <= _LONGEST_SECONDS:
        raise InvalidRequestError(
            f"{_short(value)} is not a duration.",
            hint="Give seconds, or a text like '30s', '10m', '1h' or '2d', at most '36500d'; 'never' for no end.",
        )
    return seconds or None


def _seconds(value: str | float) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        text = value.strip().lower()
        if text == "never":
            return 0.0
        match = _DURATION.fullmatch(text)
        return float(match[1]) * _SECONDS[match[2]] if match else None
    try:
        seconds = float(value)
    except OverflowError:
        return None
    return None if math.isnan(seconds) else seconds


def _short(value: object) -> str:
    # Beyond some 4,300 digits Python refuses to write an integer out.
    text = (
        f"A number of {value.bit_length()} bits" if isinstance(value, int) and value.bit_length() > 64 else repr(value)
    )
    return text if len(text) <= 40 else f"{text[:40]}…"


def _invalid(message: str, reason: str) -> InvalidSandboxIdError:
    return InvalidSandboxIdError(
        message,
        hint=f"Use 1 to {LONGEST} of a-z, 0-9, - and _, beginning with a letter or digit.",
        details={"reason": reason},
    )
