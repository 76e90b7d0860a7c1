"""Files, and watching them."""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from skerry.client._async.connection import AsyncLink, AsyncStream
from skerry.client.concurrency import AsyncContent, body_async
from skerry.client.values import FileText, given
from skerry.client.wire import flag, octal
from skerry.errors import FileNotFoundInSandboxError
from skerry.models import (
    ChangesResult,
    Encoding,
    ExistsResult,
    FileInfo,
    FileList,
    ReadFileResult,
    StatResult,
    WatchEvent,
    WriteFileResult,
)


class AsyncFiles:
    _link: AsyncLink

    async def write_file(
        self,
        path: str,
        content: AsyncContent,
        *,
        encoding: Encoding = "utf-8",
        mode: int | None = None,
        force: bool = False,
    ) -> WriteFileResult:
        """Write a file, making its directories: text, bytes, a file opened in binary mode or an iterator of bytes.

        With ``encoding="base64"`` a text is decoded first.
        """
        if encoding == "base64" and isinstance(content, str):
            content = base64.b64decode(content)
        params = {"path": path, **given(mode=octal(mode)), **({"force": "true"} if force else {})}
        response = await self._link.request("PUT", "/files", content=body_async(content), params=params)
        return WriteFileResult.model_validate_json(response.content)

    async def read_file(
        self, path: str, encoding: Encoding | None = None, *, offset: int = 0, length: int | None = None
    ) -> FileText:
        """The content of a file as a ``str`` that also has ``content``, ``encoding``, ``size`` and ``mime_type``.

        Binary files come in base64; ``data`` gives the bytes. For files beyond 32 MiB use ``read_bytes`` or
        ``read_file_stream``.
        """
        params = {"path": path} | given(encoding=encoding, offset=offset or None, length=length)
        return FileText.from_wire((await self._link.get(ReadFileResult, "/files", params)).file)

    async def read_bytes(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """The bytes of a file, or of a part of it."""
        if length == 0:
            await self.stat(path)
            return b""
        async with self._link.stream(
            "GET", "/files/content", params={"path": path}, headers=span(offset, length)
        ) as part:
            return b"" if part.status_code == 416 else await part.aread()

    def read_file_stream(self, path: str, offset: int = 0, length: int | None = None) -> AsyncStream[bytes]:
        """Iterate over the bytes of a file of any size."""
        return AsyncStream(self._pieces(path, offset, length))

    async def _pieces(self, path: str, offset: int, length: int | None) -> AsyncGenerator[bytes, None]:
        async with self._link.stream(
            "GET", "/files/content", params={"path": path}, headers=span(offset, length)
        ) as part:
            if part.status_code != 416:
                async for piece in part.aiter_bytes():
                    yield piece

    async def list_files(
        self, path: str = "/workspace", *, recursive: bool = False, include_hidden: bool = False
    ) -> list[FileInfo]:
        """What is in a directory."""
        params: dict[str, Any] = {"path": path}
        params |= {"recursive": "true"} if recursive else {}
        params |= {"hidden": "true"} if include_hidden else {}
        return (await self._link.get(FileList, "/ls", params)).files

    async def readdir(self, path: str = "/workspace") -> list[FileInfo]:
        """What is in a directory; ``list_files`` under its other name."""
        return await self.list_files(path)

    async def stat(self, path: str) -> FileInfo:
        """What is known about a file without reading it."""
        return (await self._link.get(StatResult, "/files/stat", {"path": path})).file

    async def exists(self, path: str) -> bool:
        """Whether there is something at ``path``."""
        try:
            return (await self._link.get(ExistsResult, "/files/exists", {"path": path})).exists
        except FileNotFoundInSandboxError:
            return False

    async def mkdir(self, path: str, *, recursive: bool = False, mode: int | None = None, force: bool = False) -> None:
        """Make a directory; with ``recursive`` its parents too, and one that exists is fine."""
        body = {"path": path, "recursive": recursive, "force": force, **given(mode=mode)}
        await self._link.request("POST", "/files/mkdir", json=body)

    async def delete_file(self, path: str, *, recursive: bool = False, force: bool = False) -> None:
        """Delete a file, or with ``recursive`` a directory and all in it. ``force`` allows system directories."""
        params = {"path": path, "recursive": flag(recursive), "force": flag(force)}
        await self._link.request("DELETE", "/files", params=params)

    async def rename_file(self, old_path: str, new_path: str, *, force: bool = False) -> None:
        """Give a file another name."""
        body = {"oldPath": old_path, "newPath": new_path, "force": force}
        await self._link.request("POST", "/files/rename", json=body)

    async def move_file(self, source: str, destination: str, *, force: bool = False) -> None:
        """Move a file; into ``destination`` if that is a directory."""
        body = {"sourcePath": source, "destinationPath": destination, "force": force}
        await self._link.request("POST", "/files/move", json=body)

    async def copy_file(self, source: str, destination: str, *, recursive: bool = False, force: bool = False) -> None:
        """Copy a file, or with ``recursive`` a directory."""
        body = {"sourcePath": source, "destinationPath": destination, "recursive": recursive, "force": force}
        await self._link.request("POST", "/files/copy", json=body)

    async def chmod(self, path: str, mode: int, *, recursive: bool = False, force: bool = False) -> None:
        """Change the permissions of a file, for example to ``0o755``."""
        body = {"path": path, "mode": mode, "recursive": recursive, "force": force}
        await self._link.request("POST", "/files/chmod", json=body)

    def watch(
        self,
        path: str = "/workspace",
        *,
        recursive: bool = True,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
    ) -> AsyncStream[WatchEvent]:
        """Iterate over changes below ``path``. After the first event, ``watching``, nothing is missed."""
        body = watch_body(path, recursive, include, exclude)
        return AsyncStream(self._link.events(WatchEvent, "POST", "/watch", json=body))

    async def check_changes(
        self,
        path: str = "/workspace",
        *,
        since: str | None = None,
        recursive: bool = True,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
    ) -> ChangesResult:
        """What changed below ``path`` since an earlier answer's ``version``."""
        body = watch_body(path, recursive, include, exclude) | given(since=since)
        return await self._link.post(ChangesResult, "/watch/check", body)


def span(offset: int, length: int | None) -> dict[str, str]:
    if not offset and length is None:
        return {}
    return {"Range": f"bytes={offset}-{'' if length is None else offset + length - 1}"}


def watch_body(
    path: str, recursive: bool, include: Sequence[str] | None, exclude: Sequence[str] | None
) -> dict[str, Any]:
    return {"path": path, "recursive": recursive} | given(
        include=None if include is None else list(include), exclude=None if exclude is None else list(exclude)
    )
