"""One piece of code on its way through a context: run, heard, and stopped when it takes too long or nobody listens."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skerry.models import CodeError, CodeEvent
from skerry.portal.clock import Clock
from skerry.runtime.interpreter.executor import Executor
from skerry.runtime.interpreter.transcript import Emit, Live, Transcript

GRACE = 2.0
"""Seconds that code has to heed an interrupt before it is killed."""


@dataclass(frozen=True, slots=True)
class Outcome:
    error: CodeError | None
    timed_out: bool
    count: int | None
    modules: list[str]


class Run:
    def __init__(
        self, code: str, env: Mapping[str, str | None], timeout: float | None, emit: Emit, live: Live | None = None
    ) -> None:
        self._code = code
        self._env = env
        self._seconds = None if timeout is None else timeout / 1000
        self._to = emit
        self._live = live
        self._left: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def left(self) -> bool:
        return self._left.done()

    def leave(self) -> None:
        """Nobody listens any more: if the code runs already, it is interrupted."""
        if not self._left.done():
            self._left.set_result(None)
        if self._live is not None:
            self._live.release()

    def emit(self, event: CodeEvent, size: int = 0) -> None:
        if not self._left.done():
            self._to(event, size)

    async def follow(self, executor: Executor, transcript: Transcript, clock: Clock) -> Outcome | None:
        """What came of it; None when the process had ended before it took the code."""
        running = asyncio.ensure_future(executor.run(self._code, self._env, transcript))
        timed_out = killed = False
        if self._live is not None:
            self._live.attach(executor)
        try:
            waits: set[asyncio.Future[Any]] = {running, self._left}
            with contextlib.suppress(TimeoutError):
                async with clock.timeout(self._seconds):
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                timed_out = not self._left.done()
                killed = await self._stop(executor, running)
            done = await running
        finally:
            running.cancel()
            if self._live is not None:
                self._live.release()
        transcript.close()
        if done is None and not executor.taken and not killed:
            return None
        error = transcript.error
        if timed_out:
            error = self._timeout(killed, error)
        elif done is None:
            if executor.lost is not None:
                raise executor.lost
            error = _death(executor.ended.result())
        return _outcome(error, timed_out, done or {})

    async def _stop(self, executor: Executor, running: asyncio.Future[Any]) -> bool:
        """Interrupt it, and kill it if it does not heed that; whether it came to the latter."""
        if self._live is not None:
            self._live.release()  # it may be waiting for a slow reader
        await executor.interrupt(GRACE)
        await asyncio.wait({running}, timeout=0.1)
        if running.done():
            return False
        await executor.kill("it was killed, because it did not heed an interrupt")
        return True

    def _timeout(self, killed: bool, found: CodeError | None) -> CodeError:
        """The error of a run that took too long, with the place where the interrupt found it."""
        said = (
            "did not heed the interrupt and was killed. The state of the context is gone; the next run starts afresh."
            if killed
            else "was interrupted. The context keeps its state."
        )
        return CodeError(
            name="TimeoutError",
            message=f"The code ran longer than the {self._seconds:g} seconds it was given and {said}",
            traceback=[] if found is None else found.traceback,
            line_number=None if found is None else found.line_number,
        )


def _death(why: str) -> CodeError:
    return CodeError(
        name="ContextDied",
        message=f"The context ended while the code ran: {why}. Its state is gone; the next run starts afresh.",
    )


def _outcome(error: CodeError | None, timed_out: bool, done: Mapping[str, Any]) -> Outcome:
    """From the last message of an executor, which may say anything."""
    count, modules = done.get("count"), done.get("modules")
    named = [name for name in modules[:16] if isinstance(name, str)] if isinstance(modules, list) else []
    return Outcome(error, timed_out, count if type(count) is int else None, named)
