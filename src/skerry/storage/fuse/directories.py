"""Names: which of them there are, found out from the bucket with few requests and believed for a second."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections import OrderedDict
from collections.abc import Iterator

from skerry.storage.buckets import Item
from skerry.storage.fuse.protocol import MAX_NAME
from skerry.storage.fuse.remote import Remote
from skerry.storage.fuse.tree import Listing, Node, State, Tree

MARKER = ".skerry-directory"
"""An object that keeps an empty directory alive. Buckets have none; inside a mount it is never seen."""
PROBES = 2
"""After so many single names of a directory were asked for, all of them are."""
MOST_LISTED = 100_000
"""Names of directories that are remembered, all together; the largest directory may have more."""
SMALL = 1000
"""A directory of at most so many names is listed anew with one request, rather than asked name by name."""


class Directories:
    def __init__(self, tree: Tree, remote: Remote) -> None:
        self._tree = tree
        self._remote = remote
        self._listed: OrderedDict[int, tuple[Node, Listing]] = OrderedDict()

    def known(self, parent: Node, name: str) -> Node | bool | None:
        """The node, None if there is no such name; False if the bucket has to be asked."""
        if name == MARKER:
            return None
        node = parent.children.get(name)
        if node is not None and node.fresh():
            return node
        if parent.listing is None or not parent.listing.fresh():
            return False
        return self._from_listing(parent, parent.listing, name)

    async def find(self, parent: Node, name: str) -> Node | None:
        found = self.known(parent, name)
        if found is not False:
            return found if isinstance(found, Node) else None
        parent.probes += 1
        listing = parent.listing
        if (listing is not None and len(listing) <= SMALL) or (listing is None and parent.probes > PROBES):
            listing = await self.list(parent)
            return self._from_listing(parent, listing, name)
        return await self._probe(parent, name)

    async def list(self, directory: Node, *, anew: bool = False) -> Listing:
        """All names of a directory."""
        if not anew and directory.listing is not None and directory.listing.fresh():
            return directory.listing
        asked = time.monotonic()
        items, inner = await self._remote.children(directory.key)
        names = {name for key in inner if valid(name := _name(key))}
        names -= await self._ghosts(directory, names)
        directory.buried &= {_name(key) for key in inner} - names
        files = {name: item for item in items if valid(name := _name(item.key)) and name not in names}
        if directory.listing is not None and directory.listing.at > asked:
            return directory.listing  # somebody asked after us and was answered before
        listing = Listing(asked, files, names)
        for name, child in directory.children.items():
            if child.kept:
                listing.directories.add(name)
        # What we did ourselves while the bucket answered may not be in its answer.
        directory.own = {name: change for name, change in directory.own.items() if change[0] >= asked}
        for name, (_, state) in directory.own.items():
            listing.set(name, state)
        directory.listing, directory.probes = listing, 0
        self._remember(directory, listing)
        return listing

    async def _ghosts(self, directory: Node, names: set[str]) -> set[str]:
        """Some servers go on to name directories that have nothing in them any more."""
        suspects = names if directory.haunted else names & directory.buried
        if not suspects:
            return set()
        items = await self._remote.below(directory.key, MOST_LISTED)
        if len(items) > MOST_LISTED:
            return set()
        skipped = len(directory.key) + 1 if directory.key else 0
        return suspects - {item.key[skipped:].partition("/")[0] for item in items}

    def _remember(self, directory: Node, listing: Listing) -> None:
        self._listed[directory.id] = (directory, listing)
        self._listed.move_to_end(directory.id)
        while len(self._listed) > 1 and sum(len(kept) for _, kept in self._listed.values()) > MOST_LISTED:
            _, (other, kept) = self._listed.popitem(last=False)
            if other.listing is kept:
                other.listing = None

    async def require_empty(self, directory: Node) -> None:
        listing = await self.list(directory, anew=True)
        full = bool(listing.files) or any(child.draft for child in directory.children.values())
        for name in [] if full else listing.directories:
            child = directory.children.get(name)
            full = (child is not None and child.kept) or await self._remote.any_below(directory.below(name))
            if full:
                break
        if full:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))

    def entries(self, directory: Node) -> Iterator[tuple[str, bool, Item | None]]:
        """Name, whether it is a directory, and the object; what is not in the bucket yet comes last."""
        listing = directory.listing
        assert listing is not None
        for name in listing.directories:
            yield name, True, None
        for name, item in listing.files.items():
            yield name, False, item
        for name, child in directory.children.items():
            if child.draft is not None and name not in listing.files:
                yield name, False, None

    # -- what we did ourselves -----------------------------------------------------------------------------------------

    def added(self, node: Node) -> None:
        """It is in the bucket now."""
        node.seen = time.monotonic()
        if node.parent is not None:
            node.haunted = node.haunted or node.parent.haunted or node.name in node.parent.buried
            node.parent.buried.discard(node.name)
            self._did(node.parent, node.name, True if node.directory else node.item)

    def removed(self, node: Node) -> None:
        """Its name leads to nothing any more; called while the node still has it."""
        parent = node.parent
        assert parent is not None
        self._did(parent, node.name, None)
        if node.directory:
            parent.buried.add(node.name)
        # A directory out of which we took the last file goes on to be one, until it is removed or we leave.
        above: Node | None = parent
        while above is not None and above.parent is not None and not above.kept:
            above.kept = True
            above = above.parent

    @staticmethod
    def _did(parent: Node, name: str, state: State) -> None:
        parent.own[name] = (time.monotonic(), state)
        if parent.listing is not None:
            parent.listing.set(name, state)

    # -- within --------------------------------------------------------------------------------------------------------

    def _from_listing(self, parent: Node, listing: Listing, name: str) -> Node | None:
        node = parent.children.get(name)
        if node is not None and node.draft is not None:
            return node
        if name in listing.directories:
            node = self._seen(self._tree.place(parent, name, directory=True, item=None), listing.at)
            node.haunted = node.haunted or parent.haunted
            return node
        if name in listing.files:
            return self._seen(self._tree.place(parent, name, directory=False, item=listing.files[name]), listing.at)
        self._vanished(parent, name)
        return None

    async def _probe(self, parent: Node, name: str) -> Node | None:
        key = parent.below(name)
        asked = time.monotonic()
        item, filled = await asyncio.gather(self._remote.head(key), self._remote.any_below(key))
        node = parent.children.get(name)
        if node is not None and (node.draft is not None or node.seen > asked):
            return node  # it was made here meanwhile
        filled = filled or (node is not None and node.kept)
        if item is None and not filled:
            self._vanished(parent, name)
            return None
        return self._seen(self._tree.place(parent, name, directory=filled, item=None if filled else item), asked)

    @staticmethod
    def _seen(node: Node, at: float) -> Node:
        node.seen = at
        return node

    def _vanished(self, parent: Node, name: str) -> None:
        node = parent.children.get(name)
        if node is not None and node.draft is None:
            self._tree.detach(node)


def valid(name: str) -> bool:
    """Whether a part of a key can be the name of a file. Others have them in the bucket; inside they are not shown."""
    return name not in ("", ".", "..", MARKER) and "\0" not in name and len(name.encode()) <= MAX_NAME


def _name(key: str) -> str:
    return key.rsplit("/", 1)[-1]
