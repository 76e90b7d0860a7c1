# Generated from src/skerry/client/_async/transfers.py by scripts/generate_sync.py; change that file and run it again.
"""Files and whole directories between this machine and the sandbox."""

from __future__ import annotations

import os
import posixpath
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from skerry.client._sync.connection import Link
from skerry.client._sync.files import Files
from skerry.client.archive import pack, unpack
from skerry.client.concurrency import body, run_blocking
from skerry.client.values import Transfer
from skerry.errors import FileNotFoundInSandboxError, IsDirectoryError
from skerry.models import ExtractResult

Progress = Callable[[int], None]

_IN_MEMORY = 16 * 2**20


class Transfers(Files):
    _link: Link

    def upload(
        self, local: str | Path, remote: str, *, force: bool = False, progress: Progress | None = None
    ) -> Transfer:
        """Copy a local file, or the content of a local directory, to ``remote``.

        A file goes *into* ``remote`` if that ends in a slash or is a directory. ``progress`` is called with the size of
        every piece that was sent.
        """
        source = Path(local)
        if run_blocking(os.path.isdir, source):
            params = {"path": remote} | ({"force": "true"} if force else {})
            content = body(pack(source, progress))
            response = self._link.request("PUT", "/archive", content=content, params=params)
            result = ExtractResult.model_validate_json(response.content)
            return Transfer(result.files, result.bytes)
        with source.open("rb") as file:
            if remote.endswith("/") or self._is_directory(remote):
                remote = posixpath.join(remote, source.name)
            mode = os.fstat(file.fileno()).st_mode & 0o777
            written = self.write_file(remote, counted(body(file), progress), mode=mode, force=force)
        return Transfer(1, written.bytes)

    def download(self, remote: str, local: str | Path, *, progress: Progress | None = None) -> Transfer:
        """Copy a file, or the content of a directory, from the sandbox to ``local``.

        Nothing is ever written outside ``local``: links that lead out of it are left out and named in ``skipped``.
        """
        if (self.stat(remote)).type != "directory":
            try:
                return self._download_file(remote, Path(local), progress)
            except IsDirectoryError:
                pass  # a link to a directory
        with tempfile.SpooledTemporaryFile(_IN_MEMORY) as spool:
            with self._link.stream("GET", "/archive", params={"path": remote}) as response:
                for piece in response.iter_bytes():
                    spool.write(piece)
                    if progress is not None:
                        progress(len(piece))
            spool.seek(0)
            return run_blocking(unpack, spool, Path(local))

    def _download_file(self, remote: str, local: Path, progress: Progress | None) -> Transfer:
        inside = run_blocking(os.path.isdir, local)
        target = local / posixpath.basename(remote.rstrip("/")) if inside else local
        size = 0
        with self._link.stream("GET", "/files/content", params={"path": remote}) as response:
            target.parent.mkdir(parents=True, exist_ok=True)
            # Written beside it and renamed, so that a broken transfer leaves no half of a file.
            descriptor, part = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    for piece in response.iter_bytes():
                        size += file.write(piece)
                        if progress is not None:
                            progress(len(piece))
                os.chmod(part, 0o644)
                os.replace(part, target)
            except BaseException:
                os.unlink(part)
                raise
        return Transfer(1, size)

    def _is_directory(self, path: str) -> bool:
        try:
            return (self.stat(path)).type == "directory"
        except FileNotFoundInSandboxError:
            return False


def counted(content: bytes | Iterator[bytes], progress: Progress | None) -> Iterator[bytes]:
    if isinstance(content, bytes):
        yield content
        return
    for piece in content:
        yield piece
        if progress is not None:
            progress(len(piece))
