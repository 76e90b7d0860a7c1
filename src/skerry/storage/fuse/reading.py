"""Reading objects: in blocks that are kept for a while and fetched ahead of a reader that goes straight on."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from skerry.storage.buckets import Item
from skerry.storage.fuse.remote import Remote

BLOCK = 4 << 20
AHEAD = 4
TOGETHER = 8
KEPT = 16
"""So many blocks are kept for a mount, 64 MiB, beside those that are on their way."""

Place = tuple[str, str, int]


class Blocks:
    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self._blocks: OrderedDict[Place, asyncio.Task[bytes]] = OrderedDict()
        self._turn = asyncio.Semaphore(TOGETHER)

    def ready(self, item: Item, offset: int, size: int) -> list[memoryview] | None:
        """What was asked for, if all of it is here."""
        end = min(offset + size, item.size)
        pieces = []
        for index in range(offset // BLOCK, -(-end // BLOCK)):
            task = self._blocks.get(_place(item, index))
            if task is None or not task.done() or task.cancelled() or task.exception() is not None:
                return None
            pieces.append(_cut(task.result(), index, offset, end))
        self._ahead(item, end)
        return pieces

    async def read(self, item: Item, offset: int, size: int) -> list[memoryview]:
        end = min(offset + size, item.size)
        pieces = []
        for index in range(offset // BLOCK, -(-end // BLOCK)):
            task = self._fetch(item, index)
            self._ahead(item, end)
            try:
                block = await asyncio.shield(task)
            except BaseException:
                if task.done():
                    self._blocks.pop(_place(item, index), None)  # whoever asks next may have more luck
                raise
            pieces.append(_cut(block, index, offset, end))
        return pieces

    async def close(self) -> None:
        tasks = list(self._blocks.values())
        self._blocks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ahead(self, item: Item, end: int) -> None:
        """Whoever has read a good part of the first block, or the block before this one, will want the next."""
        index = (end - 1) // BLOCK
        if self._turn.locked() or (_place(item, index - 1) not in self._blocks if index else end < BLOCK // 4):
            return
        for further in range(index + 1, min(index + 1 + AHEAD, -(-item.size // BLOCK))):
            if _place(item, further) not in self._blocks:
                self._fetch(item, further)

    def _fetch(self, item: Item, index: int) -> asyncio.Task[bytes]:
        place = _place(item, index)
        task = self._blocks.get(place)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            start = index * BLOCK
            length = min(BLOCK, item.size - start)
            task = asyncio.get_running_loop().create_task(self._get(item.key, start, length))
            task.add_done_callback(_seen)
            self._blocks[place] = task
        self._blocks.move_to_end(place)
        if len(self._blocks) > KEPT:
            here = [place for place, task in self._blocks.items() if task.done()]
            for old in here[: max(0, len(here) - KEPT)]:
                del self._blocks[old]
        return task

    async def _get(self, key: str, start: int, length: int) -> bytes:
        async with self._turn:
            return await self._remote.read(key, start, length)


def _seen(task: asyncio.Task[bytes]) -> None:
    """One that was fetched ahead has nobody who asks how it went."""
    if not task.cancelled():
        task.exception()


def _place(item: Item, index: int) -> Place:
    return item.key, version_of(item), index


def version_of(item: Item) -> str:
    return item.etag or f"{item.modified.timestamp()}/{item.size}"


def _cut(block: bytes, index: int, offset: int, end: int) -> memoryview:
    start = index * BLOCK
    return memoryview(block)[max(0, offset - start) : end - start]
