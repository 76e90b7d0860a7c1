"""An archive cut into parts, each an object of its own: compressed, sealed, checksummed, several on their way at once.

The parts of an unencrypted backup, one after the other, are one zstd stream of one tar archive, so that
``cat *.tar | zstd -d | tar x`` restores it without Skerry.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Literal

import zstandard

from skerry.errors import BackupDamagedError, ObjectNotFoundError
from skerry.storage.bucket import Bucket
from skerry.storage.encryption import Seal
from skerry.storage.manifest import PART, Manifest, Part, part_key

TOGETHER = 3
"""So many parts are in memory and on their way at once."""

ARRIVAL = 30.0
"""Seconds that parts have to arrive when they are no longer wanted."""


class Upload:
    """``write`` as the bytes come, ``finish`` at their end; then ``parts``, ``size`` and ``sha256`` are known."""

    def __init__(
        self, bucket: Bucket, id: str, compression: Literal["zstd", "none"], level: int, seal: Seal | None
    ) -> None:
        self._bucket = bucket
        self._id = id
        self._level = level if compression == "zstd" else None
        self._seal = seal
        self._pending: list[bytes] = []
        self._waiting = 0
        self._moving: deque[asyncio.Task[Part]] = deque()
        self._number = 0
        self.parts: list[Part] = []
        self.size = 0
        self.stored = 0

    @property
    def sha256(self) -> str:
        return whole(self.parts)

    async def write(self, data: bytes) -> None:
        while len(data) > PART:
            await self.write(data[:PART])
            data = data[PART:]
        # What is pending is shipped when more comes, not when it is enough: the last part is marked as such.
        if self._waiting + len(data) > PART:
            await self._ship(last=False)
        self._pending.append(data)
        self._waiting += len(data)
        self.size += len(data)

    async def finish(self) -> None:
        await self._ship(last=True)
        while self._moving:
            await self._arrived()

    async def cancel(self) -> None:
        """Until nothing is on its way any more: what arrives after it was looked for would stay for ever."""
        if self._moving:
            await asyncio.wait(self._moving, timeout=ARRIVAL)
        for task in self._moving:
            task.cancel()
        await asyncio.gather(*self._moving, return_exceptions=True)

    async def _ship(self, *, last: bool) -> None:
        if len(self._moving) >= TOGETHER:
            await self._arrived()
        part = b"".join(self._pending)
        self._pending, self._waiting = [], 0
        self._moving.append(asyncio.create_task(self._put(part, self._number, last)))
        self._number += 1

    async def _arrived(self) -> None:
        # Shielded: one that is cancelled on its way may arrive all the same, and later than it is looked for.
        part = await asyncio.shield(self._moving[0])
        self._moving.popleft()
        self.parts.append(part)
        self.stored += part.size

    async def _put(self, content: bytes, number: int, last: bool) -> Part:
        data, digest = await asyncio.to_thread(self._closed, content, number, last)
        await self._bucket.put(part_key(self._id, number), data)
        return Part(size=len(data), content=len(content), sha256=digest)

    def _closed(self, content: bytes, number: int, last: bool) -> tuple[bytes, str]:
        data = content
        if self._level is not None:
            data = zstandard.ZstdCompressor(level=self._level, write_content_size=True).compress(data)
        if self._seal is not None:
            data = self._seal.close(data, number, last)
        return data, hashlib.sha256(data).hexdigest()


async def download(bucket: Bucket, manifest: Manifest, seal: Seal | None) -> AsyncIterator[bytes]:
    """The archive, each part checked before it is given out; that none was wrong is known at the end."""
    if whole(manifest.parts) != manifest.sha256:
        raise BackupDamagedError(f"Backup {manifest.id!r} is damaged: its checksum is wrong.")
    waiting: deque[asyncio.Task[bytes]] = deque()
    numbers = iter(range(len(manifest.parts)))
    try:
        while True:
            while len(waiting) < TOGETHER and (number := next(numbers, None)) is not None:
                waiting.append(asyncio.create_task(_part(bucket, manifest, seal, number)))
            if not waiting:
                break
            content = await waiting[0]
            waiting.popleft()
            yield content
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def whole(parts: Sequence[Part]) -> str:
    """The checksum of all: of the parts' own, one after the other, which bind what is in them and their order."""
    return hashlib.sha256(b"".join(bytes.fromhex(part.sha256) for part in parts)).hexdigest()


async def _part(bucket: Bucket, manifest: Manifest, seal: Seal | None, number: int) -> bytes:
    part = manifest.parts[number]
    try:
        # One byte more than there should be, and no object can fill our memory.
        data = await bucket.read(part_key(manifest.id, number), 0, part.size + 1)
    except ObjectNotFoundError:
        raise BackupDamagedError(f"Backup {manifest.id!r} is damaged: part {number} is missing.") from None
    return await asyncio.to_thread(_opened, data, manifest, seal, number)


def _opened(data: bytes, manifest: Manifest, seal: Seal | None, number: int) -> bytes:
    part = manifest.parts[number]
    if len(data) != part.size or hashlib.sha256(data).hexdigest() != part.sha256:
        raise BackupDamagedError(f"Backup {manifest.id!r} is damaged: part {number} is not as it was written.")
    if seal is not None:
        data = seal.open(data, number, last=number == len(manifest.parts) - 1)
    if manifest.compression == "zstd":
        data = _unpacked(data, part.content, manifest.id, number)
    if len(data) != part.content:
        raise BackupDamagedError(f"Backup {manifest.id!r} is damaged: part {number} is not as large as it says.")
    return data


def _unpacked(data: bytes, size: int, id: str, number: int) -> bytes:
    try:
        # The frame says how large it becomes, and is held to it.
        if zstandard.frame_content_size(data) != size:
            raise BackupDamagedError(f"Backup {id!r} is damaged: part {number} is not as large as it says.")
        return zstandard.ZstdDecompressor(max_window_size=1 << 27).decompress(data, max_output_size=size)
    except zstandard.ZstdError:
        raise BackupDamagedError(f"Backup {id!r} is damaged: part {number} cannot be decompressed.") from None
