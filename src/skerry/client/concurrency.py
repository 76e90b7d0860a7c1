"""The few things that differ between the async and the sync client, in pairs.

``scripts/generate_sync.py`` turns every ``…_async`` and ``Async…`` name into the one without it.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable, Iterator
from typing import Any, BinaryIO, TypeVar, cast

T = TypeVar("T")

CHUNK = 256 * 1024

AsyncLock = asyncio.Lock
Lock = threading.Lock

AsyncContent = str | bytes | bytearray | memoryview | BinaryIO | Iterable[bytes] | AsyncIterable[bytes]
Content = str | bytes | bytearray | memoryview | BinaryIO | Iterable[bytes]


pause_async = asyncio.sleep
pause = time.sleep


async def run_blocking_async(function: Callable[..., T], *args: Any) -> T:
    return await asyncio.to_thread(function, *args)


def run_blocking(function: Callable[..., T], *args: Any) -> T:
    return function(*args)


async def call_async(callback: Callable[..., Any] | None, *args: Any) -> None:
    """Call what the user gave us, which may be a plain function or a coroutine function."""
    if callback is not None:
        outcome = callback(*args)
        if inspect.isawaitable(outcome):
            await outcome


def call(callback: Callable[..., Any] | None, *args: Any) -> None:
    if callback is not None:
        callback(*args)


def _whole(content: object) -> bytes | None:
    if isinstance(content, str):
        return content.encode()
    if isinstance(content, bytes):
        return content
    if isinstance(content, bytearray | memoryview):
        return bytes(content)
    return None


def body(content: Content) -> bytes | Iterator[bytes]:
    """What httpx sends: bytes as they are, files and iterables piece by piece."""
    whole = _whole(content)
    if whole is not None:
        return whole
    if hasattr(content, "read"):
        file = cast(BinaryIO, content)
        return iter(lambda: _binary(file.read(CHUNK)), b"")
    return iter(cast(Iterable[bytes], content))


def body_async(content: AsyncContent) -> bytes | AsyncIterator[bytes]:
    whole = _whole(content)
    if whole is not None:
        return whole
    if isinstance(content, AsyncIterable):
        return aiter(content)
    return _drain(body(content))


def _binary(piece: object) -> bytes:
    if not isinstance(piece, bytes):
        raise TypeError("The file must be opened in binary mode, for example open(path, 'rb').")
    return piece


async def _drain(pieces: bytes | Iterator[bytes]) -> AsyncIterator[bytes]:
    assert not isinstance(pieces, bytes)
    while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
        yield piece


class AsyncBackground:
    """Something that runs beside the caller until it ends or is cancelled."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._task = asyncio.create_task(work())

    async def join(self) -> None:
        await asyncio.wait([self._task])

    def cancel(self) -> None:
        self._task.cancel()


class Background:
    """Something that runs beside the caller; a thread cannot be cancelled, but does not keep Python alive."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=work, name="skerry-background", daemon=True)
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def cancel(self) -> None:
        return
