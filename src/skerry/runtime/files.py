"""The files of a sandbox. Paths are resolved by the kernel inside; only descriptors come out."""

from __future__ import annotations

import asyncio
import base64
import builtins
import codecs
import errno
import os
import posixpath
import stat
from collections.abc import AsyncIterator
from typing import Any, Literal

from skerry.errors import (
    FileExistsInSandboxError,
    FileTooLargeError,
    InvalidPathError,
    InvalidRequestError,
    IsDirectoryError,
    SandboxLostError,
    SkerryError,
    TooLargeError,
    error_from_errno,
)
from skerry.models import ExtractResult, FileContent, FileEvent, FileInfo
from skerry.portal.contract import Portal, Stat
from skerry.runtime.archive import archive, extract
from skerry.runtime.content import CHUNK, OpenFile, check_regular, is_binary, mime_type, open_regular, write_whole
from skerry.runtime.mounted import OnBucketError, fstat, store
from skerry.runtime.paths import check_changeable, describe, errors_about, facts, resolve
from skerry.runtime.tool import Tool, run_tool

READ_LIMIT = 32 << 20
EVENT_CHUNK = 65535
"""Source bytes in one event: divisible by three, so that the base64 of the chunks joins to that of the file."""
LIST_LIMIT = 250_000


class Files:
    def __init__(self, portal: Portal, base: str = "/workspace") -> None:
        self._portal = portal
        self._base = base

    # -- reading -------------------------------------------------------------------------------------------------------

    async def open(self, path: str) -> OpenFile:
        path = resolve(path, self._base)
        fd, status = await open_regular(self._portal, path, os.O_RDONLY)
        try:
            return OpenFile(path, fd, status)
        except BaseException:
            os.close(fd)
            raise

    async def read(
        self,
        path: str,
        *,
        encoding: Literal["utf-8", "base64"] | None = None,
        offset: int = 0,
        length: int | None = None,
    ) -> FileContent:
        """Text as it is, anything else as base64; a part that cuts a character in two is base64 as well."""
        if offset < 0 or (length is not None and length < 0):
            raise InvalidRequestError("offset and length cannot be negative.")
        async with await self.open(path) as file:
            # Files of /proc say they are empty and are not, so that only reading tells.
            want = READ_LIMIT + 1 if length is None else length
            if file.size:
                want = min(want, max(file.size - offset, 0))
            data = await file.read(min(want, READ_LIMIT + 1), offset)
            if len(data) > READ_LIMIT:
                raise self._too_large(file.path)
            size = file.size or offset + len(data)
            whole = len(data) >= size
            binary = is_binary(data, cut_before=offset > 0, cut_after=offset + len(data) < size)
            kind = mime_type(file.path, data, binary) if whole else file.mime_type
        text: str | None = None
        if encoding == "utf-8":
            text = data.decode(errors="replace")
        elif encoding is None and not binary:
            try:
                text = data.decode()
            except UnicodeDecodeError:
                text = None
        return FileContent(
            path=file.path,
            content=base64.b64encode(data).decode() if text is None else text,
            encoding="base64" if text is None else "utf-8",
            is_binary=binary if whole else binary or file.is_binary,
            mime_type=kind,
            size=size,
            offset=offset,
        )

    def _too_large(self, path: str) -> SkerryError:
        return FileTooLargeError(
            f"{path!r} is larger than the {READ_LIMIT >> 20} MiB that are read at once.",
            hint="Stream it, or read it in parts with offset and length.",
            details={"path": path, "limit": READ_LIMIT},
        )

    async def events(self, path: str) -> AsyncIterator[FileEvent]:
        """The file as events. A file that cannot be opened raises before the first; later failures are an event."""
        async with await self.open(path) as file:
            await file.look_through()
            encoding: Literal["utf-8", "base64"] = "base64" if file.is_binary else "utf-8"
            yield FileEvent(
                type="metadata",
                mime_type=file.mime_type,
                size=file.size,
                is_binary=file.is_binary,
                encoding=encoding,
            )
            decoder = codecs.getincrementaldecoder("utf-8")()
            count = 0
            try:
                async for chunk in file.chunks(size=EVENT_CHUNK):
                    count += len(chunk)
                    text = base64.b64encode(chunk).decode() if file.is_binary else decoder.decode(chunk)
                    yield FileEvent(type="chunk", data=text, encoding=encoding)
                decoder.decode(b"", final=True)
            except UnicodeDecodeError:
                yield FileEvent(type="error", error=f"{file.path!r} changed while it was read.")
            except SkerryError as error:
                yield FileEvent(type="error", error=error.message)
            else:
                yield FileEvent(type="complete", bytes_read=count)

    # -- writing -------------------------------------------------------------------------------------------------------

    async def write(
        self,
        path: str,
        content: bytes | AsyncIterator[bytes],
        *,
        length: int | None = None,
        mode: int | None = None,
        force: bool = False,
    ) -> int:
        """Write a whole file, making the directories above it; how many bytes it has.

        Readers see the old content or the new, never a part, except where the name is a link: then the file it leads to
        is written in place. Content that is not ``length`` bytes long changes nothing.
        """
        path = check_changeable(resolve(path, self._base), force)
        if isinstance(content, bytes) and length not in (None, len(content)):
            raise self._wrong_length(len(content), length)
        try:
            return await self._store(path, content, length, mode)
        except OnBucketError:
            whole = _once(content) if isinstance(content, bytes) else self._measured(content, length)
            return await store(self._portal, path, whole)

    async def _measured(self, content: AsyncIterator[bytes], length: int | None) -> AsyncIterator[bytes]:
        count = 0
        async for chunk in content:
            count += len(chunk)
            if length is not None and count > length:
                raise self._wrong_length(count, length)
            yield chunk
        if length is not None and count != length:
            raise self._wrong_length(count, length)

    async def _store(
        self, path: str, content: bytes | AsyncIterator[bytes], length: int | None, mode: int | None
    ) -> int:
        old = await self._existing(path)
        if old is not None and not stat.S_ISLNK(old.st_mode):
            check_regular(old.st_mode, path)
        in_place = old is not None and (stat.S_ISLNK(old.st_mode) or old.st_nlink > 1)
        if in_place and isinstance(content, bytes):
            return await self._overwrite(path, _once(content), mode)
        # The watcher inside reads from the name what will have happened: a new file, or one replaced.
        temporary = f"{posixpath.dirname(path).rstrip('/')}/.skerry-{'r' if old else 'n'}-{os.urandom(8).hex()}"
        fd = await self._create(temporary, path)
        placed = False
        try:
            count = await self._fill(fd, path, content, length)
            status = os.fstat(fd)
            if old is not None and (in_place or (status.st_uid, status.st_gid) != (old.st_uid, old.st_gid)):
                # A new file could not keep the name's links or owner.
                async with OpenFile(temporary, os.dup(fd), status) as written:
                    return await self._overwrite(path, written.chunks(size=CHUNK), mode)
            wanted = mode if mode is not None or old is None else stat.S_IMODE(old.st_mode)
            with errors_about(path):
                if wanted is not None and wanted != stat.S_IMODE(status.st_mode):
                    await self._portal.chmod(temporary, wanted)
                await self._portal.rename(temporary, path)
            placed = True
            return count
        finally:
            os.close(fd)
            if not placed:
                await self._discard(temporary)

    async def _existing(self, path: str) -> os.stat_result | None:
        """What has this name now, links not followed: seen through a descriptor, so that owners compare as the host
        sees them."""
        try:
            fd = await self._portal.open(path, os.O_PATH | os.O_NOFOLLOW)
        except OSError as error:
            if error.errno == errno.ENOENT:
                return None
            raise error_from_errno(error.errno or errno.EIO, path) from error
        try:
            return fstat(fd)
        finally:
            os.close(fd)

    async def _create(self, temporary: str, path: str) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        for attempt in (1, 2):
            try:
                with errors_about(posixpath.dirname(path)):
                    fd = await self._portal.open(temporary, flags, 0o666)
                break
            except SkerryError as error:
                if attempt == 2 or error.details.get("errno") != "ENOENT":
                    raise
                with errors_about(posixpath.dirname(path)):
                    await self._portal.mkdir(posixpath.dirname(path), parents=True)
        try:
            check_regular(fstat(fd).st_mode, path)
        except OnBucketError:
            await self._discard(temporary)
            os.close(fd)
            raise
        except BaseException:
            os.close(fd)
            raise
        return fd

    async def _fill(self, fd: int, path: str, content: bytes | AsyncIterator[bytes], length: int | None) -> int:
        if isinstance(content, bytes):
            await write_whole(fd, path, content)
            return len(content)
        count, pending = 0, bytearray()
        async for chunk in content:
            count += len(chunk)
            if length is not None and count > length:
                raise self._wrong_length(count, length)
            pending += chunk
            if len(pending) >= CHUNK:
                await write_whole(fd, path, pending)
                pending = bytearray()
        if length is not None and count != length:
            raise self._wrong_length(count, length)
        await write_whole(fd, path, pending)
        return count

    async def _overwrite(self, path: str, content: AsyncIterator[bytes], mode: int | None) -> int:
        try:
            fd, status = await open_regular(self._portal, path, os.O_WRONLY | os.O_CREAT)
        except OnBucketError:
            return await store(self._portal, path, content)
        try:
            with errors_about(path):
                os.ftruncate(fd, 0)
                if mode is not None and mode != stat.S_IMODE(status.st_mode):
                    await self._portal.chmod(path, mode)
            return await self._fill(fd, path, content, None)
        finally:
            os.close(fd)

    async def _discard(self, temporary: str) -> None:
        async def unlink() -> None:
            try:
                await self._portal.unlink(temporary)
            except (OSError, SandboxLostError):
                # Gone already, or with the sandbox.
                return

        await asyncio.shield(asyncio.create_task(unlink()))

    def _wrong_length(self, count: int, length: int | None) -> SkerryError:
        return InvalidRequestError(
            f"The content has {count} bytes where {length} were announced; nothing was changed.",
            details={"received": count, "expected": length},
        )

    # -- directories ---------------------------------------------------------------------------------------------------

    async def list(self, path: str | None = None, *, recursive: bool = False, hidden: bool = False) -> list[FileInfo]:
        """The entries of a directory ordered by path; without ``hidden``, none that begin with a dot."""
        return describe(await self.rows(path, recursive=recursive, hidden=hidden))

    async def rows(
        self, path: str | None = None, *, recursive: bool = False, hidden: bool = False
    ) -> builtins.list[dict[str, Any]]:
        """The same as they are written in JSON."""
        path = self._base if path is None else resolve(path, self._base)
        if recursive:
            entries = await _list_tree(self._portal, path, hidden)
        else:
            with errors_about(path):
                entries = [(entry.name, entry) for entry in await self._portal.list(path)]
        prefix = path.rstrip("/") + "/"
        return [
            facts(entry, prefix + relative, relative)
            for relative, entry in sorted(entries, key=lambda pair: pair[0])
            if hidden or not entry.name.startswith(".")
        ]

    async def stat(self, path: str) -> FileInfo:
        path = resolve(path, self._base)
        with errors_about(path):
            entry = await self._portal.stat(path, follow=False)
        return describe([facts(entry, path, posixpath.basename(path) or "/")])[0]

    async def exists(self, path: str) -> bool:
        path = resolve(path, self._base)
        try:
            await self._portal.stat(path)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                return False
            raise error_from_errno(error.errno or errno.EIO, path) from error
        return True

    async def mkdir(self, path: str, *, recursive: bool = False, mode: int | None = None, force: bool = False) -> None:
        path = check_changeable(resolve(path, self._base), force)
        with errors_about(path):
            await self._portal.mkdir(path, 0o777 if mode is None else mode, parents=recursive)
            if mode is not None:
                await self._portal.chmod(path, mode)

    async def delete(self, path: str, *, recursive: bool = False, force: bool = False) -> None:
        path = check_changeable(resolve(path, self._base), force)
        with errors_about(path):
            try:
                return await self._portal.unlink(path)
            except OSError as error:
                if error.errno not in (errno.EISDIR, errno.EPERM) or not await self._is_directory(path, follow=False):
                    raise
            if not recursive:
                raise IsDirectoryError(f"{path!r} is a directory.", hint="Pass recursive=true to delete it.")
            try:
                return await self._portal.rmdir(path)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
        await run_tool(self._portal, "remove", {"path": path})

    # -- moving and copying --------------------------------------------------------------------------------------------

    async def rename(self, old: str, new: str, *, force: bool = False) -> None:
        """Give it another name, which nothing else may have."""
        old = check_changeable(resolve(old, self._base), force)
        new = check_changeable(resolve(new, self._base), force)
        if await self._existing(new) is not None:
            raise FileExistsInSandboxError(
                f"{new!r} already exists.", hint="Move it instead to replace it.", details={"path": new}
            )
        await self._rename(old, new)

    async def move(self, src: str, dst: str, *, force: bool = False) -> None:
        """As mv: into a directory, over a file, to another file system."""
        src = check_changeable(resolve(src, self._base), force)
        dst = check_changeable(await self._landing(src, resolve(dst, self._base)), force)
        await self._rename(src, dst)

    async def _rename(self, old: str, new: str) -> None:
        try:
            await self._portal.rename(old, new)
        except OSError as error:
            if error.errno == errno.EXDEV:
                await run_tool(self._portal, "move", {"source": old, "target": new})
            elif error.errno == errno.EINVAL:
                raise InvalidPathError(f"{old!r} cannot be moved into itself, to {new!r}.") from error
            else:
                about = old if error.errno == errno.ENOENT and await self._existing(old) is None else new
                raise error_from_errno(error.errno or errno.EIO, about) from error

    async def copy(self, src: str, dst: str, *, recursive: bool = False, force: bool = False) -> None:
        """As cp: into a directory, over a file; directories only with ``recursive``, and then links stay links."""
        src = resolve(src, self._base)
        dst = check_changeable(await self._landing(src, resolve(dst, self._base)), force)
        if src == dst:
            raise FileExistsInSandboxError(f"{src!r} cannot be copied onto itself.")
        if recursive:
            old = await self._existing(src)
            if old is None:
                raise error_from_errno(errno.ENOENT, src)
            if not stat.S_ISREG(old.st_mode):
                return await run_tool(self._portal, "copy", {"source": src, "target": dst})
        try:
            file = await self.open(src)
        except IsDirectoryError as error:
            raise IsDirectoryError(f"{src!r} is a directory.", hint="Pass recursive=true to copy it.") from error
        async with file:
            mode = None if await self._existing(dst) else file.mode
            await self._store(dst, file.chunks(size=CHUNK), None, mode)

    async def _landing(self, src: str, dst: str) -> str:
        return f"{dst.rstrip('/')}/{posixpath.basename(src)}" if await self._is_directory(dst, follow=True) else dst

    async def _is_directory(self, path: str, *, follow: bool) -> bool:
        try:
            return stat.S_ISDIR((await self._portal.stat(path, follow=follow)).mode)
        except OSError:
            return False

    async def chmod(self, path: str, mode: int, *, recursive: bool = False, force: bool = False) -> None:
        path = check_changeable(resolve(path, self._base), force)
        if recursive and await self._is_directory(path, follow=False):
            return await run_tool(self._portal, "chmod", {"path": path, "mode": mode})
        with errors_about(path):
            await self._portal.chmod(path, mode)

    # -- archives ------------------------------------------------------------------------------------------------------

    def archive(self, path: str) -> AsyncIterator[bytes]:
        """A tar of what is in the directory. An error is raised before the first chunk, or breaks the stream off."""
        return archive(self._portal, resolve(path, self._base))

    async def extract(self, path: str, content: AsyncIterator[bytes], *, force: bool = False) -> ExtractResult:
        """Unpack a tar, plain or compressed, into a directory, which is made if needed."""
        path = check_changeable(resolve(path, self._base), force)
        return await extract(self._portal, path, content)


async def _once(content: bytes) -> AsyncIterator[bytes]:
    yield content


async def _list_tree(portal: Portal, path: str, hidden: bool) -> list[tuple[str, Stat]]:
    found: list[tuple[str, Stat]] = []
    async with Tool(portal, "list", {"path": path, "hidden": hidden}) as run:
        async for line in run.lines():
            match line:
                case [str(name), int(mode), int(size), int(mtime), int(inode), int(uid), int(gid), target]:
                    text = target if isinstance(target, str) else None
                    found.append((name, Stat(posixpath.basename(name), mode, size, mtime, inode, uid, gid, text)))
            if len(found) > LIST_LIMIT:
                raise TooLargeError(
                    f"There are more than {LIST_LIMIT} entries below {path!r}.", hint="List a part of the tree."
                )
        await run.finish()
    return found
