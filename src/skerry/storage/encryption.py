"""Backups that only those with the key can read, or make.

Of the server's key, which is 32 bytes, each backup has keys of its own, derived with a random salt. A part is sealed
with AES-256-GCM; which backup it belongs to, its number and whether it is the last one are authenticated with it, so
that parts cannot be exchanged, left out or cut off. The manifest carries a MAC.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import secrets
import stat
from pathlib import Path

from skerry.errors import BackupDamagedError, BackupKeyError, BucketSettingsError

SIZE = 32
ALGORITHM = "AES-256-GCM"


class Key:
    """The server's key. It is never shown."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def __repr__(self) -> str:
        return "<Key>"

    def derive(self, salt: bytes, use: str) -> bytes:
        # It takes long to import, and many servers have no key.
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        return HKDF(SHA256(), SIZE, salt, b"skerry backup 1 " + use.encode()).derive(self._secret)


class Seal:
    """The keys of one backup."""

    def __init__(self, key: Key, backup: str, salt: bytes | None = None) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self.salt = salt or secrets.token_bytes(SIZE)
        self._backup = backup
        self._parts = AESGCM(key.derive(self.salt, "parts"))
        self._manifest = key.derive(self.salt, "manifest")
        self.sign = key.derive(self.salt, "sign")[:8].hex()
        """By which a wrong key is told from a damaged manifest."""

    def close(self, data: bytes, number: int, last: bool) -> bytes:
        return self._parts.encrypt(number.to_bytes(12, "big"), data, self._about(number, last))

    def open(self, data: bytes, number: int, last: bool) -> bytes:
        from cryptography.exceptions import InvalidTag

        try:
            return self._parts.decrypt(number.to_bytes(12, "big"), data, self._about(number, last))
        except InvalidTag:
            raise BackupDamagedError(f"Part {number} of backup {self._backup!r} was changed in the bucket.") from None

    def mac(self, data: bytes) -> str:
        return hmac.digest(self._manifest, data, "sha256").hex()

    def check(self, data: bytes, mac: str) -> None:
        if not hmac.compare_digest(self.mac(data), mac):
            raise BackupDamagedError(f"The manifest of backup {self._backup!r} was changed in the bucket.")

    def _about(self, number: int, last: bool) -> bytes:
        return f"{self._backup} {number} {'last' if last else 'more'}".encode()


def reopened(key: Key | None, backup: str, salt: str, sign: str) -> Seal:
    if key is None:
        raise BackupKeyError(
            f"Backup {backup!r} is encrypted, and this server has no key.",
            hint="Give it the key the backup was made with, as SKERRY_BACKUP_KEY or SKERRY_BACKUP_KEY_FILE.",
        )
    seal = Seal(key, backup, bytes.fromhex(salt))
    if not hmac.compare_digest(seal.sign, sign):
        raise BackupKeyError(
            f"Backup {backup!r} is encrypted with another key than this server's.",
            hint="Give it the key the backup was made with, as SKERRY_BACKUP_KEY or SKERRY_BACKUP_KEY_FILE.",
        )
    return seal


def read_key(value: str | None, path: Path | None) -> Key | None:
    """The key of a setting or a file: 32 bytes, as hexadecimal digits or base64."""
    if value is None and path is None:
        return None
    if value is not None and path is not None:
        raise BucketSettingsError("SKERRY_BACKUP_KEY and SKERRY_BACKUP_KEY_FILE are both set.", hint="Set one of them.")
    if path is not None:
        try:
            if stat.S_IMODE(path.stat().st_mode) & 0o077:
                raise BucketSettingsError(
                    f"The key file {str(path)!r} may be read by others.", hint=f"chmod 600 {path}"
                )
            value = path.read_text()
        except (OSError, UnicodeDecodeError):
            raise BucketSettingsError(f"The key file {str(path)!r} cannot be read.") from None
    assert value is not None
    return Key(_decoded(value.strip()))


def _decoded(text: str) -> bytes:
    try:
        secret = bytes.fromhex(text) if len(text) == 2 * SIZE else base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error):
        secret = b""
    if len(secret) != SIZE:
        raise BucketSettingsError(
            "The key of the backups is not 32 bytes, as 64 hexadecimal digits or base64.",
            hint="Make one with: openssl rand -hex 32",
        )
    return secret
