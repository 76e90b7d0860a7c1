"""Cap'n Web, the server's side: calls, promises, streams and callbacks as JSON arrays on a WebSocket.

What one side *pushes*, the other numbers from 1 upwards; what it hands over as an argument it numbers itself, from -1
downwards. 0 is the main object.

    ["push", expression]        evaluate it; the next number is its name
    ["pull", number]            say what became of it: ["resolve" | "reject", number, expression]
    ["release", number, count]  it is not needed any more
    ["pipe"]                    a stream begins; the next number is its writable end, ["readable", number] the other
    ["stream", expression]      as push, pull and release in one: the writes to such a stream
    ["abort", expression]       nothing can go on

An expression is JSON in which an array is written ``[[…]]``, because a bare one is special: ``["pipeline", number,
path, arguments]`` is a call, ``["bytes", base64]`` and the like are values that JSON does not have.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any, Final, cast

from starlette.websockets import WebSocket, WebSocketDisconnect

from skerry.server.cloudflare.line import Line

WINDOW = 8
"""Pieces of a stream that the other side has not taken yet."""
QUEUED = 16
MANY = 10_000
DEEPEST = 64


class Undefined:
    """JavaScript's other nothing."""

    def __repr__(self) -> str:
        return "undefined"


UNDEFINED: Final = Undefined()


class RemoteError(Exception):
    """What a call fails with, as the other side sees it: a message, and properties beside it."""

    def __init__(self, message: str, **properties: Any) -> None:
        super().__init__(message)
        self.message, self.properties = message, properties


class BadMessage(Exception):
    pass


class Bytes:
    """A stream of bytes that is sent as it comes. What it holds is let go when it has been sent, or never will be."""

    def __init__(self, chunks: AsyncIterator[bytes], held: AsyncExitStack) -> None:
        self.chunks = chunks
        self.is_asked_for = False
        self._held = held

    async def close(self) -> None:
        async with self._held:
            await cast("Any", self.chunks).aclose()


class Pipe:
    """A stream that the other side writes. Each write is answered when there is room for the next."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue(QUEUED)
        self._failed: RemoteError | None = None

    async def call(self, method: str, arguments: Sequence[Any]) -> Any:
        match method, list(arguments):
            case "write", [bytes() as data]:
                await self._queue.put(data)
            case "write", [str() as text]:
                await self._queue.put(text.encode())
            case "close", _:
                await self._queue.put(None)
            case "abort", _:
                self._failed = RemoteError("The stream was broken off.")
                await self._queue.put(None)
            case _:
                raise RemoteError(f"A stream has no method {method!r}.")
        return UNDEFINED

    async def read(self) -> AsyncIterator[bytes]:
        while (data := await self._queue.get()) is not None:
            yield data
        if self._failed is not None:
            raise self._failed


class Callback:
    """A function of the other side's."""

    def __init__(self, session: Session, number: int) -> None:
        self._session, self._number = session, number

    async def __call__(self, *arguments: Any) -> Any:
        return await self._session.call(self._number, [], arguments)


Main = Callable[[tuple[str, ...], list[Any]], Awaitable[Any]]


class Session:
    """One connection. ``main`` is asked for every call of the main object, by the path of its name."""

    def __init__(self, socket: WebSocket, main: Main, failure: Callable[[Exception], RemoteError]) -> None:
        self._main, self._failure = main, failure
        self._theirs: dict[int, asyncio.Task[Any] | Pipe] = {}
        self._next_theirs = 1
        self._ours: dict[int, asyncio.Future[Any]] = {}
        self._next_ours = 1
        self._borrowed: set[int] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._unsent: set[Bytes] = set()
        self._line = Line(socket)

    async def serve(self) -> None:
        try:
            async for text in self._line.messages():
                await self._take(text)
        except WebSocketDisconnect:
            return
        except BadMessage as error:
            with suppress(WebSocketDisconnect):
                await self._line.send(["abort", ["error", "Error", str(error)]])
            await self._line.close()
        finally:
            gone = ConnectionError("the connection has ended")
            for future in self._ours.values():
                if not future.done():
                    future.set_exception(gone)
                    future.exception()
            running = [*self._tasks, *(one for one in self._theirs.values() if isinstance(one, asyncio.Task))]
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            await asyncio.gather(*(stream.close() for stream in self._unsent), return_exceptions=True)

    # -- what comes in -------------------------------------------------------------------------------------------------

    async def _take(self, text: str) -> None:
        try:
            message = json.loads(text)
        except (ValueError, RecursionError):
            raise BadMessage("The message is not JSON.") from None
        match message:
            case ["push", expression]:
                self._begin(expression)
            case ["stream", expression]:
                number = self._begin(expression)
                self._own(self._tell(number, release=True))
            case ["pipe"]:
                self._theirs[self._number()] = Pipe()
            case ["pull", int(number)]:
                self._own(self._tell(number))
            case ["resolve" | "reject" as outcome, int(number), expression]:
                self._settle(outcome, number, expression)
            case ["release", int(number), int()]:
                self._release(number)
            case ["abort", *_]:
                raise WebSocketDisconnect
            case _:
                raise BadMessage("The message is not one of this protocol.")

    def _number(self) -> int:
        if len(self._theirs) >= MANY:
            raise BadMessage("There are too many calls at once.")
        number, self._next_theirs = self._next_theirs, self._next_theirs + 1
        return number

    def _begin(self, expression: Any) -> int:
        number = self._number()
        self._theirs[number] = asyncio.create_task(self._evaluate(expression))
        return number

    async def _evaluate(self, expression: Any) -> Any:
        return await self._value(expression, 0)

    async def _tell(self, number: int, *, release: bool = False) -> None:
        task = self._theirs.get(number)
        if number == 0 or not isinstance(task, asyncio.Task):
            await self._line.send(["reject", number, ["error", "Error", f"There is no promise {number}."]])
            return
        await asyncio.wait([task])
        if task.cancelled():
            answer = ["reject", number, ["error", "Error", "The call was cancelled."]]
        elif (error := task.exception()) is not None:
            answer = ["reject", number, self._error(error)]
        else:
            answer = ["resolve", number, await self._expression(task.result())]
        if release:
            self._release(number)
        await self._line.send(answer)

    def _settle(self, outcome: str, number: int, expression: Any) -> None:
        future = self._ours.pop(number, None)
        if future is None or future.done():
            return
        if outcome == "resolve":
            future.set_result(expression)
        else:
            said = expression[2] if isinstance(expression, list) and len(expression) > 2 else "It failed."
            future.set_exception(RemoteError(str(said)))

    def _release(self, number: int) -> None:
        """A call that nobody waits for any more is cancelled; a pipe is only a name, and its stream goes on."""
        held = self._theirs.pop(number, None)
        if not isinstance(held, asyncio.Task):
            return
        if not held.done():
            held.cancel()
        elif not held.cancelled() and held.exception() is None:
            for stream in _streams(held.result()):
                if not stream.is_asked_for:
                    self._unsent.discard(stream)
                    self._own(stream.close())

    # -- expressions ---------------------------------------------------------------------------------------------------

    async def _value(self, expression: Any, depth: int) -> Any:
        if depth > DEEPEST:
            raise RemoteError("The arguments are nested too deeply.")
        if isinstance(expression, dict):
            return {str(key): await self._value(value, depth + 1) for key, value in expression.items()}
        match expression:
            case [list(items)]:
                return [await self._value(item, depth + 1) for item in items]
            case ["undefined"]:
                return UNDEFINED
            case ["null"]:
                return None
            case ["bytes", str(text), *_]:
                return _decoded(text)
            case ["date", int() | float() as moment]:
                return moment
            case ["bigint", str(digits)] if digits.lstrip("-").isdigit():
                return int(digits)
            case ["nan"] | ["inf"] | ["-inf"]:
                return float(expression[0])
            case ["error", str(), str(message), *_]:
                return RemoteError(message)
            case ["export" | "promise", int(number)]:
                self._borrowed.add(number)
                return Callback(self, number)
            case ["readable", int(number)]:
                pipe = self._theirs.get(number)
                if not isinstance(pipe, Pipe):
                    raise RemoteError(f"{number} is no stream.")
                return pipe.read()
            case ["pipeline" | "import", int(number), *rest]:
                return await self._called(number, rest, depth)
            case list():
                raise RemoteError("The expression is not understood.")
        return expression

    async def _called(self, number: int, rest: list[Any], depth: int) -> Any:
        path: list[Any] = rest[0] if rest and isinstance(rest[0], list) else []
        arguments = rest[1] if len(rest) > 1 and isinstance(rest[1], list) else None
        values = None if arguments is None else [await self._value(item, depth + 1) for item in arguments]
        if number == 0:
            if values is None:
                raise RemoteError("Only methods can be asked for.")
            given = await self._main(tuple(str(part) for part in path), values)
            self._unsent.update(_streams(given))
            return given
        target = self._theirs.get(number)
        if isinstance(target, Pipe):
            return await target.call(str(path[0]) if path else "", values or [])
        if target is None or target is asyncio.current_task():
            raise RemoteError(f"There is no {number}.")
        found = await asyncio.shield(target)
        for part in path:
            found = found.get(part, UNDEFINED) if isinstance(found, dict) else UNDEFINED
        if values is not None:
            raise RemoteError("What came back has no methods.")
        return found

    async def _expression(self, value: Any) -> Any:
        match value:
            case Undefined():
                return ["undefined"]
            case bytes():
                return ["bytes", base64.b64encode(value).decode()]
            case Bytes():
                return await self._piped(value)
            case dict():
                return {key: await self._expression(one) for key, one in value.items()}
            case list() | tuple():
                return [[await self._expression(one) for one in value]]
            case float() if not math.isfinite(value):
                return ["nan"] if math.isnan(value) else ["inf" if value > 0 else "-inf"]
        return value

    def _error(self, error: BaseException) -> list[Any]:
        known = error if isinstance(error, RemoteError) else self._failure(cast("Exception", error))
        return ["error", "Error", known.message, None, *([known.properties] if known.properties else [])]

    # -- what goes out -------------------------------------------------------------------------------------------------

    async def call(self, target: int, path: list[str], arguments: Sequence[Any]) -> Any:
        """Call something of the other side's and wait for what it gives."""
        written = [await self._expression(one) for one in arguments]
        number, future = await self._push(["push", ["pipeline", target, path, written]])
        await self._line.send(["pull", number])
        try:
            return await self._value(await future, 0)
        finally:
            await self._line.send(["release", number, 1])

    async def give_back(self) -> None:
        """What the other side lent for a call, and nobody uses any more."""
        for number in self._borrowed:
            await self._line.send(["release", number, 1])
        self._borrowed.clear()

    async def _piped(self, stream: Bytes) -> Any:
        stream.is_asked_for = True
        number, _ = await self._push(["pipe"], answered=False)
        self._own(self._pour(number, stream))
        return ["readable", number]

    async def _pour(self, number: int, stream: Bytes) -> None:
        waiting: list[asyncio.Future[Any]] = []
        last: list[Any] = ["close", []]
        try:
            async for chunk in stream.chunks:
                piece = ["bytes", base64.b64encode(chunk).decode()]
                _, taken = await self._push(["stream", ["pipeline", number, ["write"], [piece]]])
                waiting.append(taken)
                if len(waiting) >= WINDOW:
                    await waiting.pop(0)
            for taken in waiting:
                await taken
        except (RemoteError, ConnectionError):
            last = []  # whoever read it has stopped
        except Exception as error:  # noqa: BLE001
            last = ["abort", [self._error(error)]]
        finally:
            self._unsent.discard(stream)
            await stream.close()
            for taken in waiting:
                taken.add_done_callback(lambda done: done.cancelled() or done.exception())
            if last:
                _, done = await self._push(["stream", ["pipeline", number, [last[0]], last[1]]])
                done.add_done_callback(lambda one: one.cancelled() or one.exception())
            await self._line.send(["release", number, 1])

    async def _push(self, message: list[Any], *, answered: bool = True) -> tuple[int, asyncio.Future[Any]]:
        """Numbers are counted by both sides, so the order of counting must be the order of sending."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        async with self._line.turn:
            number, self._next_ours = self._next_ours, self._next_ours + 1
            if answered:
                self._ours[number] = future
            await self._line.write(message)
        return number, future

    def _own(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # the connection has ended; there is nobody to tell


def _streams(given: Any) -> list[Bytes]:
    """Those that a call gave: itself, or beside other facts."""
    values = given.values() if isinstance(given, dict) else [given]
    return [value for value in values if isinstance(value, Bytes)]


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise RemoteError("The bytes are not base64.") from None
