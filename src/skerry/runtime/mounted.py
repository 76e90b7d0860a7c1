"""Files on a mounted bucket. The kernel lets only processes inside use them, so a tool inside reads and writes them.

It also waits for the bucket, which the server must not do: what arrives here has come through a pipe.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import AsyncIterator

from skerry.errors import TooLargeError
from skerry.portal.contract import Portal
from skerry.runtime.paths import errors_about
from skerry.runtime.tool import Tool

LARGEST = 4 << 30
CHUNK = 1 << 20
_PLACE = "/var/tmp" if os.access("/var/tmp", os.W_OK) else None


class OnBucketError(Exception):
    """A descriptor leads to a mounted bucket."""


def fstat(fd: int) -> os.stat_result:
    try:
        return os.fstat(fd)
    except PermissionError:
        raise OnBucketError from None


async def fetch(portal: Portal, path: str) -> tuple[int, os.stat_result]:
    """A copy of the file without a name, for the caller to close, and what is known of it."""
    with errors_about(path):
        entry = await portal.stat(path)
    if not stat.S_ISREG(entry.mode):
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), os.stat_result((entry.mode, *[0] * 9))
    with tempfile.TemporaryFile(dir=_PLACE) as copy:
        async with Tool(portal, "read", {"path": path}) as run:
            while data := await run.read(CHUNK):
                copy.write(data)
                if copy.tell() > LARGEST:
                    raise TooLargeError(
                        f"{path!r} is on a mounted bucket and larger than {LARGEST} bytes.",
                        hint="Take it from the bucket itself, or copy it in parts.",
                    )
            await run.finish()
        copy.flush()
        size = copy.tell()
        status = os.stat_result((entry.mode, entry.inode, 0, 1, 0, 0, size, 0, entry.mtime_ns // 10**9, 0))
        return os.dup(copy.fileno()), status


async def store(portal: Portal, path: str, content: AsyncIterator[bytes]) -> int:
    """Write a whole file; if ``content`` raises, nothing has changed. How many bytes it has."""
    count = 0
    async with Tool(portal, "write", {"path": path}, stdin=True) as run:
        try:
            async for chunk in content:
                count += len(chunk)
                for start in range(0, len(chunk), CHUNK):
                    await _send(run, chunk[start : start + CHUNK])
            await _send(run, b"")
        except BrokenPipeError:
            pass  # what it says next tells why
        except BaseException:
            run.end_input()  # without the last, empty part the file is not kept
            await run.finish()
            raise
        run.end_input()
        await run.finish()
    return count


async def _send(run: Tool, part: bytes) -> None:
    await run.write(len(part).to_bytes(4, "big") + part)
