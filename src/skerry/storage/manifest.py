"""What a backup consists of. A backup exists from the moment its manifest does, which is written last."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from skerry.errors import BackupDamagedError, BackupKeyError
from skerry.models import BackupInfo
from skerry.storage.encryption import ALGORITHM, Key, Seal, reopened

PART = 16 << 20
"""So much of the archive goes into a part."""
LARGEST = 64 << 20
"""No manifest is larger: that would be a backup of terabytes."""

_STRICT = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class Part(BaseModel):
    model_config = _STRICT

    size: int = Field(ge=0, le=2 * PART)
    content: int = Field(ge=0, le=PART)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class Encryption(BaseModel):
    model_config = _STRICT

    algorithm: Literal["AES-256-GCM"] = ALGORITHM  # type: ignore[assignment]
    salt: str
    sign: str


class Manifest(BaseModel):
    model_config = _STRICT

    version: Literal[1] = 1
    id: str
    dir: str
    name: str | None
    sandbox: str
    created_at: datetime
    expires_at: datetime | None
    compression: Literal["zstd", "none"]
    encryption: Encryption | None
    files: int = Field(ge=0)
    bytes: int = Field(ge=0)
    archive: int = Field(ge=0)
    """The size of the tar archive."""
    sha256: str
    """Of the checksums of all parts, as bytes, in their order."""
    parts: list[Part]
    left_out: dict[str, int]
    examples: dict[str, list[str]]

    @property
    def machine(self) -> bool:
        return self.dir == "/"

    def info(self, bucket: str) -> BackupInfo:
        return BackupInfo(
            id=self.id,
            dir=self.dir,
            bucket=bucket,
            name=self.name,
            sandbox_id=self.sandbox,
            created_at=self.created_at,
            expires_at=self.expires_at,
            size=sum(part.size for part in self.parts),
            bytes=self.bytes,
            files=self.files,
            compression=self.compression,
            encrypted=self.encryption is not None,
            left_out=self.left_out,
            examples=self.examples,
        )

    def expired(self, moment: datetime) -> bool:
        return self.expires_at is not None and self.expires_at <= moment


def prefix_of(id: str) -> str:
    return f"backups/{id}"


def manifest_key(id: str) -> str:
    return f"{prefix_of(id)}/manifest.json"


def part_key(id: str, number: int) -> str:
    return f"{prefix_of(id)}/{number:06}.tar"


def written(manifest: Manifest, seal: Seal | None) -> bytes:
    text = manifest.model_dump_json()
    body = {"manifest": text, "mac": None if seal is None else seal.mac(text.encode())}
    return json.dumps(body, indent=1).encode()


def read(id: str, data: bytes) -> tuple[Manifest, str, str | None]:
    """The manifest as it says it is; ``verified`` says whether to believe it."""
    try:
        body: Any = json.loads(data)
        text, mac = body["manifest"], body["mac"]
        manifest = Manifest.model_validate_json(text)
    except (ValueError, KeyError, TypeError, RecursionError, ValidationError):
        raise BackupDamagedError(f"The manifest of backup {id!r} cannot be understood.") from None
    if manifest.id != id or sum(part.content for part in manifest.parts) != manifest.archive:
        raise BackupDamagedError(f"The manifest of backup {id!r} contradicts itself.")
    return manifest, text, mac


def verified(manifest: Manifest, text: str, mac: str | None, key: Key | None) -> Seal | None:
    """The seal of an encrypted backup, once its manifest is known to be by someone who has the key."""
    if manifest.encryption is None:
        if key is not None:
            # Whoever can write to the bucket could otherwise put anything in a backup's place.
            raise BackupKeyError(
                f"Backup {manifest.id!r} is not encrypted, but this server has a key, so nothing vouches for it.",
                hint="Restore it with a server that has no key, if you know where it comes from.",
            )
        return None
    seal = reopened(key, manifest.id, manifest.encryption.salt, manifest.encryption.sign)
    seal.check(text.encode(), str(mac))
    return seal
