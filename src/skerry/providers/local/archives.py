"""Reading root file systems: directories, tarballs in any usual compression, and layered image archives.

The archives are untrusted. What they may make the reader hold in memory is bounded here, what they may write is bounded
and confined by ``Rootfs``.
"""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import platform
import re
import shutil
import stat
import subprocess
import tarfile
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any, Self, cast

from skerry.errors import InvalidRequestError, TooLargeError, UnsupportedError
from skerry.providers.local.idmap import NOBODY, IdMap
from skerry.providers.local.rootfs import Meta, Rootfs, components

_MAGIC = ((b"\x1f\x8b", "gz"), (b"BZh", "bz2"), (b"\xfd7zXZ\x00", "xz"), (b"\x28\xb5\x2f\xfd", "zst"))
_HEADER_BUDGET = 4 << 20
_MAX_DOCUMENT = 4 << 20
_MAX_DEPTH = 256
_LAYERED = re.compile(
    r"(\./)?(blobs(/.*)?|oci-layout|index\.json|manifest\.json|[0-9a-f]{64}(\.json|\.tar|/.*)?|repositories)/?"
)
_DAMAGED = (tarfile.TarError, EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile, UnicodeError)


def unpack(
    idmap: IdMap,
    progress: Callable[[int], None] | None,
    source: int,
    target: int,
    scratch: str,
    max_bytes: int,
    max_entries: int,
) -> dict[str, int]:
    """Fill the empty directory open as ``target`` from the file or directory open as ``source``."""
    rootfs = Rootfs(target, idmap, max_bytes=max_bytes, max_entries=max_entries, progress=progress)
    try:
        if stat.S_ISDIR(os.fstat(source).st_mode):
            _Copy(rootfs, idmap).tree(source, ())
        else:
            with os.fdopen(os.dup(source), "rb") as file:
                _unpack_file(rootfs, file, scratch, max_bytes)
        rootfs.require_shell()
        rootfs.add_mount_points()
        rootfs.settle()
    except _DAMAGED as error:
        raise InvalidRequestError(f"The archive is damaged or not a tar archive: {error}.") from error
    finally:
        rootfs.close()
    return {"bytes": rootfs.bytes, "entries": rootfs.entries}


# -- tar ---------------------------------------------------------------------------------------------------------------


class _Bounded:
    """A stream that refuses to deliver more than a budget between two entries, and more than a limit in all."""

    def __init__(self, file: IO[bytes], limit: int) -> None:
        self._file = file
        self._left = limit
        self.budget = _HEADER_BUDGET

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._left -= len(data)
        self.budget -= len(data)
        if self._left < 0:
            raise TooLargeError("The archive is larger than an image may be.")
        if self.budget < 0:
            raise InvalidRequestError("The archive holds a header that is too large to be meant seriously.")
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()


class _Header(tarfile.TarInfo):
    """tarfile takes a broken header in the middle for the end of the archive; an image must not end early."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if len(buf) == tarfile.BLOCKSIZE and not any(buf):
                raise
            raise InvalidRequestError(f"The archive is cut off, damaged, or not a tar archive: {error}.") from error


def _entries(file: IO[bytes], mode: str, limit: int) -> Iterator[tuple[tarfile.TarInfo, Callable[[int], bytes]]]:
    """Every entry and a function that reads its content."""
    bounded = _Bounded(file, limit)
    with tarfile.open(fileobj=bounded, mode=mode, tarinfo=_Header, bufsize=1 << 18) as tar:  # type: ignore[call-overload]
        while (entry := tar.next()) is not None:
            # tarfile keeps every entry it has seen, for look-ups that nobody makes here.
            tar.members = []
            content = tar.extractfile(entry) if entry.isreg() else None

            def read(size: int, content: IO[bytes] | None = content) -> bytes:
                bounded.budget = _HEADER_BUDGET + size
                return content.read(size) if content is not None else b""

            yield entry, read
            bounded.budget = _HEADER_BUDGET


def _unpack_file(rootfs: Rootfs, file: IO[bytes], scratch: str, max_bytes: int) -> None:
    limit = max_bytes + max_bytes // 4 + (64 << 20)
    with decompressed(file) as stream:
        peek = next(_entries(stream, "r|", limit), None)
    if peek is None:
        raise InvalidRequestError("The archive is empty.")
    file.seek(0)
    with decompressed(file) as stream:
        if not _LAYERED.fullmatch(peek[0].name):
            _unpack_tar(rootfs, stream, limit, layer=False)
        elif stream is file:
            _Layers(rootfs, file, limit).unpack()
        else:
            # Layers are applied in another order than the archive holds them, so it must be possible to go back.
            with open(os.path.join(scratch, "archive"), "w+b") as plain:
                os.unlink(plain.name)
                bounded = _Bounded(stream, limit)
                while block := bounded.read(1 << 20):
                    bounded.budget = _HEADER_BUDGET
                    plain.write(block)
                plain.seek(0)
                _Layers(rootfs, plain, limit).unpack()


def _unpack_tar(rootfs: Rootfs, stream: IO[bytes], limit: int, *, layer: bool) -> None:
    for entry, read in _entries(stream, "r|", limit):
        path = components(entry.name)
        mtime = float(entry.mtime) if 0 <= entry.mtime < 1 << 34 else None
        meta = Meta(entry.mode, entry.uid, entry.gid, mtime)
        if layer and path and path[-1].startswith(".wh."):
            if path[-1] == ".wh..wh..opq":
                rootfs.opaque(path[:-1])
            elif path[-1] not in (".wh.", ".wh..", ".wh..."):
                rootfs.whiteout((*path[:-1], path[-1][len(".wh.") :]))
        elif entry.isdir():
            rootfs.directory(path, meta)
        elif entry.issym():
            rootfs.symlink(path, meta, entry.linkname)
        elif entry.islnk():
            rootfs.hard_link(path, components(entry.linkname))
        elif entry.isfifo():
            rootfs.fifo(path, meta)
        elif entry.isreg():
            rootfs.file(path, meta, read)
        # Devices are left out: a sandbox has its own, and overlayfs would take one for a deleted file.


# -- compression -------------------------------------------------------------------------------------------------------


@contextmanager
def decompressed(file: IO[bytes]) -> Iterator[IO[bytes]]:
    """The plain bytes of a seekable file, from its present position on."""
    start = file.tell()
    head = file.read(8)
    file.seek(start)
    kind = next((kind for magic, kind in _MAGIC if head.startswith(magic)), None)
    if kind == "gz":
        with gzip.GzipFile(fileobj=file) as stream:
            yield cast("IO[bytes]", stream)
    elif kind == "bz2":
        with bz2.BZ2File(file) as stream:
            yield stream
    elif kind == "xz":
        with lzma.LZMAFile(file) as stream:
            yield stream
    elif kind == "zst":
        with _zstd(file) as stream:
            yield stream
    else:
        yield file


@contextmanager
def _zstd(file: IO[bytes]) -> Iterator[IO[bytes]]:
    program = shutil.which("zstd")
    if program is None:
        raise UnsupportedError("This archive is compressed with zstd.", hint="Install it: `apt-get install zstd`.")
    process = subprocess.Popen(
        [program, "-dcq"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdin is not None
    assert process.stdout is not None
    feeder = threading.Thread(target=_feed, args=(file, process.stdin), daemon=True)
    feeder.start()
    try:
        yield process.stdout
    finally:
        process.stdout.close()
        process.kill()
        feeder.join()
        process.wait()


def _feed(source: IO[bytes], sink: IO[bytes]) -> None:
    try:
        with sink:
            shutil.copyfileobj(source, sink, 1 << 18)
    except (BrokenPipeError, ValueError):
        return  # the reader has seen enough


# -- image archives of docker save, podman and skopeo ------------------------------------------------------------------


class _Layers:
    def __init__(self, rootfs: Rootfs, file: IO[bytes], limit: int) -> None:
        self._rootfs = rootfs
        self._file = file
        self._limit = limit
        self._index: dict[str, tarfile.TarInfo] = {}
        for count, (entry, _) in enumerate(_entries(file, "r:", limit)):
            if count > 100_000:
                raise TooLargeError("The image archive holds too many files.")
            self._index["/".join(components(entry.name))] = entry

    def unpack(self) -> None:
        for name in self._names():
            self._rootfs.begin_layer()
            with self._open(name) as raw, decompressed(raw) as stream:
                _unpack_tar(self._rootfs, stream, self._limit, layer=True)

    def _names(self) -> list[str]:
        if "manifest.json" in self._index:
            manifests = self._document("manifest.json")
            if isinstance(manifests, list) and len(manifests) == 1 and isinstance(manifests[0], dict):
                layers = manifests[0].get("Layers")
                if isinstance(layers, list) and layers and all(isinstance(name, str) for name in layers):
                    return layers
            raise InvalidRequestError("The image archive must hold exactly one image.", hint="`docker save` one image.")
        if "index.json" in self._index:
            return self._oci_layers(self._document("index.json"))
        raise InvalidRequestError("The archive looks like a saved image, but has neither manifest.json nor index.json.")

    def _oci_layers(self, document: Any, depth: int = 0) -> list[str]:
        if isinstance(document, dict) and isinstance(document.get("layers"), list):
            return [self._blob(layer) for layer in document["layers"]]
        manifests = document.get("manifests") if isinstance(document, dict) else None
        if not isinstance(manifests, list) or not manifests or depth > 3:
            raise InvalidRequestError("The image archive's index leads to no image.")
        chosen = next((one for one in manifests if _is_for_this_machine(one)), None)
        if chosen is None:
            raise InvalidRequestError(f"The image archive holds no image for linux on {platform.machine()}.")
        return self._oci_layers(self._document(self._blob(chosen)), depth + 1)

    @staticmethod
    def _blob(descriptor: Any) -> str:
        digest = descriptor.get("digest") if isinstance(descriptor, dict) else None
        if not isinstance(digest, str) or not re.fullmatch(r"[a-z0-9]+:[0-9a-f]{32,128}", digest):
            raise InvalidRequestError("The image archive's manifest names a layer without a digest.")
        return "blobs/" + digest.replace(":", "/")

    def _document(self, name: str) -> Any:
        with self._open(name) as file:
            content = file.read(_MAX_DOCUMENT)
        try:
            return json.loads(content)
        except ValueError as error:
            raise InvalidRequestError(f"The image archive's {name} is not JSON.") from error

    @contextmanager
    def _open(self, name: str) -> Iterator[IO[bytes]]:
        entry = self._index.get("/".join(components(name)))
        for _ in range(8):
            if entry is None or not entry.issym():
                break
            # docker save of old writes a layer that occurs twice as a link to the other.
            entry = self._index.get(os.path.normpath(os.path.join(os.path.dirname(entry.name), entry.linkname)))
        if entry is None or not entry.isreg() or entry.sparse is not None:
            raise InvalidRequestError(f"The image archive's manifest names {name!r}, which the archive does not hold.")
        with tarfile.open(fileobj=self._file, mode="r:") as tar:
            content = tar.extractfile(entry)
            assert content is not None
            with content:
                yield content


def _is_for_this_machine(descriptor: Any) -> bool:
    """An index without platforms holds one image; one with platforms may hold attestations for "unknown" as well."""
    where = descriptor.get("platform") if isinstance(descriptor, dict) else None
    if not isinstance(where, dict):
        return isinstance(descriptor, dict)
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    return where.get("os") == "linux" and where.get("architecture") == machine


# -- directories -------------------------------------------------------------------------------------------------------


class _Copy:
    def __init__(self, rootfs: Rootfs, idmap: IdMap) -> None:
        self._rootfs = rootfs
        self._idmap = idmap
        self._linked: dict[tuple[int, int], tuple[str, ...]] = {}

    def tree(self, fd: int, path: tuple[str, ...]) -> None:
        if len(path) > _MAX_DEPTH:
            raise InvalidRequestError(f"The directory is nested more than {_MAX_DEPTH} levels deep.")
        self._rootfs.directory(path, self._meta(os.fstat(fd)))
        for name in os.listdir(fd):
            try:
                self._entry(fd, name, (*path, name))
            except PermissionError as error:
                raise InvalidRequestError(f"/{'/'.join((*path, name))} of the directory cannot be read.") from error

    def _entry(self, parent: int, name: str, path: tuple[str, ...]) -> None:
        found = os.stat(name, dir_fd=parent, follow_symlinks=False)
        identity = (found.st_dev, found.st_ino)
        if stat.S_ISLNK(found.st_mode):
            self._rootfs.symlink(path, self._meta(found), os.readlink(name, dir_fd=parent))
        elif stat.S_ISFIFO(found.st_mode):
            self._rootfs.fifo(path, self._meta(found))
        elif stat.S_ISREG(found.st_mode) and identity in self._linked:
            self._rootfs.hard_link(path, self._linked[identity])
        elif stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode):
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent)
            try:
                opened = os.fstat(fd)
                if stat.S_ISDIR(opened.st_mode):
                    self.tree(fd, path)
                elif stat.S_ISREG(opened.st_mode):
                    self._rootfs.file(path, self._meta(opened), lambda size: os.read(fd, size))
                    if opened.st_nlink > 1:
                        self._linked[identity] = path
            finally:
                os.close(fd)

    def _meta(self, found: os.stat_result) -> Meta:
        uid = self._idmap.from_host(found.st_uid, "uid")
        gid = self._idmap.from_host(found.st_gid, "gid")
        uid, gid = found.st_uid if uid is None else uid, found.st_gid if gid is None else gid
        if self._idmap.kind == "subids":
            # In a user namespace the host's root, like everyone who is not mapped, looks like nobody.
            uid, gid = (0 if uid == NOBODY else uid), (0 if gid == NOBODY else gid)
        return Meta(stat.S_IMODE(found.st_mode), uid, gid, found.st_mtime)
