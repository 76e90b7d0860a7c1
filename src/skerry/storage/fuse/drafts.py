"""Files while they are written: brought from the bucket when they are first changed, saved when they are closed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from skerry.storage.buckets import Item
from skerry.storage.fuse.directories import Directories
from skerry.storage.fuse.remote import Remote
from skerry.storage.fuse.spool import Draft, Spool
from skerry.storage.fuse.tree import Node, Tree


class Drafts:
    """``lost(key, reason)`` hears of files that could not be saved though nobody will close them any more."""

    def __init__(
        self, remote: Remote, spool: Spool, tree: Tree, directories: Directories, lost: Callable[[str, str], None]
    ) -> None:
        self._remote = remote
        self._spool = spool
        self._tree = tree
        self._directories = directories
        self._lost = lost
        self._saving: set[asyncio.Task[None]] = set()

    async def open(self, node: Node, *, empty: bool = False) -> Draft:
        """The file's content on our disk, brought there from the bucket if need be. With the node's lock held."""
        if node.draft is not None:
            return node.draft
        draft = self._spool.draft()
        try:
            if not empty and node.item is not None:
                offset = 0
                async for chunk in self._remote.stream(node.item.key):
                    draft.fill(chunk, offset)
                    offset += len(chunk)
        except BaseException:
            draft.close()
            raise
        node.draft = draft
        return draft

    async def keep_for_readers(self, node: Node) -> None:
        """A file that is open can be read after it was deleted."""
        if node.handles and node.draft is None and node.item is not None:
            await self.open(node)

    async def save(self, node: Node) -> None:
        async with node.lock:
            draft = node.draft
            if draft is None or not draft.dirty:
                return
            if node.gone:
                draft.saved = draft.changes
                return
            key = node.key
            item = await self.upload(draft, key)
            while node.key != key:  # the directory was renamed meanwhile
                await self._remote.delete(key)
                key = node.key
                item = await self.upload(draft, key)
            node.item = item
            self._directories.added(node)
            self.let_go(node)

    async def upload(self, draft: Draft, key: str) -> Item:
        changes = draft.changes
        put = await self._remote.put(key, draft.fd, draft.size)
        draft.saved = changes
        # As the bucket dates it: what a listing says later must be the same.
        return await self._remote.head(key) or put

    def save_later(self, node: Node) -> None:
        task = asyncio.get_running_loop().create_task(self._save_or_lose(node))
        self._saving.add(task)
        task.add_done_callback(self._saving.discard)

    async def _save_or_lose(self, node: Node) -> None:
        key = node.key
        try:
            await self.save(node)
        except OSError as error:
            self._lost(key, error.strerror or "unknown")
            if node.draft is not None:
                node.draft.saved = node.draft.changes
        self.let_go(node)

    def let_go(self, node: Node) -> None:
        """A draft is kept only while somebody has the file open."""
        if node.handles == 0 and node.draft is not None and (not node.draft.dirty or node.gone):
            node.draft.close()
            node.draft = None
            self._tree.prune(node)

    def take_away(self, node: Node) -> None:
        self._directories.removed(node)
        self._tree.detach(node)
        self.let_go(node)

    async def settle(self) -> None:
        """Nothing is being saved any more when this returns."""
        while self._saving:
            await asyncio.wait(self._saving)

    async def close(self) -> None:
        """The kernel has gone: what it left open is saved, too."""
        for node in self._tree:
            if node.draft is not None and node.draft.dirty:
                self.save_later(node)
        await self.settle()
        for node in self._tree:
            if node.draft is not None:
                node.draft.close()
                node.draft = None
