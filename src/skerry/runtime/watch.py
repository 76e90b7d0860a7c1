"""Watching files: as a stream of events, or as the question what changed since a version."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

from skerry.errors import FilesystemError, InvalidRequestError, RequestTimeoutError, SkerryError
from skerry.models import ChangesResult, CheckChanges, WatchEvent, WatchRequest
from skerry.portal.contract import Portal
from skerry.runtime.paths import resolve, shown
from skerry.runtime.tool import Tool

EXCLUDED = [".git", "node_modules", ".DS_Store"]
HISTORY = 10_000
JOURNALS = 8
ANSWER_WITHIN = 30.0
OVERFLOW = "Changes came faster than they could be read and some were lost: look at the files again."

_VERSION = re.compile(r"(w[0-9a-f]{8})-(\d{1,18})\Z")
_EVENTS = frozenset(("create", "modify", "delete", "move_from", "move_to", "attrib"))


class Watches:
    def __init__(self, portal: Portal, base: str = "/workspace") -> None:
        self._portal = portal
        self._base = base
        self._streams: set[Tool] = set()
        self._journals: OrderedDict[tuple[Any, ...], Journal] = OrderedDict()
        self._starting = asyncio.Lock()

    async def stream(self, request: WatchRequest) -> AsyncIterator[WatchEvent]:
        """``watching`` once every change from then on will be reported, the changes, and ``stopped`` at the end.

        Lost changes are an ``error`` event, after which the stream goes on.
        """
        path, arguments = self._arguments(request)
        async with Tool(self._portal, "watch", arguments, stdin=True) as run:
            messages = run.lines()
            await _watching(run, messages)
            self._streams.add(run)
            try:
                yield WatchEvent(type="watching", path=path, watch_id=f"watch-{secrets.token_hex(4)}")
                reason = "closed"
                async for message in messages:
                    match message:
                        case {"event": str(kind), "path": str(changed), "dir": bool(directory)} if kind in _EVENTS:
                            yield WatchEvent.model_validate(
                                {
                                    "type": "event",
                                    "event_type": kind,
                                    "path": shown(changed),
                                    "is_directory": directory,
                                }
                            )
                        case {"overflow": True}:
                            yield WatchEvent(type="error", path=path, error=OVERFLOW)
                        case {"stopped": str(reason)}:
                            break
                yield WatchEvent(type="stopped", path=path, reason=shown(reason))
            finally:
                self._streams.discard(run)

    async def check(self, request: CheckChanges) -> ChangesResult:
        """What changed since an earlier answer's version. Without one, the version to ask with from now on."""
        since = None
        if request.since is not None:
            since = _VERSION.match(request.since)
            if since is None:
                raise InvalidRequestError(
                    "since must be a version that an earlier check answered with.", details={"since": request.since}
                )
        journal = await self._journal(request)
        version = f"{journal.name}-{journal.count}"
        if since is None:
            return ChangesResult(status="unchanged", version=version)
        name, count = since[1], int(since[2])
        if name != journal.name or count > journal.count:
            return ChangesResult(status="resync", version=version, reason="restarted")
        if count < journal.forgotten:
            return ChangesResult(status="resync", version=version, reason="expired")
        changed = list(dict.fromkeys(path for number, path in journal.changes if number > count))
        return ChangesResult(status="changed" if changed else "unchanged", version=version, changed=changed)

    async def close(self) -> None:
        for run in list(self._streams):
            await run.kill()
        async with self._starting:
            while self._journals:
                _, journal = self._journals.popitem()
                await journal.close()

    def _arguments(self, request: WatchRequest) -> tuple[str, dict[str, Any]]:
        path = resolve(request.path, self._base) if request.path != "/workspace" else self._base
        for pattern in [*(request.include or ()), *(request.exclude or ())]:
            if not pattern or "\0" in pattern or len(pattern) > 1000:
                raise InvalidRequestError("A pattern has between 1 and 1000 characters.", details={"pattern": pattern})
        exclude = EXCLUDED if request.exclude is None else request.exclude
        return path, {"path": path, "recursive": request.recursive, "include": request.include, "exclude": exclude}

    async def _journal(self, request: CheckChanges) -> Journal:
        """The journal of these files, up to date with everything that has happened in them by now."""
        path, arguments = self._arguments(request)
        include = None if request.include is None else tuple(request.include)
        key = (path, request.recursive, include, tuple(arguments["exclude"]))
        async with self._starting:
            journal = self._journals.pop(key, None)
            if journal is not None:
                if await journal.catch_up():
                    self._journals[key] = journal
                    return journal
                await journal.close()
            while len(self._journals) >= JOURNALS:
                _, oldest = self._journals.popitem(last=False)
                await oldest.close()
            journal = Journal()
            try:
                await journal.open(Tool(self._portal, "watch", arguments, stdin=True))
            except BaseException:
                await journal.close()
                raise
            self._journals[key] = journal
            return journal


class Journal:
    """The latest changes, numbered. A new journal has a new name, so that its versions are not taken for older ones."""

    def __init__(self) -> None:
        self.name = f"w{secrets.token_hex(4)}"
        self.count = 0
        self.forgotten = 0
        self.changes: deque[tuple[int, str]] = deque()
        self._stack = AsyncExitStack()
        self._run: Tool | None = None
        self._reader: asyncio.Task[None] | None = None
        self._syncs = 0
        self._answers: dict[int, asyncio.Future[bool]] = {}

    async def open(self, run: Tool) -> None:
        self._run = await self._stack.enter_async_context(run)
        messages = run.lines()
        await _watching(run, messages)
        self._reader = asyncio.create_task(self._read(messages))

    async def close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        await self._stack.aclose()

    async def catch_up(self) -> bool:
        """Wait for what had happened by now; false when this journal has ended."""
        if self._run is None or self._reader is None or self._reader.done():
            return False
        self._syncs += 1
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._answers[self._syncs] = answer
        try:
            async with self._run.clock.timeout(ANSWER_WITHIN):
                await self._run.write(b"sync %d\n" % self._syncs)
                return await answer
        except BrokenPipeError:
            return False
        except TimeoutError:
            raise RequestTimeoutError("The watcher inside the sandbox did not answer in time.") from None
        finally:
            self._answers.pop(self._syncs, None)

    async def _read(self, messages: AsyncIterator[Any]) -> None:
        try:
            async for message in messages:
                match message:
                    case {"event": str(), "path": str(path)}:
                        self._note(shown(path))
                    case {"overflow": True}:
                        self.count += 1
                        self.forgotten = self.count
                        self.changes.clear()
                    case {"sync": int(number)} if number in self._answers:
                        self._answers[number].set_result(True)
                    case {"stopped": _}:
                        return
        except (OSError, SkerryError):
            # The tool broke; whoever asks next gets a new journal and is told to look at everything again.
            return
        finally:
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_result(False)

    def _note(self, path: str) -> None:
        self.count += 1
        self.changes.append((self.count, path))
        if len(self.changes) > HISTORY:
            self.forgotten, _ = self.changes.popleft()


async def _watching(run: Tool, messages: AsyncIterator[Any]) -> None:
    first = await anext(messages, None)
    if first is None:
        await run.finish()
    if first != {"watching": True}:
        raise FilesystemError("Skerry's tool inside the sandbox did not begin to watch.")
