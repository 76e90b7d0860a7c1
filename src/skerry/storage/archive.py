"""Trees of a sandbox as archives, packed and unpacked by scripts inside; here is this side of the pipe."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from skerry.errors import BackupRefusedError, FilesystemError, InvalidRequestError
from skerry.portal.contract import Portal
from skerry.runtime.paths import shown
from skerry.runtime.tool import Tool

Report = Callable[[int, int], None]
"""Called with files and bytes so far."""


@dataclass
class Summary:
    files: int = 0
    bytes: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)


class Packing:
    """The archive of a directory, to be iterated; ``summary`` is known at its end."""

    def __init__(
        self, portal: Portal, arguments: Mapping[str, Any], report: Report, deleted: Sequence[str] = ()
    ) -> None:
        self._portal = portal
        self._arguments = arguments
        self._deleted = deleted
        self._report = report
        self.summary: Summary | None = None

    async def read(self) -> AsyncIterator[bytes]:
        async with Tool(self._portal, "pack", self._arguments, stdin=True, script="packing") as run:
            listening = asyncio.create_task(self._listen(run))
            try:
                await self._tell(run)
                while data := await run.read(1 << 20):
                    yield data
                last = await listening
            finally:
                listening.cancel()
                await asyncio.gather(listening, return_exceptions=True)
            await run.finish(last)
        if self.summary is None:
            raise FilesystemError("Skerry's tool inside the sandbox did not say what it packed.")

    async def _tell(self, run: Tool) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has failed, and says why
            await run.write(b"".join(os.fsencode(path) + b"\0" for path in self._deleted))
        run.end_input()

    async def _listen(self, run: Tool) -> bytes:
        last = b""
        async for line in run.remarks():
            last = line
            try:
                said = json.loads(line)
                if "summary" in said:
                    self.summary = _summary(said["summary"])
                elif "files" in said:
                    self._report(int(said["files"]), int(said["bytes"]))
            except (ValueError, KeyError, TypeError, RecursionError):
                continue
        return last


class Staging:
    """A place inside to unpack into, and to put in place of something; it is empty at first, and gone at the end."""

    def __init__(self, portal: Portal, target: str, places: Mapping[str, str]) -> None:
        self._portal = portal
        self.target = target
        self.places = dict(places)

    @classmethod
    async def prepare(cls, portal: Portal, target: str, *, machine: bool) -> Staging:
        arguments = {"target": target, "token": secrets.token_hex(6), "machine": machine}
        match await _answer(portal, "prepare", arguments):
            case {"target": str(real), "places": dict(places)} if all(isinstance(p, str) for p in places.values()):
                return cls(portal, real, places)
        raise _nonsense()

    async def fill(self, archive: AsyncIterator[bytes], files: int, size: int, report: Report) -> Summary:
        arguments = {"target": self.target, "places": self.places, "files": files, "size": size}
        async with Tool(self._portal, "stage", arguments, stdin=True, script="unpacking") as run:
            listening = asyncio.create_task(self._listen(run, report))
            try:
                async with aclosing(archive) as chunks:  # type: ignore[type-var]
                    try:
                        async for chunk in chunks:
                            await run.write(chunk)
                    except BrokenPipeError:
                        pass  # it refused the archive, and says why
                    run.end_input()
                summary = await listening
                await run.finish()
            except InvalidRequestError as error:
                raise BackupRefusedError(error.message) from None
            finally:
                listening.cancel()
                await asyncio.gather(listening, return_exceptions=True)
        if summary is None:
            raise _nonsense()
        return summary

    async def _listen(self, run: Tool, report: Report) -> Summary | None:
        async for line in run.lines():
            match line:
                case {"staged": {"files": int(), "bytes": int()} as staged}:
                    return _summary(staged)
                case {"files": int(files), "bytes": int(size)}:
                    report(files, size)
        return None

    async def unsquash(self, archive: str) -> None:
        """Filled from an archive inside, as ``squash`` makes them."""
        arguments = {"target": self.target, "places": self.places, "archive": archive}
        try:
            await _answer(self._portal, "stage", arguments, "squashing")
        except InvalidRequestError as error:
            raise BackupRefusedError(error.message) from None

    async def swap(self) -> None:
        try:
            await _answer(self._portal, "swap", {"target": self.target, "places": self.places})
        except InvalidRequestError as error:
            raise BackupRefusedError(error.message) from None

    async def settle(self) -> None:
        """Whatever was not finished is taken back; nothing of it is left."""
        await _answer(self._portal, "settle", {"target": self.target, "places": self.places})


async def squash(portal: Portal, arguments: Mapping[str, Any]) -> int:
    """A directory as one file inside; how large it is."""
    match await _answer(portal, "squash", arguments, "squashing"):
        case {"size": int(size)}:
            return size
    raise _nonsense()


async def upload(portal: Portal, archive: str, parts: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """Parts of a file inside, each sent from there to an address of its own; what each was called there."""
    tags: dict[int, str] = {}
    arguments = {"archive": archive, "parts": parts}
    async with Tool(portal, "upload", arguments, script="squashing") as run:
        async for line in run.lines():
            match line:
                case {"number": int(number), "tag": str(tag)}:
                    tags[number] = shown(tag)[:1000]
        await run.finish()
    return tags


async def _answer(portal: Portal, op: str, arguments: Mapping[str, Any], script: str = "unpacking") -> Any:
    async with Tool(portal, op, arguments, script=script) as run:
        answers = [line async for line in run.lines()]
        await run.finish()
    if not answers:
        raise _nonsense()
    return answers[0]


def _summary(said: Any) -> Summary:
    counts = {shown(str(what)): int(count) for what, count in dict(said.get("counts") or {}).items()}
    names = {
        shown(str(what)): [shown(str(name))[:1000] for name in list(some)[:20]]
        for what, some in dict(said.get("names") or {}).items()
    }
    return Summary(int(said["files"]), int(said["bytes"]), counts, names)


def _nonsense() -> FilesystemError:
    return FilesystemError("Skerry's tool inside the sandbox did not answer as expected.")
