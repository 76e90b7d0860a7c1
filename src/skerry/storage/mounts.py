"""A bucket, mounted in a running sandbox: the machine's end of it, and the file system behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from skerry.storage.buckets import Bucket
from skerry.storage.fuse.filesystem import FileSystem
from skerry.storage.fuse.remote import PATIENCE, Moved, Remote
from skerry.storage.fuse.session import Session
from skerry.storage.fuse.spool import Spool

Lost = Callable[[str, str], None]


class BucketMount:
    """Serves the kernel through ``fd``, which it owns, from a thread of its own.

    ``lost(key, reason)`` is called on the event loop of whoever made this when a file could not be saved after its
    program had closed it, ``moved(way, size)`` on the mount's thread when bytes went ``up`` or ``down``.
    """

    def __init__(
        self,
        fd: int,
        bucket: Bucket | None,
        *,
        read_only: bool,
        spool: Path,
        spool_limit: int,
        lost: Lost,
        moved: Moved,
        patience: float = PATIENCE,
    ) -> None:
        loop = asyncio.get_running_loop()
        self._remote = Remote(bucket, patience, moved)
        self._session = Session(
            fd,
            lambda: FileSystem(
                self._remote,
                Spool(spool, spool_limit),
                read_only=read_only,
                lost=lambda key, reason: _hand_over(loop, lost, key, reason),
            ),
        )
        self._session.start()

    @property
    def alive(self) -> bool:
        return self._session.alive

    @property
    def last_error(self) -> str | None:
        return self._remote.last_error

    async def settle(self) -> None:
        """Wait until what was closed is in the bucket."""
        if self._session.alive:
            await self._session.call(lambda files: files.settle())

    def abort(self) -> None:
        """Whoever waits for the bucket inside gets an error at once."""
        self._session.abort()

    async def close(self) -> None:
        """Let go of the kernel, save what is not saved yet, and end the thread."""
        self._session.abort()
        await self._session.join()


def _hand_over(loop: asyncio.AbstractEventLoop, lost: Lost, key: str, reason: str) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(lost, key, reason)
