"""Signed links: whoever has one may see a private preview until it expires."""

from __future__ import annotations

import hmac
import os
import secrets
import time
from base64 import urlsafe_b64encode
from hashlib import sha256
from pathlib import Path

from skerry.errors import InternalError

SECRET_BYTES = 32


def sign(secret: bytes, id: str, port: int, token: str, expires: int) -> str:
    """``<expiry>.<signature>`` for one exposure, until ``expires`` (seconds since 1970).

    The token is covered, though not shown: a port that is exposed anew, or a sandbox that is made anew under an old
    name, is not opened by links of before.
    """
    message = f"{id}\n{port}\n{token}\n{expires}".encode()
    signature = urlsafe_b64encode(hmac.digest(secret, message, sha256)).decode().rstrip("=")
    return f"{expires}.{signature}"


def verify(secret: bytes, id: str, port: int, token: str, link: str) -> bool:
    """Whether the link was signed for this exposure and has not expired."""
    expiry, _, _ = link.partition(".")
    # One spelling only; int() would also take "+7", "0_7" and other scripts' digits.
    expires = int(expiry) if expiry.isascii() and expiry.isdigit() and len(expiry) <= 15 else 0
    expected = sign(secret, id, port, token, expires)
    genuine = hmac.compare_digest(expected.encode(), link.encode("utf-8", "surrogateescape"))
    return genuine and time.time() < expires


def secret_of(home: Path) -> bytes:
    """The key that links of this home are signed with: random, made when first wanted, readable by its owner only."""
    path = home / "link.key"
    try:
        return _read(path)
    except FileNotFoundError:
        pass
    fresh = home / f".link.key.{secrets.token_hex(4)}"
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as out:
        out.write(secrets.token_bytes(SECRET_BYTES))
    try:
        path.hardlink_to(fresh)
    except FileExistsError:
        pass  # another process was faster, and its key is the one
    finally:
        fresh.unlink()
    return _read(path)


def _read(path: Path) -> bytes:
    secret = path.read_bytes()
    if len(secret) < SECRET_BYTES:
        # An empty key would make every signature one that anybody can compute.
        raise InternalError(
            f"The key of signed links, {path.name}, is damaged: it is too short.",
            hint="Remove it from the server's home; a new one is made, and links of before stop working.",
        )
    return secret
