"""The bytes of files: descriptors that came out of a sandbox, and what kind of content they hold.

A descriptor from inside may be anything, so it is looked at before it is used: only a regular file is read or written.
"""

from __future__ import annotations

import asyncio
import codecs
import mimetypes
import os
import stat
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Self, TypeVar

from skerry.errors import IsDirectoryError, NotRegularFileError
from skerry.portal.contract import Portal
from skerry.runtime.mounted import OnBucketError, fetch, fstat
from skerry.runtime.paths import errors_about

INLINE = 256 * 1024
"""Up to here a read or write is faster than a thread; beyond, a slow disk must not hold up the event loop."""
CHUNK = 1 << 20
SNIFF = 8192
UNSIZED = 32 << 20
"""How much is read of a file that claims to be empty, as those in /proc do."""

T = TypeVar("T")

# No system files: the answer must not depend on the host the server runs on.
_types = mimetypes.MimeTypes(filenames=())
_SOURCE = {
    ".cfg": "text/plain", ".conf": "text/plain", ".go": "text/x-go", ".ini": "text/plain",
    ".jsonl": "application/jsonl", ".jsx": "text/jsx", ".log": "text/plain", ".lock": "text/plain",
    ".md": "text/markdown", ".mdx": "text/markdown",
    ".rs": "text/x-rust", ".rb": "text/x-ruby", ".sh": "application/x-sh", ".sql": "application/sql",
    ".toml": "application/toml", ".ts": "text/typescript", ".tsx": "text/tsx", ".yaml": "application/yaml",
    ".yml": "application/yaml", ".ipynb": "application/x-ipynb+json", ".parquet": "application/vnd.apache.parquet",
    ".wasm": "application/wasm", ".webp": "image/webp", ".woff2": "font/woff2",
}  # fmt: skip
_MAGIC = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"%PDF-", "application/pdf"),
    (b"PK\x03\x04", "application/zip"),
    (b"\x1f\x8b", "application/gzip"),
    (b"\x7fELF", "application/x-executable"),
    (b"SQLite format 3\0", "application/vnd.sqlite3"),
)


def is_binary(data: bytes, *, cut_before: bool = False, cut_after: bool = False) -> bool:
    """Whether this is not UTF-8 text; where it was cut out of a file, a character may be cut in two."""
    if b"\0" in data:
        return True
    start = 0
    if cut_before:
        start = next((n for n, byte in enumerate(data[:4]) if byte & 0xC0 != 0x80), 0)
    try:
        data[start:].decode()
    except UnicodeDecodeError as error:
        return not (cut_after and error.reason == "unexpected end of data")
    return False


def mime_type(path: str, head: bytes, binary: bool) -> str:
    """By the name's extension, unless the content contradicts it; then by the content."""
    extension = os.path.splitext(path)[1].lower()
    guess, encoding = _types.guess_type("file" + extension)
    if encoding is not None:
        guess = {"gzip": "application/gzip", "xz": "application/x-xz", "bzip2": "application/x-bzip2"}.get(encoding)
    if not binary:
        return _SOURCE.get(extension) or guess or "text/plain"
    if guess is None or guess.startswith("text/"):
        guess = _SOURCE.get(extension)
    if guess is not None and not guess.startswith("text/"):
        return guess
    return next((kind for magic, kind in _MAGIC if head.startswith(magic)), "application/octet-stream")


async def in_thread(function: Callable[..., T], *arguments: object) -> T:
    """Like ``asyncio.to_thread``, but does not let go before the thread has: it may be using a descriptor that the
    caller closes next, and whose number somebody else then gets."""
    future = asyncio.get_running_loop().run_in_executor(None, lambda: function(*arguments))
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            try:
                await asyncio.wait({future})
            except asyncio.CancelledError:
                continue
        future.exception()
        raise


async def read_at(fd: int, size: int, offset: int) -> bytes:
    """Up to ``size`` bytes, fewer only at the end of the file."""
    parts: list[bytes] = []
    while size > 0:
        want = min(size, CHUNK)
        data = os.pread(fd, want, offset) if want <= INLINE else await in_thread(os.pread, fd, want, offset)
        if not data:
            break
        parts.append(data)
        offset += len(data)
        size -= len(data)
    return parts[0] if len(parts) == 1 else b"".join(parts)


async def write_whole(fd: int, path: str, data: bytes | bytearray) -> None:
    with errors_about(path):
        if len(data) <= INLINE:
            _write(fd, data)
        else:
            await in_thread(_write, fd, data)


def _write(fd: int, data: bytes | bytearray) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


async def open_regular(portal: Portal, path: str, flags: int, mode: int = 0o666) -> tuple[int, os.stat_result]:
    """Open a regular file inside, and nothing else. Raises ``OnBucketError`` if it is to be written to a bucket."""
    with errors_about(path):
        fd = await portal.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY, mode)
    try:
        status = fstat(fd)
        check_regular(status.st_mode, path)
        os.set_blocking(fd, False)
    except OnBucketError:
        os.close(fd)
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise
        fd, status = await fetch(portal, path)
        check_regular(status.st_mode, path)
    except BaseException:
        os.close(fd)
        raise
    return fd, status


def check_regular(mode: int, path: str) -> None:
    if stat.S_ISDIR(mode):
        raise IsDirectoryError(f"{path!r} is a directory.", details={"path": path})
    if not stat.S_ISREG(mode):
        raise NotRegularFileError(
            f"{path!r} is not a regular file but a device, FIFO or socket.", details={"path": path}
        )


class OpenFile:
    """A regular file of a sandbox, open for reading: it stays readable when it is renamed or deleted meanwhile."""

    def __init__(self, path: str, fd: int, status: os.stat_result) -> None:
        self.path = path
        self.size = status.st_size
        self.mode = stat.S_IMODE(status.st_mode)
        self._fd = fd
        with errors_about(path):
            self._head = head = os.pread(fd, SNIFF, 0)
        self.is_binary = is_binary(head, cut_after=len(head) == SNIFF)
        self.mime_type = mime_type(path, head, self.is_binary)

    async def read(self, size: int, offset: int = 0) -> bytes:
        if len(self._head) == self.size:
            return self._head[offset : offset + size]
        with errors_about(self.path):
            return await read_at(self._fd, size, offset)

    async def chunks(self, offset: int = 0, length: int | None = None, size: int = INLINE) -> AsyncIterator[bytes]:
        """The content, never more than was there when it was opened: a file that keeps growing has an end too."""
        left = max((self.size or UNSIZED) - offset, 0)
        if length is not None:
            left = min(left, length)
        while left and (data := await self.read(min(size, left), offset)):
            offset += len(data)
            left -= len(data)
            yield data
            await asyncio.sleep(0)

    async def look_through(self) -> None:
        """Decide whether it is binary by all of it instead of by its beginning."""
        decoder = codecs.getincrementaldecoder("utf-8")()
        async for chunk in self.chunks(size=CHUNK):
            try:
                if b"\0" in chunk:
                    raise ValueError
                decoder.decode(chunk)
            except ValueError:
                self.is_binary = True
                return
        self.is_binary = bool(decoder.getstate()[0])

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
