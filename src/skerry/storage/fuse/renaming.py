"""Renaming, which buckets cannot do: a copy under the new key, and the old one deleted."""

from __future__ import annotations

import asyncio
import errno
import os
from contextlib import AsyncExitStack

from skerry.storage.buckets import Item
from skerry.storage.fuse.directories import Directories
from skerry.storage.fuse.drafts import Drafts
from skerry.storage.fuse.remote import Remote
from skerry.storage.fuse.tree import Node, Tree

MOST_MOVED = 10_000
"""A directory with more files is not renamed here: ``mv`` is told so, and moves them one by one."""
TOGETHER = 16


class Renaming:
    def __init__(self, remote: Remote, tree: Tree, directories: Directories, drafts: Drafts) -> None:
        self._remote = remote
        self._tree = tree
        self._directories = directories
        self._drafts = drafts

    async def move(self, node: Node, there: Node | None, into: Node, name: str) -> None:
        """``there`` is what has the new name now."""
        await (self._move_directory if node.directory else self._move_file)(node, there, into, name)

    async def _move_file(self, node: Node, there: Node | None, into: Node, name: str) -> None:
        if there is not None and there.directory:
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        async with AsyncExitStack() as locks:
            for one in sorted(filter(None, (node, there)), key=lambda one: one.id):
                await locks.enter_async_context(one.lock)
            if there is not None:
                await self._drafts.keep_for_readers(there)
            old, key = node.key, into.below(name)
            if node.draft is not None and node.draft.dirty:
                item: Item | None = await self._drafts.upload(node.draft, key)
            else:
                await self._remote.copy(old, key)
                item = await self._remote.head(key)
            if node.item is not None:
                await self._remote.delete(old)
            if there is not None:
                self._drafts.take_away(there)
            self._directories.removed(node)
            self._tree.move(node, into, name)
            node.item = item
            self._directories.added(node)

    async def _move_directory(self, node: Node, there: Node | None, into: Node, name: str) -> None:
        if into.inside(node):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        if there is not None and not there.directory:
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if there is not None:
            await self._directories.require_empty(there)
        old, key = node.key, into.below(name)
        items = await self._remote.below(old, MOST_MOVED)
        if len(items) > MOST_MOVED:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        await self._copy_all([(item.key, key + item.key.removeprefix(old)) for item in items])
        if items:
            await self._remote.delete(*(item.key for item in items))
        if there is not None:
            self._tree.detach(there)
        self._directories.removed(node)
        self._tree.move(node, into, name)
        self._forget_keys(node)
        self._directories.added(node)

    async def _copy_all(self, pairs: list[tuple[str, str]]) -> None:
        """All of them or none."""
        turn = asyncio.Semaphore(TOGETHER)

        async def copy(source: str, target: str) -> None:
            async with turn:
                await self._remote.copy(source, target)

        outcomes = await asyncio.gather(*(copy(*pair) for pair in pairs), return_exceptions=True)
        failed = next((outcome for outcome in outcomes if isinstance(outcome, BaseException)), None)
        if failed is not None:
            done = [target for (_, target), outcome in zip(pairs, outcomes, strict=True) if outcome is None]
            if done:
                await self._remote.delete(*done)
            raise failed

    def _forget_keys(self, node: Node) -> None:
        """After a directory moved, what is known of the objects below it names the old keys."""
        node.listing, node.seen = None, 0.0
        for child in node.children.values():
            if child.item is not None:
                child.item = Item(child.key, child.item.size, child.item.modified, child.item.etag)
            self._forget_keys(child)
