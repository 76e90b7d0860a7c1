"""The runtime of a bridge's sandbox: the same as everywhere, but for what needs descriptors that cross the wall."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import tempfile
from collections.abc import AsyncIterator
from typing import IO

from skerry.errors import SkerryError, error_from_errno
from skerry.providers.cloudflare import inside
from skerry.providers.cloudflare.portal import BridgePortal
from skerry.providers.cloudflare.shell import BridgeShell
from skerry.runtime.content import OpenFile, check_regular
from skerry.runtime.files import Files
from skerry.runtime.paths import errors_about, resolve
from skerry.runtime.runtime import Runtime
from skerry.runtime.sessions import Sessions

PART = 16 << 20
"""Bytes of a file that are uploaded at once; a bridge takes twice as many."""


class BridgeSessions(Sessions):
    shell = BridgeShell


class BridgeFiles(Files):
    """Files are read as copies, and written as parts that take their place when all of them are there."""

    _portal: BridgePortal

    async def open(self, path: str) -> OpenFile:
        path = resolve(path, self._base)
        with errors_about(path):
            entry = await self._portal.stat(path)
            check_regular(entry.mode, path)
            fd = await self._portal.open(path, os.O_RDONLY)
        try:
            return OpenFile(path, fd, os.fstat(fd))
        except BaseException:
            os.close(fd)
            raise

    async def _existing(self, path: str) -> os.stat_result | None:
        try:
            entry, links = await self._portal.entry(path, follow=False)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise error_from_errno(error.errno or 0, path) from error
        whole = entry.mtime_ns // 10**9
        return os.stat_result(
            (entry.mode, entry.inode, 0, links, entry.uid, entry.gid, entry.size, whole, whole, whole)
        )

    async def _store(
        self, path: str, content: bytes | AsyncIterator[bytes], length: int | None, mode: int | None
    ) -> int:
        old = await self._existing(path)
        if old is not None and not stat.S_ISLNK(old.st_mode):
            check_regular(old.st_mode, path)
        over = old is not None and (stat.S_ISLNK(old.st_mode) or old.st_nlink > 1)
        if mode is None and old is not None and not over:
            mode = stat.S_IMODE(old.st_mode)
        how = "over" if over else "n" if old is None else "r"
        with tempfile.TemporaryFile() as spool:
            fill = content if isinstance(content, bytes) else self._measured(content, length)
            count = await _fill(spool, fill)
            await self._place(spool, how, path, mode)
        return count

    async def _place(self, spool: IO[bytes], how: str, path: str, mode: int | None) -> None:
        parts: list[str] = []
        spool.seek(0)
        try:
            while (data := await asyncio.to_thread(spool.read, PART)) or not parts:
                parts.append(await self._portal.upload(data))
            words = (how, "-" if mode is None else f"{mode:o}", path, *parts)
            with errors_about(path):
                await self._portal.call("sh", "-c", inside.PLACE, "sh", *words)
        finally:
            if parts:
                with contextlib.suppress(SkerryError):
                    await asyncio.shield(self._portal.run("rm", "-f", "--", *parts))


async def _fill(spool: IO[bytes], content: bytes | AsyncIterator[bytes]) -> int:
    if isinstance(content, bytes):
        return spool.write(content)
    async for chunk in content:
        await asyncio.to_thread(spool.write, chunk)
    return spool.tell()


class BridgeRuntime(Runtime):
    sessions_kind = BridgeSessions
    files_kind = BridgeFiles
