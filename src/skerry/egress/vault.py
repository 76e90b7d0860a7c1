"""Values that were given to the server to keep: encrypted, with a key that lies in its home and not in its database."""

from __future__ import annotations

import base64
import os
import secrets
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from skerry.egress.secret import SecretUnavailable

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

_KEY = 32
_NONCE = 12


class Vault:
    def __init__(self, home: Path) -> None:
        directory = home / "authority"
        directory.mkdir(mode=0o700, exist_ok=True)
        self._key = _key(directory / "vault.key")

    @cached_property
    def _cipher(self) -> AESGCM:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # takes long to import, and many keep nothing

        return AESGCM(self._key)

    def seal(self, text: str, purpose: str) -> str:
        """Only to be opened for the same purpose: a value cannot be moved to another host."""
        nonce = secrets.token_bytes(_NONCE)
        return base64.b64encode(nonce + self._cipher.encrypt(nonce, text.encode(), purpose.encode())).decode()

    def open(self, sealed: str, purpose: str) -> str:
        from cryptography.exceptions import InvalidTag

        data = base64.b64decode(sealed)
        try:
            return self._cipher.decrypt(data[:_NONCE], data[_NONCE:], purpose.encode()).decode()
        except InvalidTag:
            raise SecretUnavailable("A stored value cannot be opened with this server's key.") from None


def _key(path: Path) -> bytes:
    """Several processes may share a home: the first to make it has made it for all."""
    if not path.exists():
        temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(secrets.token_bytes(_KEY))
            try:
                path.hardlink_to(temporary)
            except FileExistsError:
                pass
        finally:
            temporary.unlink()
    return path.read_bytes()
