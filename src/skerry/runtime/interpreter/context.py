"""One context: code runs in it one piece after the other, and what it defines stays."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from skerry.errors import ContextNotFoundError, InterpreterNotReadyError
from skerry.models import CodeContext, CodeError, CodeEvent, Language, now
from skerry.runtime.faults import Met
from skerry.runtime.interpreter.executor import Executor
from skerry.runtime.interpreter.pool import Pool
from skerry.runtime.interpreter.run import Outcome, Run
from skerry.runtime.interpreter.transcript import Emit, Live, Transcript

INTERRUPT = 1.0
"""Seconds an interrupt on request is tried for; unlike a timeout, it does not kill."""


@dataclass(frozen=True, slots=True)
class Remembered:
    """What of a context outlives its process: everything but its state."""

    id: str
    language: Language
    cwd: str
    env: Mapping[str, str]
    timeout: float | None = None
    """Milliseconds."""
    default: bool = False
    created_at: datetime = field(default_factory=now)


class Context:
    def __init__(self, pool: Pool, known: Remembered, *, lost: str | None = None) -> None:
        self.id = known.id
        self.language: Language = known.language
        self._env = known.env
        self._pool = pool
        self._info = CodeContext(
            id=known.id,
            language=known.language,
            cwd=known.cwd,
            timeout=known.timeout,
            default=known.default,
            created_at=known.created_at,
            last_used=known.created_at,
        )
        self._executor: Executor | None = None
        self._turn = asyncio.Lock()
        self._lost = lost
        """Why the state that code may expect is gone; said once, by the next run."""
        self._busy = False
        self._deleted = False
        self._runs: set[asyncio.Task[CodeEvent]] = set()

    def info(self) -> CodeContext:
        executor = self._executor
        ended = self._lost is not None or (executor is not None and executor.ended.done())
        status = "running" if self._busy else "ended" if ended else "idle"
        pid = executor.pid if executor is not None and not executor.ended.done() else None
        return self._info.model_copy(update={"status": status, "pid": pid})

    # -- life ----------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Have its process ready."""
        async with self._turn:
            await self._ready()

    async def _ready(self) -> Executor:
        self._require()
        executor = self._executor
        if executor is not None and await executor.gone():
            if executor.lost is not None:
                raise executor.lost
            self._lost = executor.ended.result()
            await self._drop()
        if self._executor is None:
            self._executor = await self._pool.take(self.language, self._info.cwd, self._env)
            self._info.execution_count = 0
            if self._deleted:
                await self._drop()
                self._require()
        return self._executor

    def _require(self) -> None:
        if self._deleted:
            raise ContextNotFoundError(f"Context {self.id!r} was deleted.", hint="Create another.")

    async def _drop(self, why: str | None = None) -> None:
        executor, self._executor = self._executor, None
        if executor is not None:
            await executor.kill(why)
            self._pool.release(self.language)

    async def restart(self) -> None:
        """A fresh process, and nothing of the old one's state. What runs is ended."""
        if self._executor is not None:
            await self._executor.kill("the context was restarted")
        async with self._turn:
            await self._drop()
            self._lost = None
            await self._ready()

    async def delete(self) -> None:
        self._deleted = True
        await self._drop("the context was deleted")

    async def close(self) -> None:
        """The sandbox is going: let everything go."""
        self._deleted = True
        if self._executor is not None:
            await self._executor.kill("the sandbox is being stopped")
        if self._runs:
            await asyncio.wait(self._runs, timeout=1.0)  # they end by that, and say why
        for run in list(self._runs):
            run.cancel()
        await asyncio.gather(*self._runs, return_exceptions=True)

    async def interrupt(self) -> bool:
        if not self._busy or self._executor is None:
            return False
        await self._executor.interrupt(INTERRUPT)
        return True

    # -- running -------------------------------------------------------------------------------------------------------

    async def run(self, code: str, env: Mapping[str, str | None], timeout: float | None, emit: Emit) -> CodeEvent:
        """Run code once what came before has ended; the ``complete`` event. Cancelling interrupts the code."""
        run, performed = self.begin(code, env, timeout, emit)
        try:
            return await asyncio.shield(performed)
        except asyncio.CancelledError:
            run.leave()
            raise

    def begin(
        self, code: str, env: Mapping[str, str | None], timeout: float | None, emit: Emit, live: Live | None = None
    ) -> tuple[Run, asyncio.Task[CodeEvent]]:
        """The same, for one who listens meanwhile and leaves the run when it wants no more of it."""
        run = Run(code, env, self._info.timeout if timeout is None else timeout, emit, live)
        # A task of its own: when the caller leaves, it still has to stop the code before the next one may run.
        task = asyncio.get_running_loop().create_task(self._perform(run))
        self._runs.add(task)
        task.add_done_callback(self._runs.discard)
        task.add_done_callback(_retrieve)
        return run, task

    async def _perform(self, run: Run) -> CodeEvent:
        async with self._turn:
            if run.left:
                raise asyncio.CancelledError
            began, before = time.perf_counter(), self._pool.faults.count()
            try:
                outcome = await self._attempt(run, first=True)
                if outcome is None:  # its process ended before it took the code
                    outcome = await self._attempt(run, first=False)
            finally:
                self._busy = False
            if outcome is None:
                raise InterpreterNotReadyError(
                    f"Context {self.id!r} ended twice before it could run the code.", details={"retryAfter": 1}
                )
            self._pool.imported(outcome.modules)
            counted = self._info.execution_count + 1 if outcome.count is None else outcome.count
            self._info.execution_count = counted
            if outcome.error is not None:
                error = self._explained(outcome.error, before)
                run.emit(CodeEvent(type="error", error=error), len(error.message))
            complete = CodeEvent(
                type="complete",
                context_id=self.id,
                language=self.language,
                execution_count=counted,
                timed_out=outcome.timed_out,
                duration=round((time.perf_counter() - began) * 1000, 3),
            )
            run.emit(complete)
            return complete

    def _explained(self, error: CodeError, before: Met) -> CodeError:
        """With the limit that the code ran into, if it did."""
        reached = self._pool.faults.blame(before, error.message.encode())
        if reached is None:
            return error
        return error.model_copy(
            update={"limit": reached.limit, "message": f"{error.message.rstrip()} {reached.message}".lstrip()}
        )

    async def _attempt(self, run: Run, *, first: bool) -> Outcome | None:
        executor = await self._ready()
        if first:
            run.emit(CodeEvent(type="start", context_id=self.id, language=self.language))
        transcript = Transcript(run.emit)
        if self._lost is not None:
            transcript.notice(
                f"The earlier state of this context is gone: {self._lost}. This ran in a fresh one; variables, "
                "imports and definitions must be made again."
            )
            self._lost = None
        self._busy = True
        self._info.last_used = now()
        return await run.follow(executor, transcript, self._pool.clock)


def _retrieve(task: asyncio.Task[CodeEvent]) -> None:
    """Whoever asked for it may have left; an error of it is nobody's then."""
    if not task.cancelled():
        task.exception()
