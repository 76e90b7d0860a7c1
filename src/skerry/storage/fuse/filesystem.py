"""A bucket's objects as files: what each request of the kernel means."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from skerry.errors import InvalidKeyError
from skerry.storage.bucket import LONGEST_KEY, LONGEST_NAME, Item, check_key
from skerry.storage.fuse import protocol
from skerry.storage.fuse.directories import MARKER, Directories
from skerry.storage.fuse.drafts import Drafts
from skerry.storage.fuse.protocol import Opcode, Request
from skerry.storage.fuse.reading import Blocks, version_of
from skerry.storage.fuse.remote import Remote
from skerry.storage.fuse.renaming import Renaming
from skerry.storage.fuse.spool import Draft, Spool
from skerry.storage.fuse.tree import ENOUGH_NODES, FRESH, Node, Tree

MOST_HANDLES = 65_536
MOST_LISTED = 1_000_000
"""Names that open directories may hold together."""
LARGEST_FILE = 1 << 40
UNKNOWN = 0xFFFF_FFFF
"""The number of a file that nobody has looked at yet; 0 would mean that there is none."""

Buffers = Sequence[bytes | memoryview]
Answer = Buffers | Coroutine[Any, Any, Buffers] | None
DONE: Buffers = ()


@dataclass(slots=True, eq=False)
class Handle:
    node: Node
    writable: bool
    entries: list[tuple[str, bool, Item | None]] | None = None
    """Of a directory: its names, as they were when it was opened."""
    at: float = 0.0


class FileSystem:
    """Answers requests. Each method returns what to send, or a coroutine that will; it raises ``OSError``."""

    def __init__(
        self, remote: Remote, spool: Spool, *, read_only: bool, lost: Callable[[str, str], None] | None = None
    ) -> None:
        self.remote = remote
        self.read_only = read_only
        self._tree = Tree()
        self._directories = Directories(self._tree, remote)
        self._blocks = Blocks(remote)
        self._drafts = Drafts(remote, spool, self._tree, self._directories, lost or (lambda key, reason: None))
        self._renaming = Renaming(remote, self._tree, self._directories, self._drafts)
        self._handles: dict[int, Handle] = {}
        self._last_handle = 0
        self._listed = 0
        self._started = time.time()
        self._table: dict[int, Callable[[Request], Answer]] = {
            Opcode.LOOKUP: self._lookup,
            Opcode.FORGET: self._forget,
            Opcode.BATCH_FORGET: self._batch_forget,
            Opcode.GETATTR: self._getattr,
            Opcode.SETATTR: self._setattr,
            Opcode.OPEN: self._open,
            Opcode.CREATE: self._create,
            Opcode.READ: self._read,
            Opcode.WRITE: self._write,
            Opcode.FLUSH: self._flush,
            Opcode.FSYNC: self._fsync,
            Opcode.RELEASE: self._release,
            Opcode.OPENDIR: self._opendir,
            Opcode.READDIR: self._readdir,
            Opcode.READDIRPLUS: self._readdirplus,
            Opcode.RELEASEDIR: self._release,
            Opcode.FSYNCDIR: lambda request: DONE,
            Opcode.MKDIR: self._mkdir,
            Opcode.RMDIR: self._rmdir,
            Opcode.UNLINK: self._unlink,
            Opcode.RENAME: lambda request: self._rename(request, second=False),
            Opcode.RENAME2: lambda request: self._rename(request, second=True),
            Opcode.STATFS: lambda request: [protocol.statfs(4096, 1 << 38, 1 << 38)],
            Opcode.ACCESS: lambda request: DONE,
            Opcode.SYNCFS: lambda request: DONE,
            Opcode.SYMLINK: _refused,
            Opcode.LINK: _refused,
            Opcode.MKNOD: _refused,
        }

    def answer(self, request: Request) -> Answer:
        handler = self._table.get(request.opcode)
        if handler is None:
            # The kernel takes that for "never ask again", and does without or tells the program so.
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        return handler(request)

    def superfluous(self) -> list[tuple[int, str]]:
        """Names, as parent and name, that the kernel had better forget: it remembers as long as it has memory."""
        return self._tree.oldest() if len(self._tree) > ENOUGH_NODES else []

    async def settle(self) -> None:
        """Everything that was closed is in the bucket, or has failed, when this returns."""
        await self._drafts.settle()

    async def close(self) -> None:
        """The kernel has gone: what it left open is saved, too."""
        for handle in self._handles.values():
            handle.node.handles = 0
        self._handles.clear()
        await self._drafts.close()
        await self._blocks.close()

    # -- names and attributes ------------------------------------------------------------------------------------------

    def _lookup(self, request: Request) -> Answer:
        parent = self._tree.directory(request.node)
        name = protocol.name(request.body)
        found = self._directories.known(parent, name)
        if found is False:
            return self._look_up(parent, name)
        return self._found(found)

    async def _look_up(self, parent: Node, name: str) -> Buffers:
        return self._found(await self._directories.find(parent, name))

    def _found(self, node: Node | bool | None) -> Buffers:
        if not isinstance(node, Node):
            return [protocol.no_entry(FRESH)]
        return [self._entry(node)]

    def _entry(self, node: Node) -> bytes:
        node.lookups += 1
        return protocol.entry(node.attr(self._started), FRESH)

    def _forget(self, request: Request) -> Answer:
        self._tree.forget(request.node, protocol.number(request.body))
        return None

    def _batch_forget(self, request: Request) -> Answer:
        for node, count in protocol.forgets(request.body):
            self._tree.forget(node, count)
        return None

    def _getattr(self, request: Request) -> Answer:
        node = self._tree.get(request.node)
        if node.parent is None or node.fresh() or node.gone:
            return self._attr(node)
        return self._get_attr(node)

    async def _get_attr(self, node: Node) -> Buffers:
        assert node.parent is not None
        if await self._directories.find(node.parent, node.name) is not node and not node.handles:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        return self._attr(node)

    def _attr(self, node: Node) -> Buffers:
        if node.gone and not node.handles:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        return [protocol.attr_out(node.attr(self._started), FRESH)]

    async def _setattr(self, request: Request) -> Buffers:
        self._check_writable()
        node = self._tree.get(request.node)
        wanted = protocol.setattr_(request.body)
        if wanted.size is not None:
            if node.directory:
                raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
            if wanted.size > LARGEST_FILE:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
            async with node.lock:
                draft = await self._drafts.open(node, empty=wanted.size == 0)
                draft.truncate(wanted.size)
            if wanted.handle is None:  # there will be no close
                await self._drafts.save(node)
        # Modes, owners and times are taken note of by nobody: objects have none that could be set.
        return self._attr(node)

    # -- files ---------------------------------------------------------------------------------------------------------

    def _open(self, request: Request) -> Answer:
        node = self._tree.get(request.node)
        flags = protocol.open_flags(request.body)
        writable = flags & os.O_ACCMODE != os.O_RDONLY
        if writable:
            self._check_writable()
        if node.directory:
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        if writable and flags & os.O_TRUNC:
            return self._open_truncated(node)
        if node.draft is None and node.item is None:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        version = None if node.draft is not None or node.item is None else version_of(node.item)
        # The kernel may go on using the pages it has read of this very object.
        keep = protocol.KEEP_CACHE if version is not None and version == node.opened else 0
        node.opened = version
        return [protocol.open_out(self._handle(Handle(node, writable)), keep)]

    async def _open_truncated(self, node: Node) -> Buffers:
        handle = self._handle(Handle(node, True))
        try:
            async with node.lock:
                (await self._drafts.open(node, empty=True)).truncate(0)
        except BaseException:
            self._drop(handle)
            raise
        return [protocol.open_out(handle)]

    async def _create(self, request: Request) -> Buffers:
        self._check_writable()
        parent = self._tree.directory(request.node)
        flags, name = protocol.create(request.body)
        _check_name(parent, name)
        node = await self._directories.find(parent, name)
        if node is not None and flags & os.O_EXCL:
            raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))
        if node is not None and node.directory:
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        fresh = node is None
        if node is None:
            node = self._tree.place(parent, name, directory=False, item=None)
        handle = self._handle(Handle(node, flags & os.O_ACCMODE != os.O_RDONLY))
        try:
            if fresh or flags & os.O_TRUNC:
                async with node.lock:
                    # There is a change to save even if nothing is written: the file itself.
                    (await self._drafts.open(node, empty=True)).truncate(0)
        except BaseException:
            self._drop(handle)
            raise
        return [self._entry(node), protocol.open_out(handle)]

    def _read(self, request: Request) -> Answer:
        wanted = protocol.transfer(request.body)
        handle = self._handles_of(wanted.handle)
        size = min(wanted.size, protocol.MAX_WRITE)
        if handle.node.draft is not None:
            return [handle.node.draft.read(wanted.offset, size)]
        item = handle.node.item
        if item is None or wanted.offset >= item.size or not size:
            return DONE
        ready = self._blocks.ready(item, wanted.offset, size)
        return self._blocks.read(item, wanted.offset, size) if ready is None else ready

    def _write(self, request: Request) -> Answer:
        self._check_writable()
        wanted, data = protocol.written(request.body)
        handle = self._handles_of(wanted.handle)
        draft = handle.node.draft
        if draft is None or handle.node.lock.locked():
            return self._write_later(handle.node, bytes(data), wanted)
        return [protocol.write_out(self._write_now(draft, data, wanted))]

    async def _write_later(self, node: Node, data: bytes, wanted: protocol.Transfer) -> Buffers:
        async with node.lock:
            draft = await self._drafts.open(node)
        return [protocol.write_out(self._write_now(draft, data, wanted))]

    @staticmethod
    def _write_now(draft: Draft, data: bytes | memoryview, wanted: protocol.Transfer) -> int:
        # The kernel's idea of where the file ends may be a second old.
        offset = draft.size if wanted.flags & os.O_APPEND else wanted.offset
        if offset + len(data) > LARGEST_FILE:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        return draft.write(data, offset)

    def _flush(self, request: Request) -> Answer:
        return self._sync(self._handles_of(protocol.released(request.body)))

    def _fsync(self, request: Request) -> Answer:
        return self._sync(self._handles_of(protocol.synced(request.body)))

    def _sync(self, handle: Handle) -> Answer:
        node = handle.node
        if not handle.writable or node.draft is None or not node.draft.dirty:
            return DONE
        return self._saved(node)

    async def _saved(self, node: Node) -> Buffers:
        await self._drafts.save(node)
        return DONE

    def _release(self, request: Request) -> Answer:
        self._drop(protocol.released(request.body))
        return DONE

    # -- directories ---------------------------------------------------------------------------------------------------

    async def _opendir(self, request: Request) -> Buffers:
        node = self._tree.directory(request.node)
        listing = await self._directories.list(node)
        entries = list(self._directories.entries(node))
        return [protocol.open_out(self._handle(Handle(node, False, entries, listing.at)))]

    def _readdir(self, request: Request) -> Answer:
        return self._list(request, plus=False)

    def _readdirplus(self, request: Request) -> Answer:
        return self._list(request, plus=True)

    def _list(self, request: Request, *, plus: bool) -> Buffers:
        wanted = protocol.transfer(request.body)
        handle = self._handles_of(wanted.handle)
        if handle.entries is None:
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        out = bytearray()
        for index in range(wanted.offset, len(handle.entries) + 2):
            name, directory, item = (".", "..")[index] if index < 2 else "", True, None
            if index >= 2:
                name, directory, item = handle.entries[index - 2]
            raw = name.encode()
            if len(out) + protocol.dirent_size(raw, plus) > wanted.size:
                break
            node = handle.node.children.get(name) if index >= 2 else None
            if plus:
                if index >= 2 and (item is not None or directory or node is not None):
                    if node is None or not node.fresh():
                        node = self._tree.place(handle.node, name, directory=directory, item=item)
                        node.seen = handle.at
                    out += self._entry(node)
                else:
                    out += protocol.no_entry(0)
            out += protocol.dirent(UNKNOWN if node is None else node.id, index + 1, raw, directory)
        return [bytes(out)]

    async def _mkdir(self, request: Request) -> Buffers:
        self._check_writable()
        parent = self._tree.directory(request.node)
        name = protocol.mkdir(request.body)
        _check_name(parent, name)
        if await self._directories.find(parent, name) is not None:
            raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))
        await self.remote.put_empty(f"{parent.below(name)}/{MARKER}")
        node = self._tree.place(parent, name, directory=True, item=None)
        node.mtime = time.time()
        self._directories.added(node)
        return [self._entry(node)]

    async def _rmdir(self, request: Request) -> Buffers:
        self._check_writable()
        parent = self._tree.directory(request.node)
        node = await self._existing(parent, protocol.name(request.body))
        if not node.directory:
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        await self._directories.require_empty(node)
        await self.remote.delete(f"{node.key}/{MARKER}")
        self._directories.removed(node)
        self._tree.detach(node)
        return DONE

    async def _unlink(self, request: Request) -> Buffers:
        self._check_writable()
        parent = self._tree.directory(request.node)
        node = await self._existing(parent, protocol.name(request.body))
        if node.directory:
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        async with node.lock:
            await self._drafts.keep_for_readers(node)
            if node.item is not None:
                await self.remote.delete(node.key)
            self._drafts.take_away(node)
        return DONE

    async def _rename(self, request: Request, *, second: bool) -> Buffers:
        self._check_writable()
        parent = self._tree.directory(request.node)
        target, flags, old, new = protocol.rename(request.body, second)
        if flags & ~protocol.RENAME_NOREPLACE:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        into = self._tree.directory(target)
        _check_name(into, new)
        node = await self._existing(parent, old)
        there = await self._directories.find(into, new)
        if there is node:
            return DONE
        if there is not None and flags & protocol.RENAME_NOREPLACE:
            raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))
        await self._renaming.move(node, there, into, new)
        return DONE

    # -- handles --------------------------------------------------------------------------------------------

    def _handle(self, handle: Handle) -> int:
        listed = len(handle.entries or ())
        if len(self._handles) >= MOST_HANDLES or (self._listed and self._listed + listed > MOST_LISTED):
            raise OSError(errno.ENFILE, os.strerror(errno.ENFILE))
        self._listed += listed
        self._last_handle += 1
        self._handles[self._last_handle] = handle
        handle.node.handles += 1
        return self._last_handle

    def _handles_of(self, number: int) -> Handle:
        handle = self._handles.get(number)
        if handle is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return handle

    def _drop(self, number: int) -> None:
        handle = self._handles.pop(number, None)
        if handle is None:
            return
        self._listed -= len(handle.entries or ())
        node = handle.node
        node.handles -= 1
        if node.handles == 0 and node.draft is not None and node.draft.dirty and not node.gone:
            # Written through a map after the last close, or that close failed: one more attempt.
            self._drafts.save_later(node)
        else:
            self._drafts.let_go(node)
            self._tree.prune(node)

    async def _existing(self, parent: Node, name: str) -> Node:
        node = await self._directories.find(parent, name)
        if node is None:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        return node

    def _check_writable(self) -> None:
        if self.read_only:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def _check_name(parent: Node, name: str) -> None:
    if name == MARKER:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))
    if len(name.encode()) > LONGEST_NAME or len(parent.below(name).encode()) + len(MARKER) + 1 > LONGEST_KEY:
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
    try:
        check_key(name)
    except InvalidKeyError:
        raise OSError(errno.EILSEQ, os.strerror(errno.EILSEQ)) from None


def _refused(request: Request) -> Answer:
    """Links, devices, pipes and sockets: a bucket has none."""
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))
