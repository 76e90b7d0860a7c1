"""A bucket: a named place for objects, on this machine or far away, behind one contract.

It may be a directory, a bucket of S3 (or of anything that speaks like it) or one of Google's. Keys are relative
to the bucket's prefix and cannot leave it. Whatever goes wrong arrives as an error of ours, in bounded time, and
without credentials.
"""

from __future__ import annotations

import asyncio
import builtins
import re
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, PermissionDeniedError, UnauthenticatedError
from obstore.store import ObjectStore

from skerry.errors import (
    BucketDeniedError,
    BucketError,
    BucketFullError,
    BucketNotFoundError,
    BucketUnreachableError,
    InvalidKeyError,
    ObjectNotFoundError,
    SkerryError,
)
from skerry.models import now
from skerry.storage.upload import upload

LONGEST_KEY = 1024
LONGEST_NAME = 250
"""A directory's file system takes 255 bytes, and a file that is being written has a longer name than in the end."""
TIMEOUT = 20.0
WHOLE = 16 << 20
"""What is larger goes up in parts."""
SLOWEST = 1 << 18
"""So many bytes a second are expected of a bucket that is alive."""

T = TypeVar("T")
Kind = Literal["directory", "s3", "gcs"]

_UNFIT = re.compile(r"[\x00-\x1f\x7f\\]")
_STAGED = re.compile(r"#\d+\Z")


@dataclass(frozen=True)
class Item:
    key: str
    size: int
    modified: datetime
    etag: str | None


@dataclass(frozen=True)
class Bucket:
    name: str
    kind: Kind
    store: ObjectStore
    prefix: str = ""
    timeout: float = TIMEOUT

    def __repr__(self) -> str:
        return f"<Bucket {self.name} ({self.kind}{', below ' + self.prefix if self.prefix else ''})>"

    def within(self, prefix: str) -> Bucket:
        """The same bucket, seen from below a prefix, which nothing done through it can leave."""
        return replace(self, prefix=self._full(prefix)) if prefix.strip("/") else self

    async def get(self, key: str) -> bytes:
        found = await self._call(obstore.get_async(self.store, self._full(key)), key)
        # The headers have come; the body may take as long as its size allows.
        return bytes(await self._call(found.bytes_async(), key, size=found.meta["size"]))

    async def read(self, key: str, start: int, length: int) -> bytes:
        """Some bytes of an object: fewer than asked for at its end, none behind it."""
        if length <= 0:
            return b""
        try:
            asked = obstore.get_range_async(self.store, self._full(key), start=start, length=length)
            return bytes(await self._call(asked, key, size=length))
        except _BehindTheEndError:
            return b""

    async def stream(self, key: str, start: int = 0) -> AsyncIterator[bytes]:
        options: Any = {"range": {"offset": start}} if start else None
        try:
            found = await self._call(obstore.get_async(self.store, self._full(key), options=options), key)
        except _BehindTheEndError:
            return
        chunks = found.stream(min_chunk_size=1 << 20).__aiter__()
        while True:
            try:
                chunk = await self._call(chunks.__anext__(), key, size=1 << 20)
            except StopAsyncIteration:
                return
            yield bytes(chunk)

    async def put(self, key: str, data: bytes | AsyncIterable[bytes]) -> Item:
        """Write an object. It appears whole or not at all; one that fails or is cancelled leaves nothing behind.

        ``modified`` of the answer is by this machine's clock; ``head`` knows the bucket's.
        """
        full = self._full(key)
        if isinstance(data, bytes | bytearray | memoryview) and len(data) <= WHOLE:
            done = await self._call(obstore.put_async(self.store, full, data, use_multipart=False), key, size=len(data))
            return Item(key, len(data), now(), done["e_tag"])
        with self._translated(key):
            size, etag = await upload(self.store, full, data, self._limit(WHOLE))
        return Item(key, size, now(), etag)

    async def create(self, key: str, data: bytes) -> bool:
        """Write a small object if there is none yet; whether this one is it. Of several who try only one succeeds."""
        request = obstore.put_async(self.store, self._full(key), data, mode="create", use_multipart=False)
        try:
            await self._call(request, key, size=len(data))
        except _ThereAlreadyError:
            return False
        return True

    async def head(self, key: str) -> Item:
        return self._item(await self._call(obstore.head_async(self.store, self._full(key)), key))

    async def list(self, prefix: str = "") -> AsyncIterator[Item]:
        """Everything below a prefix, which is a directory's name: ``a`` has ``a/b`` below it, but not ``ab``."""
        pages = obstore.list(self.store, self._full(prefix, empty=True) or None, chunk_size=1000).__aiter__()
        while True:
            try:
                page = await self._call(pages.__anext__(), prefix)
            except StopAsyncIteration:
                return
            for found in page:
                yield self._item(found)

    async def children(self, prefix: str = "") -> tuple[builtins.list[Item], builtins.list[str]]:
        """What lies directly below a prefix: the objects, and the names (as keys) of what holds more."""
        asked = obstore.list_with_delimiter_async(self.store, self._full(prefix, empty=True) or None)
        found = await self._call(asked, prefix)
        inner = sorted(self._relative(path).rstrip("/") for path in found["common_prefixes"])
        return [self._item(one) for one in found["objects"]], inner

    async def delete(self, *keys: str) -> None:
        """Those that are not there are already deleted."""
        full = [self._full(key) for key in keys]
        if self.kind != "directory":
            for start in range(0, len(full), 1000):
                await self._call(obstore.delete_async(self.store, full[start : start + 1000]), keys[start])
            return
        for key, path in zip(keys, full, strict=True):
            try:
                await self._call(obstore.delete_async(self.store, path), key)
            except ObjectNotFoundError:
                continue

    async def copy(self, source: str, target: str) -> None:
        await self._call(obstore.copy_async(self.store, self._full(source), self._full(target)), source, size=WHOLE)

    # -- keys ----------------------------------------------------------------------------------------------------------

    def _full(self, key: str, *, empty: bool = False) -> str:
        if empty and not key.strip("/"):
            return self.prefix
        check_key(key)
        return f"{self.prefix}/{key}".strip("/")

    def _relative(self, path: str) -> str:
        return path.removeprefix(self.prefix).lstrip("/") if self.prefix else path

    def _item(self, found: Any) -> Item:
        return Item(self._relative(found["path"]), found["size"], found["last_modified"], found["e_tag"])

    # -- time and errors -----------------------------------------------------------------------------------------------

    def _limit(self, size: int) -> float:
        # A request may be tried several times, each for at most `timeout` of silence.
        return 3 * self.timeout + size / SLOWEST

    async def _call(self, request: Awaitable[T], key: str, size: int = 0) -> T:
        with self._translated(key):
            async with asyncio.timeout(self._limit(size)):
                return await request

    @contextmanager
    def _translated(self, key: str) -> Iterator[None]:
        try:
            yield
        except (SkerryError, StopAsyncIteration):
            raise
        except Exception as error:
            if (known := self._meaning(error, key)) is None:
                raise
            # Not as the cause: obstore's sentences hold addresses and headers.
            raise known from None

    def _meaning(self, error: Exception, key: str) -> Exception | None:
        said, details = str(error), {"bucket": self.name, "key": key}
        if isinstance(error, FileNotFoundError):
            if "NoSuchBucket" in said:
                return BucketNotFoundError(
                    f"Bucket {self.name!r} is configured, but the service has no such bucket.",
                    hint="Make it there, or put its right name into the url.",
                    details={"bucket": self.name},
                )
            return ObjectNotFoundError(f"There is no object {key!r} in bucket {self.name!r}.", details=details)
        if isinstance(error, TimeoutError):
            return self._unreachable("did not answer in time", details)
        if isinstance(error, PermissionDeniedError | UnauthenticatedError) or _denied(said):
            return BucketDeniedError(
                f"Bucket {self.name!r} refuses its credentials, or they do not allow this.",
                hint="Look at the keys it is configured with, and at what they are allowed to do.",
                details=details,
            )
        if isinstance(error, AlreadyExistsError):
            return _ThereAlreadyError()
        if not type(error).__module__.startswith("obstore") and not isinstance(error, OSError):
            return None
        if "416" in said or "StartTooLarge" in said:
            return _BehindTheEndError()
        if "os error 28" in said or "os error 122" in said or "507 Insufficient" in said:
            return BucketFullError(f"No space is left in bucket {self.name!r}.", details=details)
        if re.search(r"os error (20|21|36|39)\b", said):
            return InvalidKeyError(
                f"Bucket {self.name!r} is a directory and cannot hold {key!r}: a part of that is a file, a directory "
                "or too long a name.",
                details=details,
            )
        if re.search(r"error sending request|timed out|Connect|dns error|os error 1[01]\d", said):
            return self._unreachable("cannot be reached", details)
        status = re.search(r"\b(?:status|Server returned)\D{0,40}\b([45]\d\d)\b", said)
        reason = f"HTTP status {status[1]}" if status else "an answer that says no more"
        return BucketError(f"Bucket {self.name!r} failed with {reason}.", details=details)

    def _unreachable(self, what: str, details: dict[str, str]) -> BucketUnreachableError:
        return BucketUnreachableError(
            f"Bucket {self.name!r} {what}.",
            hint="Look at its endpoint and the network; then try again.",
            details=details,
        )


class _ThereAlreadyError(Exception):
    """Of this module only: somebody else was first."""


class _BehindTheEndError(Exception):
    """Of this module only: to read behind the end gives nothing, and is no error."""


def check_key(key: str) -> str:
    parts = key.split("/")
    try:
        size = len(key.encode())
        longest = max(len(part.encode()) for part in parts)
    except UnicodeEncodeError:
        raise InvalidKeyError(f"The key {key!r} is not UTF-8.") from None
    reason = None
    if not key:
        reason = "is empty"
    elif size > LONGEST_KEY:
        reason = f"is longer than {LONGEST_KEY} bytes"
    elif longest > LONGEST_NAME:
        reason = f"has a part that is longer than {LONGEST_NAME} bytes"
    elif any(part in ("", ".", "..") for part in parts):
        reason = "has an empty part, or one that is '.' or '..', or begins or ends with '/'"
    elif _UNFIT.search(key):
        reason = "holds control characters or a backslash, which some services take for '/'"
    elif any(_STAGED.search(part) for part in parts):
        reason = "has a part that ends with '#' and a number, as files have that are still being written"
    if reason:
        raise InvalidKeyError(f"The key {key[:200]!r} cannot be used: it {reason}.")
    return key


def _denied(said: str) -> bool:
    return bool(re.search(r"AccessDenied|InvalidAccessKeyId|SignatureDoesNotMatch|os error 13|403 Forbidden", said))
