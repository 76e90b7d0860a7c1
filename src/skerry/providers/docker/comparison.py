"""What differs between two states of a container's files, read from the tars that the engine exports of them.

An engine tells no more than that; so both are read as a whole, once for a list, and takes as long as that takes.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import os
import tarfile
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import IO, Literal, TypeVar

from skerry.errors import ProviderError
from skerry.models import ChangeKind, LayerChange
from skerry.providers.docker.engine import Engine
from skerry.runtime.output import pipe, read_some, write_all

T = TypeVar("T")

_BLOCK = 1 << 20
# What engines put into every container, and into no image.
_PUT_THERE = ("dev", "proc", "sys", ".dockerenv", "etc/hostname", "etc/hosts", "etc/resolv.conf", "etc/mtab")

Kind = Literal["file", "directory", "symlink", "other"]


@dataclass(frozen=True, slots=True)
class Entry:
    """A name in one of the states: all that makes it different from another."""

    type: Kind
    size: int
    rest: tuple[object, ...]


class Comparison:
    """From one image to another, or to a container. ``before`` None stands for ``base``, the image both began as."""

    def __init__(
        self,
        engine: Engine,
        scratch: Callable[[str], Awaitable[str]],
        before: str | None,
        after: str | None = None,
        *,
        container: str | None = None,
        base: Callable[[], Awaitable[str]] | None = None,
    ) -> None:
        self._engine = engine
        self._scratch = scratch
        self._before = before
        self._after = after
        self._container = container
        self._base = base

    async def list_(self, limit: int) -> tuple[list[LayerChange], bool]:
        before, after = await asyncio.gather(self._entries(self._before), self._entries(self._after))
        found = sorted(_changes(before, after))
        return [_described(*one) for one in found[:limit]], len(found) > limit

    async def deleted(self) -> list[str]:
        before, after = await self._entries(self._before), await self._entries(None, self._container)
        return sorted(path for path, kind, _ in _changes(before, after) if kind == "deleted")

    async def tar(self) -> AsyncGenerator[bytes, None]:
        before = await self._entries(self._before)
        ours, theirs = pipe("read")
        writing = asyncio.create_task(self._read(self._after, None, lambda file: _write(file, theirs, before)))
        try:
            while chunk := await read_some(ours):
                yield chunk
        finally:
            os.close(ours)
            with contextlib.suppress(BrokenPipeError):  # the reader has left
                await writing

    async def _entries(self, image: str | None, container: str | None = None) -> dict[str, Entry]:
        return await self._read(image, container, _entries)

    async def _read(self, image: str | None, container: str | None, work: Callable[[IO[bytes]], T]) -> T:
        """Have a thread do something with the tar of all files."""
        async with self._shown(image, container) as name, self._engine.export(name) as parts:
            theirs, ours = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(ours, False)
            working = asyncio.create_task(asyncio.to_thread(_with, theirs, work))
            try:
                with contextlib.suppress(BrokenPipeError):  # then the work says why
                    async for part in parts:
                        await write_all(ours, part)
            finally:
                os.close(ours)
                result = await asyncio.shield(working)
            return result

    @asynccontextmanager
    async def _shown(self, image: str | None, container: str | None) -> AsyncIterator[str]:
        if container is not None:
            yield container
            return
        if image is None:
            assert self._base is not None
            image = await self._base()
        name = await self._scratch(image)
        try:
            yield name
        finally:
            await self._engine.remove(name)


def _with(fd: int, work: Callable[[IO[bytes]], T]) -> T:
    with open(fd, "rb", buffering=_BLOCK) as file:
        try:
            return work(file)
        except tarfile.TarError as error:
            raise ProviderError(f"What the Docker Engine exported cannot be read: {error}.") from error


def _entries(file: IO[bytes]) -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    with tarfile.open(fileobj=file, mode="r|", bufsize=_BLOCK, errorlevel=2) as tar:
        for member in tar:
            path = member.name.removeprefix("./").strip("/")
            if path and not put_there(path):
                found[path] = _entry(tar, member, found)
    return found


def _entry(tar: tarfile.TarFile, member: tarfile.TarInfo, found: dict[str, Entry]) -> Entry:
    if member.islnk():  # another name of something that came before
        target = found.get(member.linkname.removeprefix("./").strip("/"))
        return Entry("file", 0, ("link",)) if target is None else target
    owner = _owner(member)
    if member.isreg():
        return Entry("file", member.size, (*owner, member.mtime, _digest(tar, member, None)))
    if member.isdir():
        return Entry("directory", 0, owner)
    if member.issym():
        return Entry("symlink", 0, (member.uid, member.gid, member.linkname))
    return Entry("other", 0, (*owner, member.type, member.devmajor, member.devminor))


def _owner(member: tarfile.TarInfo) -> tuple[object, ...]:
    marks = tuple(sorted((k, v) for k, v in member.pax_headers.items() if k.startswith("SCHILY.xattr.")))
    return member.mode, member.uid, member.gid, marks


def _digest(tar: tarfile.TarFile, member: tarfile.TarInfo, copy: IO[bytes] | None) -> bytes:
    content = tar.extractfile(member)
    assert content is not None
    digest = hashlib.blake2b(digest_size=16)
    while block := content.read(_BLOCK):
        digest.update(block)
        if copy is not None:
            copy.write(block)
    return digest.digest()


def put_there(path: str) -> bool:
    return path in _PUT_THERE or path.startswith(("dev/", "proc/", "sys/"))


def _changes(before: dict[str, Entry], after: dict[str, Entry]) -> list[tuple[str, str, Entry]]:
    found = [
        (path, "added" if path not in before else "changed", entry)
        for path, entry in after.items()
        if before.get(path) != entry
    ]
    for path, entry in before.items():
        above = path.rpartition("/")[0]
        gone_with = above and (above not in after or after[above].type != "directory")
        if path not in after and not gone_with:
            found.append((path, "deleted", entry))
    return found


def _write(file: IO[bytes], out: int, before: dict[str, Entry]) -> None:
    """A layer as container tools read it: what was added or changed, and ``.wh.NAME`` for what was deleted."""
    after: dict[str, Entry] = {}
    with (
        os.fdopen(out, "wb", buffering=_BLOCK) as target,
        tarfile.open(fileobj=target, mode="w|", bufsize=_BLOCK, format=tarfile.PAX_FORMAT) as layer,
        tarfile.open(fileobj=file, mode="r|", bufsize=_BLOCK, errorlevel=2) as tar,
    ):
        for member in tar:
            path = member.name.removeprefix("./").strip("/")
            if not path or put_there(path):
                continue
            member.name = path
            if not member.isreg():
                entry = after[path] = _entry(tar, member, after)
                if before.get(path) != entry:
                    layer.addfile(member)
                continue
            after[path] = _copy(tar, member, layer, before.get(path))
        for path, kind, _ in _changes(before, after):
            if kind == "deleted":
                above, _, name = path.rpartition("/")
                layer.addfile(tarfile.TarInfo(f"{above}/.wh.{name}" if above else f".wh.{name}"))


def _copy(tar: tarfile.TarFile, member: tarfile.TarInfo, layer: tarfile.TarFile, was: Entry | None) -> Entry:
    """A stream is read once, so what may turn out to be unchanged is put aside until that is known."""
    with tempfile.TemporaryFile() if member.size > 8 * _BLOCK else BytesIO() as aside:
        entry = Entry("file", member.size, (*_owner(member), member.mtime, _digest(tar, member, aside)))
        if entry != was:
            aside.seek(0)
            layer.addfile(member, aside)
        return entry


def _described(path: str, kind: str, entry: Entry) -> LayerChange:
    raw = f"/{path}".encode("utf-8", "surrogateescape")
    try:
        shown, hidden = raw.decode(), None
    except UnicodeDecodeError:
        shown, hidden = raw.decode(errors="replace"), base64.b64encode(raw).decode()
    return LayerChange(path=shown, change=ChangeKind(kind), type=entry.type, size=entry.size, raw_path=hidden)
