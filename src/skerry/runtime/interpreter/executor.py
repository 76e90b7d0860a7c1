"""One interpreter process inside the sandbox, seen from outside: it is given code and says what came of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
from collections.abc import Awaitable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from skerry.errors import SandboxLostError
from skerry.portal.contract import Tree
from skerry.runtime.capture import Pump
from skerry.runtime.flow import Flow
from skerry.runtime.interpreter.frames import Frames, Nonsense, encode
from skerry.runtime.output import pipe, write_all

IDLE_OUTPUT = 64 * 1024
AGAIN = 0.2
"""Seconds between two interrupts of the same run."""
LAST_WORDS = 1.0
"""Seconds to wait for the exit status of a process whose pipe is closed already."""

Stream = Literal["stdout", "stderr"]
STREAMS: tuple[Stream, ...] = ("stdout", "stderr")


class Order:
    """Output that waits for its place among messages.

    They come through different pipes. A result says how much its process had written before it (``at``, for stdout and
    stderr), so that what was printed after it is passed on after it. What subprocesses write is not in that number.
    """

    def __init__(self) -> None:
        self._waiting: dict[Stream, bytes] = dict.fromkeys(STREAMS, b"")
        self._passed: dict[Stream, int] = dict.fromkeys(STREAMS, 0)

    def add(self, stream: Stream, data: bytes) -> None:
        self._waiting[stream] += data

    def begin(self, at: object) -> None:
        """All that was written so far has been passed on."""
        for stream in STREAMS:
            self._passed[stream] = _count(stream, at) or 0

    def take(self, stream: Stream, at: object) -> bytes:
        data = self._waiting[stream]
        count = _count(stream, at)
        if count is not None:
            data = data[: max(0, count - self._passed[stream])]
        self._waiting[stream] = self._waiting[stream][len(data) :]
        self._passed[stream] += len(data)
        return data


def _count(stream: Stream, at: object) -> int | None:
    """From what an executor said, which may be anything."""
    if not isinstance(at, list) or len(at) != len(STREAMS):
        return None
    count = at[STREAMS.index(stream)]
    return count if type(count) is int else None


class Listener(Protocol):
    """Who hears what a run says."""

    def output(self, stream: Stream, data: bytes) -> None: ...

    def message(self, message: dict[str, Any], size: int) -> None: ...


@dataclass(slots=True)
class Pipes:
    """The descriptors of an executor: ours, and the ones that become its 1, 2, 3, 4 (and 5)."""

    ours: dict[str, int]
    theirs: list[int]

    @classmethod
    def open(cls, *, interrupts: bool) -> Pipes:
        made = cls({}, [])
        try:
            for name in ("stdout", "stderr"):
                made.ours[name], writer = pipe("read")
                made.theirs.append(writer)
            reader, made.ours["requests"] = pipe("write")
            made.theirs.append(reader)
            made.ours["replies"], writer = pipe("read")
            made.theirs.append(writer)
            if interrupts:
                reader, made.ours["interrupts"] = pipe("write", size=4096)
                made.theirs.append(reader)
        except BaseException:
            made.close()
            raise
        return made

    def close_theirs(self) -> None:
        while self.theirs:
            os.close(self.theirs.pop())

    def close(self) -> None:
        self.close_theirs()
        while self.ours:
            os.close(self.ours.popitem()[1])


class Executor:
    """Owns the pipes. ``ended`` is set with the cause once the process is gone, whoever ended it."""

    def __init__(self, tree: Tree, pipes: Pipes, exited: Awaitable[int]) -> None:
        self.pid = tree.pid
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.failure: str | None = None
        """Why it could not begin, where it said so itself."""
        self.taken = False
        """Whether it has begun with the code it was last given."""
        self.lost: SandboxLostError | None = None
        """Set when it ended because the whole sandbox did."""
        self._tree = tree
        self._requests = pipes.ours.pop("requests")
        self._interrupts = pipes.ours.pop("interrupts", -1)
        self._frames = Frames(self._message)
        self._listener: Listener | None = None
        self._finished: asyncio.Future[dict[str, Any] | None] | None = None
        self._runs = 0
        self._unheard: dict[Stream, bytes] = dict.fromkeys(STREAMS, b"")
        self._order = Order()
        self._gathering = False
        self._why: str | None = None
        self._closed = False
        self._outputs = [
            Pump(pipes.ours.pop("stdout"), lambda data: self._output("stdout", data)),
            Pump(pipes.ours.pop("stderr"), lambda data: self._output("stderr", data)),
        ]
        self._replies = Pump(pipes.ours.pop("replies"), self._reply)
        self._exit = asyncio.ensure_future(self._ending(exited))

    async def gone(self) -> bool:
        """Whether it has ended, also when the news of it is still on the way."""
        poll = select.poll()
        poll.register(self._requests, 0)
        if not self.ended.done() and poll.poll(0):
            await asyncio.wait({self.ended}, timeout=2 * LAST_WORDS)
        return self.ended.done()

    async def run(self, code: str, env: Mapping[str, str | None], listener: Listener) -> dict[str, Any] | None:
        """Run code to its end and return its ``done`` message; None when the process ended first.

        Cancelling leaves the code running: the caller interrupts and waits, or kills.
        """
        self._runs += 1
        self.taken = False
        self._listener = listener
        self._finished = asyncio.get_running_loop().create_future()
        for stream, data in self._unheard.items():
            if data:
                listener.output(stream, data)
        self._unheard = dict.fromkeys(STREAMS, b"")
        try:
            with contextlib.suppress(BrokenPipeError):  # it ended; that is waited for below
                await write_all(self._requests, encode({"run": self._runs, "code": code, "env": dict(env)}))
            if self.ended.done() and not self._finished.done():
                return None
            return await self._finished
        finally:
            self._listener = self._finished = None

    def within(self, flow: Flow | None) -> None:
        """Let what it says take no more of the server's time than this."""
        for pump in (*self._outputs, self._replies):
            pump.flow = flow

    async def begin(self, cwd: str, env: Mapping[str, str]) -> None:
        """Make a process that was started in advance the one of a context; ``begun`` answers."""
        with contextlib.suppress(BrokenPipeError):
            await write_all(self._requests, encode({"begin": True, "cwd": cwd, "env": dict(env)}))

    def last_words(self) -> str:
        """What it wrote to stderr that no run has heard, for a sentence about its end."""
        text = self._unheard["stderr"].decode(errors="replace").strip()
        return f" ({text[-500:]})" if text else ""

    def pause(self) -> None:
        """Read no more of what it says, so that it waits; until ``resume``."""
        for pump in (*self._outputs, self._replies):
            pump.pause()

    def resume(self) -> None:
        for pump in (*self._outputs, self._replies):
            pump.resume()

    async def interrupt(self, patience: float) -> None:
        """Ask it to stop what it runs, until it has or ``patience`` (in seconds) is over."""
        finished = self._finished
        if finished is None:
            return
        # Before it has begun with the code it takes no interrupt for meant. And one that comes just before a call that
        # blocks is noticed only after it, hence again and again; it counts as one.
        for _ in range(max(1, round(patience / AGAIN))):
            if self.taken:
                await self._signal()
            await asyncio.wait({finished}, timeout=AGAIN)
            if finished.done() or self._finished is not finished:
                return

    async def _signal(self) -> None:
        if self._interrupts >= 0:
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                os.write(self._interrupts, b"!")
        else:
            with contextlib.suppress(SandboxLostError):
                await self._tree.kill(signal.SIGINT, tree=False)

    async def kill(self, why: str | None = None) -> None:
        """End it with all that it started; ``why`` becomes the cause others are told."""
        self._why = self._why or why
        if not self.ended.done():
            with contextlib.suppress(SandboxLostError, OSError):
                await self._tree.kill(signal.SIGKILL)
            await asyncio.wait({self.ended}, timeout=LAST_WORDS)
        await self.close()

    async def close(self) -> None:
        """Let go of the pipes; the process, if there still is one, ends by that."""
        if self._closed:
            return
        self._closed = True
        self._exit.cancel()
        for pump in (*self._outputs, self._replies):
            pump.close()
        os.close(self._requests)
        if self._interrupts >= 0:
            os.close(self._interrupts)
        self._end("it was closed")

    # -- what comes from it --------------------------------------------------------------------------------------------

    def _output(self, stream: Stream, data: bytes) -> None:
        self._order.add(stream, data)
        if not self._gathering:
            # Whatever was said before these bytes were written has arrived by now.
            with self._gather():
                self._replies.drain()
            self._emit()

    def _emit(self, at: object = None) -> None:
        """Pass on the output that came before a message, or all of it."""
        for stream in STREAMS:
            data = self._order.take(stream, at)
            if not data:
                continue
            if self._listener is not None:
                self._listener.output(stream, data)
            else:
                # Between two runs: background work of the user's. The next run begins with the end of it.
                self._unheard[stream] = (self._unheard[stream] + data)[-IDLE_OUTPUT:]

    @contextlib.contextmanager
    def _gather(self) -> Iterator[None]:
        """Read pipes without passing anything on yet."""
        before, self._gathering = self._gathering, True
        try:
            yield
        finally:
            self._gathering = before

    def _reply(self, data: bytes) -> None:
        try:
            self._frames.feed(data)
            if not self._gathering:
                self._emit()
        except Nonsense as nonsense:
            self._why = f"it was ended, because it sent {nonsense}"
            self._replies.close()  # which ends it

    def _message(self, message: dict[str, Any], size: int) -> None:
        kind = message["type"]
        with self._gather():
            for pump in self._outputs:
                pump.drain()
        self._emit(message.get("at") if kind in ("started", "result") else None)
        if kind == "started":
            self._order.begin(message.get("at"))
        if kind in ("ready", "begun"):
            if not self.ready.done():
                self.ready.set_result(None)
        elif kind == "failed":
            self.failure = str(message.get("message", ""))[:1000]
        elif self._finished is None or message.get("run") != self._runs:
            return  # an answer to nobody
        elif kind == "started":
            self.taken = True
        elif kind == "done":
            if not self._finished.done():
                self._finished.set_result(message)
        elif kind in ("result", "error"):
            assert self._listener is not None
            self._listener.message(message, size)

    async def _ending(self, exited: Awaitable[int]) -> None:
        status: int | None = None
        gone = asyncio.ensure_future(exited)
        try:
            waits: set[asyncio.Future[Any]] = {gone, self._replies.ended}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({gone}, timeout=LAST_WORDS)
            if gone.done():
                status = gone.result()
            else:
                # Alive and not to be talked to, or an orphan whose end nobody sees.
                await self._tree.kill(signal.SIGKILL)
        except SandboxLostError as lost:
            self.lost = lost
            self._end(lost.message)
            return
        finally:
            gone.cancel()
        for pump in (self._replies, *self._outputs):
            pump.drain()
        self._emit()
        self._end(self._why or cause(status))

    def _end(self, why: str) -> None:
        if not self.ended.done():
            self.ended.set_result(why)
        if self._finished is not None and not self._finished.done():
            self._finished.set_result(None)
        if not self.ready.done():
            self.ready.cancel()


def cause(status: int | None) -> str:
    """In words, why a process ended that nobody asked to."""
    if status is None:
        return "its process closed the connection"
    if status >= 0:
        return f"its process exited with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    meaning = {
        "SIGSEGV": "a segmentation fault, as from a broken library or recursion without end",
        "SIGBUS": "a bus error",
        "SIGKILL": "killed from outside, as the kernel does when memory runs out",
        "SIGABRT": "it aborted, as V8 does when its heap is full",
        "SIGTERM": "asked to end",
        "SIGILL": "an illegal instruction",
        "SIGFPE": "an arithmetic fault",
    }.get(name)
    return f"its process was ended by {name}" + (f" ({meaning})" if meaning else "")
