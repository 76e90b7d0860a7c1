"""What the kernel knows of the file system: nodes by number, with their names, and how long what is known holds."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from skerry.storage.buckets import Item
from skerry.storage.fuse.protocol import ROOT, Attr
from skerry.storage.fuse.spool import Draft

FRESH = 1.0
"""How long the server, and after it the kernel, believes what it has seen of the bucket."""
ENOUGH_NODES = 50_000
"""From here on the kernel is asked to forget."""
MOST_NODES = 200_000
FORGOTTEN_AT_ONCE = 10_000

State = Item | bool | None
"""Of a name: the object, True for a directory, None for nothing."""


@dataclass(slots=True, eq=False)
class Listing:
    """What a directory held when the bucket was last asked, and what we did to it since."""

    at: float
    files: dict[str, Item]
    directories: set[str]

    def __len__(self) -> int:
        return len(self.files) + len(self.directories)

    def fresh(self) -> bool:
        return time.monotonic() - self.at < FRESH

    def set(self, name: str, state: State) -> None:
        self.files.pop(name, None)
        self.directories.discard(name)
        if state is True:
            self.directories.add(name)
        elif isinstance(state, Item):
            self.files[name] = state


@dataclass(slots=True, eq=False)
class Node:
    id: int
    parent: Node | None
    name: str
    directory: bool
    item: Item | None = None
    """As the bucket has it; None for a directory, and for a file that is not there yet."""
    seen: float = 0.0
    lookups: int = 0
    children: dict[str, Node] = field(default_factory=dict)
    listing: Listing | None = None
    probes: int = 0
    """Single names that were asked for since the last listing."""
    own: dict[str, tuple[float, State]] = field(default_factory=dict)
    """What we changed in this directory, and when, since it was last listed."""
    kept: bool = False
    """A directory that stays, though the bucket may hold nothing below it any more."""
    buried: set[str] = field(default_factory=set)
    """Directories in it that we removed."""
    haunted: bool = False
    """A directory where there was another of its name before, which we removed."""
    draft: Draft | None = None
    handles: int = 0
    gone: bool = False
    """Deleted, or replaced: only those who have it open can still reach it."""
    mtime: float | None = None
    opened: str | None = None
    """Which version of the object the kernel may have pages of."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def key(self) -> str:
        names: list[str] = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            names.append(node.name)
            node = node.parent
        return "/".join(reversed(names))

    def below(self, name: str) -> str:
        return f"{self.key}/{name}" if self.parent is not None else name

    def fresh(self) -> bool:
        return self.draft is not None or time.monotonic() - self.seen < FRESH

    def inside(self, other: Node) -> bool:
        node: Node | None = self
        while node is not None:
            if node is other:
                return True
            node = node.parent
        return False

    @property
    def used(self) -> bool:
        return bool(self.lookups or self.children or self.handles or self.draft or (self.kept and not self.gone))

    def attr(self, started: float) -> Attr:
        if self.draft is not None:
            return Attr(self.id, False, self.draft.size, self.draft.mtime, 0 if self.gone else 1)
        if self.item is not None:
            modified = self.item.modified.timestamp()
            return Attr(self.id, False, self.item.size, modified, 0 if self.gone else 1)
        return Attr(self.id, self.directory, 0, self.mtime or started, 2 if self.directory else 1)


class Tree:
    def __init__(self) -> None:
        self.root = Node(ROOT, None, "", True, lookups=1)
        self._nodes: dict[int, Node] = {ROOT: self.root}
        self._last = ROOT

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(list(self._nodes.values()))

    def get(self, id: int) -> Node:
        node = self._nodes.get(id)
        if node is None:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return node

    def directory(self, id: int) -> Node:
        node = self.get(id)
        if not node.directory:
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if node.gone:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        return node

    def place(self, parent: Node, name: str, *, directory: bool, item: Item | None) -> Node:
        """The node of a name that the bucket has; a new one where there was none, or one of another kind."""
        node = parent.children.get(name)
        if node is not None and node.directory != directory:
            self.detach(node)
            node = None
        if node is None:
            if len(self._nodes) >= MOST_NODES:
                raise OSError(errno.ENFILE, os.strerror(errno.ENFILE))
            self._last += 1
            node = Node(self._last, parent, name, directory)
            self._nodes[node.id] = parent.children[name] = node
        if node.draft is None:
            node.item = item
        node.seen = time.monotonic()
        return node

    def detach(self, node: Node) -> None:
        """Its name leads no longer to it."""
        node.gone = True
        if node.parent is not None and node.parent.children.get(node.name) is node:
            del node.parent.children[node.name]

    def move(self, node: Node, parent: Node, name: str) -> None:
        assert node.parent is not None
        if node.parent.children.get(node.name) is node:
            del node.parent.children[node.name]
        node.parent, node.name = parent, name
        parent.children[name] = node

    def oldest(self) -> list[tuple[int, str]]:
        """Files that nobody has open, longest known first. Directories stay: somebody may be in one."""
        found = (
            (node.parent.id, node.name)
            for node in self._nodes.values()
            if node.parent is not None and not (node.directory or node.handles or node.draft or node.gone)
        )
        return list(islice(found, FORGOTTEN_AT_ONCE))

    def forget(self, id: int, count: int) -> None:
        node = self._nodes.get(id)
        if node is not None and id != ROOT:
            node.lookups = max(0, node.lookups - count)
            self.prune(node)

    def prune(self, node: Node) -> None:
        """Let go of nodes that neither the kernel nor we have a use for."""
        while node.parent is not None and not node.used:
            parent = node.parent
            self._nodes.pop(node.id, None)
            if parent.children.get(node.name) is node:
                del parent.children[node.name]
            node = parent
