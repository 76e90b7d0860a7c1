"""Whole directories at once, as tar archives that stream through a pipe from or to the tool inside."""

from __future__ import annotations

from collections.abc import AsyncIterator

from skerry.errors import FilesystemError
from skerry.models import ExtractResult
from skerry.portal.contract import Portal
from skerry.runtime.tool import Tool


async def archive(portal: Portal, path: str) -> AsyncIterator[bytes]:
    async with Tool(portal, "tar-create", {"path": path}) as run:
        while data := await run.read():
            yield data
        await run.finish()


async def extract(portal: Portal, path: str, content: AsyncIterator[bytes]) -> ExtractResult:
    async with Tool(portal, "tar-extract", {"path": path}, stdin=True) as run:
        try:
            async for chunk in content:
                await run.write(chunk)
        except BrokenPipeError:
            # It refused the archive, or had enough of it: what it says next tells which.
            pass
        run.end_input()
        answers = [answer async for answer in run.lines()]
        await run.finish()
    match answers:
        case [{"files": int(files), "bytes": int(size)}]:
            return ExtractResult(path=path, files=files, bytes=size)
    raise FilesystemError("Skerry's tool inside the sandbox did not say what it unpacked.")
