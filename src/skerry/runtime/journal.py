"""What a background process has said, kept in order, for readers who come late, follow, or fall behind."""

from __future__ import annotations

import asyncio
import struct
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import IO, Literal

Stream = Literal["stdout", "stderr"]

SEGMENT = 16 << 20
MEMORY = 128 << 10

_HEADER = struct.Struct("<BdI")
_STREAMS: tuple[Stream, Stream] = ("stdout", "stderr")


@dataclass(frozen=True, slots=True)
class Entry:
    stream: Stream
    at: datetime
    data: bytes


class Journal:
    """An append-only log of which the last 16 to 32 MiB are kept: two segments, the older one dropped when the newer
    is full. A little stays in memory, more goes to unnamed files."""

    def __init__(self, segment: int = SEGMENT) -> None:
        self._size = segment
        self._old: IO[bytes] | None = None
        self._new = _file()
        self._old_start = self._new_start = self._end = 0
        self.dropped: Counter[str] = Counter()
        self._old_bytes: Counter[str] = Counter()
        self._new_bytes: Counter[str] = Counter()
        self._changed = asyncio.Event()
        self.closed = False

    def add(self, stream: Stream, data: bytes) -> None:
        if self.closed:
            return
        if len(data) > self._size:
            for start in range(0, len(data), self._size):
                self.add(stream, data[start : start + self._size])
            return
        if self._end - self._new_start + len(data) > self._size:
            self._rotate()
        header = _HEADER.pack(_STREAMS.index(stream), datetime.now(UTC).timestamp(), len(data))
        self._new.seek(0, 2)
        self._new.write(header + data)
        self._new_bytes[stream] += len(data)
        self._end += len(header) + len(data)
        self._notify()

    def close(self) -> None:
        """No more will come; readers end when they have read what is there."""
        self.closed = True
        self._notify()

    def discard(self) -> None:
        self.close()
        self._new.close()
        if self._old is not None:
            self._old.close()
        self._old, self._new = None, _file()
        self._old_start = self._new_start = self._end

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _rotate(self) -> None:
        if self._old is not None:
            self._old.close()
        self.dropped += self._old_bytes
        self._old, self._old_start, self._old_bytes = self._new, self._new_start, self._new_bytes
        self._new, self._new_start, self._new_bytes = _file(), self._end, Counter()

    def _entries(self, position: int, end: int) -> list[tuple[Entry, int]]:
        """A batch of entries from ``position`` on, each with the position after it; about a megabyte at most."""
        found: list[tuple[Entry, int]] = []
        total = 0
        while position < end and total < 1 << 20:
            inside_old = self._old is not None and position < self._new_start
            file, start = (self._old, self._old_start) if inside_old else (self._new, self._new_start)
            assert file is not None
            file.seek(position - start)
            index, at, length = _HEADER.unpack(file.read(_HEADER.size))
            data = file.read(length)
            position += _HEADER.size + length
            total += length
            found.append((Entry(_STREAMS[index], datetime.fromtimestamp(at, UTC), data), position))
        return found

    def text(self) -> tuple[bytes, bytes]:
        """All of stdout and all of stderr that is kept."""
        parts: dict[Stream, list[bytes]] = {"stdout": [], "stderr": []}
        position = self._old_start
        while batch := self._entries(position, self._end):
            for entry, _ in batch:
                parts[entry.stream].append(entry.data)
            position = batch[-1][1]
        return b"".join(parts["stdout"]), b"".join(parts["stderr"])

    async def read(self, *, replay: bool = True, follow: bool = True) -> AsyncIterator[Entry]:
        """Entries from the oldest kept (or from now), then new ones as they come. A reader that falls behind what is
        kept goes on with the oldest there is."""
        position = self._old_start if replay else self._end
        while True:
            position = max(position, self._old_start)
            batch = self._entries(position, self._end)
            for entry, _ in batch:
                yield entry
            if batch:
                position = batch[-1][1]
                continue
            if self.closed or not follow:
                return
            await self._changed.wait()


def _file() -> IO[bytes]:
    return tempfile.SpooledTemporaryFile(max_size=MEMORY)
