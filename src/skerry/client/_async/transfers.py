"""Files and whole directories between this machine and the sandbox."""

from __future__ import annotations

import os
import posixpath
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from skerry.client._async.connection import AsyncLink
from skerry.client._async.files import AsyncFiles
from skerry.client.archive import pack, unpack
from skerry.client.concurrency import body_async, run_blocking_async
from skerry.client.values import Transfer
from skerry.errors import FileNotFoundInSandboxError, IsDirectoryError
from skerry.models import ExtractResult

Progress = Callable[[int], None]

_IN_MEMORY = 16 * 2**20


class AsyncTransfers(AsyncFiles):
    _link: AsyncLink

    async def upload(
        self, local: str | Path, remote: str, *, force: bool = False, progress: Progress | None = None
    ) -> Transfer:
        """Copy a local file, or the content of a local directory, to ``remote``.

        A file goes *into* ``remote`` if that ends in a slash or is a directory. ``progress`` is called with the size of
        every piece that was sent.
        """
        source = Path(local)
        if await run_blocking_async(os.path.isdir, source):
            params = {"path": remote} | ({"force": "true"} if force else {})
            content = body_async(pack(source, progress))
            response = await self._link.request("PUT", "/archive", content=content, params=params)
            result = ExtractResult.model_validate_json(response.content)
            return Transfer(result.files, result.bytes)
        with source.open("rb") as file:
            if remote.endswith("/") or await self._is_directory(remote):
                remote = posixpath.join(remote, source.name)
            mode = os.fstat(file.fileno()).st_mode & 0o777
            written = await self.write_file(remote, counted(body_async(file), progress), mode=mode, force=force)
        return Transfer(1, written.bytes)

    async def download(self, remote: str, local: str | Path, *, progress: Progress | None = None) -> Transfer:
        """Copy a file, or the content of a directory, from the sandbox to ``local``.

        Nothing is ever written outside ``local``: links that lead out of it are left out and named in ``skipped``.
        """
        if (await self.stat(remote)).type != "directory":
            try:
                return await self._download_file(remote, Path(local), progress)
            except IsDirectoryError:
                pass  # a link to a directory
        with tempfile.SpooledTemporaryFile(_IN_MEMORY) as spool:
            async with self._link.stream("GET", "/archive", params={"path": remote}) as response:
                async for piece in response.aiter_bytes():
                    spool.write(piece)
                    if progress is not None:
                        progress(len(piece))
            spool.seek(0)
            return await run_blocking_async(unpack, spool, Path(local))

    async def _download_file(self, remote: str, local: Path, progress: Progress | None) -> Transfer:
        inside = await run_blocking_async(os.path.isdir, local)
        target = local / posixpath.basename(remote.rstrip("/")) if inside else local
        size = 0
        async with self._link.stream("GET", "/files/content", params={"path": remote}) as response:
            target.parent.mkdir(parents=True, exist_ok=True)
            # Written beside it and renamed, so that a broken transfer leaves no half of a file.
            descriptor, part = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    async for piece in response.aiter_bytes():
                        size += file.write(piece)
                        if progress is not None:
                            progress(len(piece))
                os.chmod(part, 0o644)
                os.replace(part, target)
            except BaseException:
                os.unlink(part)
                raise
        return Transfer(1, size)

    async def _is_directory(self, path: str) -> bool:
        try:
            return (await self.stat(path)).type == "directory"
        except FileNotFoundInSandboxError:
            return False


async def counted(content: bytes | AsyncIterator[bytes], progress: Progress | None) -> AsyncIterator[bytes]:
    if isinstance(content, bytes):
        yield content
        return
    async for piece in content:
        yield piece
        if progress is not None:
            progress(len(piece))
