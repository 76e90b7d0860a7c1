"""The changes between two states of a sandbox's files, asked for from the event loop."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import threading
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from skerry.models import ChangeKind, LayerChange
from skerry.providers.local.changes import list_changes, list_deleted, write_tar
from skerry.providers.local.idmap import IdMap
from skerry.providers.local.mapped import run_mapped
from skerry.runtime.output import pipe, read_some


class Difference:
    def __init__(self, idmap: IdMap, layers: list[dict[str, Any]], kin: bool, descriptors: Sequence[int] = ()) -> None:
        self._idmap = idmap
        self._descriptors = tuple(descriptors)
        self._layers = layers
        self._kin = kin

    async def list_(self, limit: int) -> tuple[list[LayerChange], bool]:
        arguments = (self._layers, self._kin, limit)
        found = await asyncio.to_thread(
            run_mapped, self._idmap, list_changes, *arguments, descriptors=self._descriptors, override=True
        )
        return [_described(*change) for change in found["changes"]], found["truncated"]

    async def deleted(self) -> list[str]:
        found: list[str] = await asyncio.to_thread(
            run_mapped, self._idmap, list_deleted, self._layers, descriptors=self._descriptors, override=True
        )
        return found

    async def tar(self) -> AsyncGenerator[bytes, None]:
        """In pieces, as they are made; whoever stops reading ends it."""
        ours, theirs = pipe("read")
        loop = asyncio.get_running_loop()
        done: asyncio.Future[BaseException | None] = loop.create_future()
        # A thread of its own: it lasts as long as the reader takes, and the shared ones are few.
        worker = threading.Thread(target=self._write, args=(theirs, loop, done), daemon=True)
        worker.start()
        try:
            while chunk := await read_some(ours):
                yield chunk
        finally:
            os.close(ours)
            failure = await asyncio.shield(done)
        if failure is not None:
            raise failure

    def _write(self, out: int, loop: asyncio.AbstractEventLoop, done: asyncio.Future[BaseException | None]) -> None:
        failure: BaseException | None = None
        try:
            run_mapped(
                self._idmap,
                write_tar,
                self._layers,
                self._kin,
                out,
                descriptors=(out, *self._descriptors),
                override=True,
            )
        except BrokenPipeError:
            pass  # the reader has left
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            failure = error
        finally:
            os.close(out)
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits
            loop.call_soon_threadsafe(done.set_result, failure)


def _described(path: str, kind: str, type: Any, size: int) -> LayerChange:
    raw = path.encode("utf-8", "surrogateescape")
    try:
        raw.decode()
    except UnicodeDecodeError:
        shown = raw.decode(errors="replace")
        return LayerChange(
            path=shown, change=ChangeKind(kind), type=type, size=size, raw_path=base64.b64encode(raw).decode()
        )
    return LayerChange(path=path, change=ChangeKind(kind), type=type, size=size)
