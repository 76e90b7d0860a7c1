"""The conversation with the kernel about one mount: reads requests, sends answers, on a thread of its own.

Nothing here runs on the server's event loop, and nothing of a request is believed before it was checked: what a sandbox
does to its files decides what arrives.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import structlog
import uvloop

from skerry.storage.fuse import protocol
from skerry.storage.fuse.filesystem import Buffers, FileSystem
from skerry.storage.fuse.protocol import LARGEST_REQUEST, Opcode, Request

MOST_AT_ONCE = 96
"""Requests that are being answered; more wait in the kernel."""
BACKGROUND = 48
TURN = 32
TRIM_EVERY = 0.5
_GONE = (errno.ENODEV, errno.ENOTCONN, errno.EBADF, errno.ECONNABORTED)
# What may be given up when a program is interrupted: nothing that changes the bucket.
_HARMLESS = frozenset({Opcode.LOOKUP, Opcode.GETATTR, Opcode.OPEN, Opcode.READ, Opcode.OPENDIR})

T = TypeVar("T")
log = structlog.get_logger(__name__)


class Session:
    """Owns the descriptor. ``ended`` is called, on the session's thread, when the kernel has let go of the mount."""

    def __init__(self, fd: int, make: Callable[[], FileSystem], ended: Callable[[], None] | None = None) -> None:
        self._fd = fd
        self._make = make
        self._ended = ended
        self._buffer = bytearray(LARGEST_REQUEST)
        self._view = memoryview(self._buffer)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._harmless: set[int] = set()
        self._paused = self._ending = False
        self._trimming: asyncio.Future[None] | None = None
        self._trim_again = 0.0
        self._finished: asyncio.Event
        self._loop: asyncio.AbstractEventLoop
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="skerry-mount", daemon=True)
        self.files: FileSystem

    def start(self) -> None:
        self._thread.start()
        self._ready.wait()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def abort(self) -> None:
        """Let go of the mount: whoever waits for it inside gets an error at once."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._finish)

    async def call(self, work: Callable[[FileSystem], Coroutine[Any, Any, T]]) -> T:
        """Do something with the file system, from another thread's event loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work(self.files), self._loop))

    async def join(self) -> None:
        await asyncio.to_thread(self._thread.join)

    # -- on the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._finished = asyncio.Event()
        self.files = self._make()
        self._loop.add_reader(self._fd, self._readable)
        self._ready.set()
        try:
            await self._finished.wait()
        finally:
            # What changes the bucket is not left half done; it ends in bounded time.
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
            await self.files.close()
            if self._ended is not None:
                self._ended()

    def _finish(self) -> None:
        if self._fd < 0 or self._ending:
            return
        self._ending = True
        for unique in self._harmless:
            self._tasks[unique].cancel()
        if self._trimming is None:
            self._close()

    def _close(self) -> None:
        self._pause()
        os.close(self._fd)
        self._fd = -1
        self._finished.set()

    # -- asking the kernel to forget -----------------------------------------------------------------------------------

    def _trim(self) -> None:
        if self._trimming is not None or self._ending or self._loop.time() < self._trim_again:
            return
        if names := self.files.superfluous():
            self._trim_again = self._loop.time() + TRIM_EVERY
            # On a thread: the kernel may have to wait for a directory that somebody holds who waits for us.
            messages = [protocol.forget_name(*name) for name in names]
            self._trimming = self._loop.run_in_executor(None, _send_all, self._fd, messages)
            self._trimming.add_done_callback(self._trimmed)

    def _trimmed(self, _: object) -> None:
        self._trimming = None
        if self._ending:  # until now requests were read and refused, so that nobody kept the other thread waiting
            self._close()

    def _readable(self) -> None:
        for _ in range(TURN):
            if self._fd < 0 or self._paused:
                return
            try:
                size = os.readv(self._fd, [self._buffer])
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                if error.errno == errno.ENOENT:
                    continue  # it was interrupted before we could read it
                if error.errno not in _GONE:
                    log.error("mount failed", error=str(error))
                return self._finish()
            self._receive(self._view[:size])
        self._trim()

    def _receive(self, data: memoryview) -> None:
        try:
            request = protocol.parse(data)
        except protocol.BadRequest:
            log.error("mount failed", error="the kernel sent what is no request")
            return self._finish()
        if self._ending:
            return self._fail(request.unique, OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN)))
        if request.opcode != Opcode.WRITE:
            # The buffer is used again, and these may be looked at later.
            request.body = memoryview(bytes(request.body))
        try:
            if request.opcode == Opcode.INIT:
                return self._init(request)
            if request.opcode == Opcode.INTERRUPT:
                return self._interrupt(request)
            if request.opcode == Opcode.DESTROY:
                return self._send(request.unique, ())
            answer = self.files.answer(request)
        except OSError as error:
            return self._fail(request.unique, error)
        if isinstance(answer, Coroutine):
            self._later(request, answer)
        elif answer is not None:
            self._send(request.unique, answer)

    def _init(self, request: Request) -> None:
        major, minor, readahead, flags = protocol.init(request.body)
        if major != protocol.MAJOR or minor < protocol.OLDEST_MINOR:
            raise OSError(errno.EPROTO, os.strerror(errno.EPROTO))
        self._send(request.unique, [protocol.init_out(minor, readahead, flags, BACKGROUND)])

    def _interrupt(self, request: Request) -> None:
        unique = protocol.number(request.body)
        if unique in self._harmless:
            self._tasks[unique].cancel()

    def _later(self, request: Request, work: Coroutine[Any, Any, Buffers]) -> None:
        unique = request.unique
        task = self._loop.create_task(self._answer(unique, work))
        self._tasks[unique] = task
        if request.opcode in _HARMLESS:
            self._harmless.add(unique)
        task.add_done_callback(lambda _: self._answered(unique, task.cancelled()))
        task.add_done_callback(lambda _: work.close())
        if len(self._tasks) >= MOST_AT_ONCE:
            self._pause()

    async def _answer(self, unique: int, work: Coroutine[Any, Any, Buffers]) -> None:
        try:
            answer = await work
        except OSError as error:
            self._fail(unique, error)
        except asyncio.CancelledError:
            self._fail(unique, OSError(errno.EINTR, os.strerror(errno.EINTR)))
        except Exception:
            log.exception("mount failed to answer")
            self._fail(unique, OSError(errno.EIO, os.strerror(errno.EIO)))
        else:
            self._send(unique, answer)

    def _answered(self, unique: int, unbegun: bool) -> None:
        self._tasks.pop(unique, None)
        self._harmless.discard(unique)
        if unbegun:  # interrupted in the very turn in which it came: whoever asked waits for an answer all the same
            self._fail(unique, OSError(errno.EINTR, os.strerror(errno.EINTR)))
        if self._paused and self._fd >= 0 and len(self._tasks) < MOST_AT_ONCE // 2:
            self._paused = False
            self._loop.add_reader(self._fd, self._readable)

    def _pause(self) -> None:
        if not self._paused:
            self._paused = True
            self._loop.remove_reader(self._fd)

    def _fail(self, unique: int, error: OSError) -> None:
        self._write([protocol.failure(unique, error.errno or errno.EIO)])

    def _send(self, unique: int, answer: Buffers) -> None:
        self._write([protocol.reply(unique, sum(map(len, answer))), *answer])

    def _write(self, buffers: list[bytes | memoryview]) -> None:
        if self._fd < 0:
            return
        try:
            os.writev(self._fd, buffers)
        except OSError as error:
            if error.errno in _GONE:
                self._finish()
            elif error.errno not in (errno.ENOENT, errno.EAGAIN):
                # ENOENT: whoever asked has been killed meanwhile.
                log.error("mount could not answer", error=str(error))


def _send_all(fd: int, messages: list[bytes]) -> None:
    for message in messages:
        try:
            os.write(fd, message)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EBUSY):
                return
