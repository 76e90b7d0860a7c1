"""The contexts of one machine: made, listed, found again by name, and given code."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Protocol

from skerry.errors import ContextExistsError, ContextNotFoundError, InvalidRequestError, TooLargeError
from skerry.models import (
    CodeContext,
    CodeEvent,
    CreateContext,
    Execution,
    Language,
    RunCode,
    WarmInterpreters,
)
from skerry.portal.contract import Portal
from skerry.record import Record
from skerry.runtime.environment import WORKSPACE, check_cwd, check_env, check_id, check_text
from skerry.runtime.faults import Faults
from skerry.runtime.flow import Flow
from skerry.runtime.interpreter.context import Context, Remembered
from skerry.runtime.interpreter.languages import known
from skerry.runtime.interpreter.nursery import PRELOADED
from skerry.runtime.interpreter.pool import Pool, Provision, number
from skerry.runtime.interpreter.transcript import Live

CODE_LIMIT = 32 << 20
DEFAULTS = {
    "PIP_BREAK_SYSTEM_PACKAGES": "1",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PIP_ROOT_USER_ACTION": "ignore",
}
"""What a context has in its environment unless told otherwise: pip may install, into the user's directory."""
STOPPED = "the sandbox was stopped and started again since"


class Records(Protocol):
    """Where contexts are kept on record, so that their names outlive the machine."""

    async def save(self, context: Remembered) -> None: ...

    async def delete(self, id: str) -> None: ...


class Contexts:
    """``past`` are contexts of an earlier start of the machine: they work, and say that their state is gone."""

    def __init__(
        self,
        portal: Portal,
        env: Mapping[str, str],
        provision: Provision,
        records: Records | None = None,
        past: Sequence[Remembered] = (),
        faults: Faults | None = None,
        flow: Flow | None = None,
    ) -> None:
        self._pool = Pool(portal, {**DEFAULTS, **env}, provision, faults, flow)
        self.records = records
        self.on_run: Callable[[str], None] | None = None
        """Told of every piece of code that is about to run, by its language."""
        self._contexts = {known.id: Context(self._pool, known, lost=STOPPED) for known in past}
        self._timeout = number(env, "INTERPRETER_EXECUTION_TIMEOUT_MS", provision.timeout or 0) or None

    # -- contexts ------------------------------------------------------------------------------------------------------

    async def create(self, request: CreateContext) -> CodeContext:
        language = known(request.language)
        check_env(request.env)
        check_cwd(request.cwd)
        id = request.id or str(uuid.uuid4())
        check_id(id, "a context")
        if id in self._contexts:
            raise ContextExistsError(f"Context {id!r} already exists.", hint="Choose another id, or none.")
        wanted = Remembered(id, language, request.cwd, request.env, request.timeout or self._timeout)
        context = self._contexts[id] = Context(self._pool, wanted)
        try:
            await context.start()
            if self.records is not None:
                await self.records.save(wanted)
        except BaseException:
            if self._contexts.get(id) is context:  # somebody may have deleted it meanwhile
                del self._contexts[id]
            await context.delete()
            raise
        return context.info()

    def list(self) -> list[CodeContext]:
        return [context.info() for context in self._contexts.values()]

    def get(self, id: str) -> CodeContext:
        return self._find(id).info()

    async def delete(self, id: str) -> None:
        context = self._find(id)
        del self._contexts[id]
        await context.delete()
        if self.records is not None:
            await self.records.delete(id)

    async def restart(self, id: str) -> CodeContext:
        context = self._find(id)
        await context.restart()
        return context.info()

    async def interrupt(self, id: str) -> bool:
        return await self._find(id).interrupt()

    async def warm(self, request: WarmInterpreters) -> None:
        await self._pool.warm(known(request.language), request.count, PRELOADED if request.preload else ())

    def _find(self, id: str) -> Context:
        context = self._contexts.get(id)
        if context is None:
            raise ContextNotFoundError(
                f"Context {id[:200]!r} not found.",
                hint="List the contexts to see which there are, or create one.",
                details={"contextId": id[:200]},
            )
        return context

    async def _default(self, language: Language) -> Context:
        id = f"default-{language}"
        if id not in self._contexts:
            wanted = Remembered(id, language, WORKSPACE, {}, self._timeout, default=True)
            self._contexts[id] = Context(self._pool, wanted)
            if self.records is not None:
                await self.records.save(wanted)
        return self._contexts[id]

    # -- code ----------------------------------------------------------------------------------------------------------

    async def run(self, request: RunCode) -> Execution:
        """Run code to its end. That it fails or takes too long is a result; cancelling interrupts it."""
        context = await self._choose(request)
        self._note(context)
        record = Record(request.code)
        await context.run(request.code, request.env, request.timeout, record.add)
        return record.execution()

    async def stream(self, request: RunCode) -> AsyncIterator[CodeEvent]:
        """The same, as events while it runs. Closing the iterator interrupts; a slow reader slows only its own code."""
        context = await self._choose(request)
        self._note(context)
        live = Live()
        run, performed = context.begin(request.code, request.env, request.timeout, live.emit, live)
        performed.add_done_callback(lambda _: live.finish())
        try:
            async for event in live.read():
                yield event
            performed.result()
        finally:
            if not performed.done():
                run.leave()

    def _note(self, context: Context) -> None:
        if self.on_run is not None:
            self.on_run(context.language)

    async def _choose(self, request: RunCode) -> Context:
        try:
            size = len(request.code.encode())
        except UnicodeEncodeError:
            raise InvalidRequestError("The code is not valid Unicode text.") from None
        if size > CODE_LIMIT:
            raise TooLargeError(
                f"The code is {size} bytes long; {CODE_LIMIT} are possible.", hint="Put data into files and read them."
            )
        check_env(request.env)
        if request.context is None:
            return await self._default(known("python" if request.language is None else request.language))
        check_text(request.context, "The context")
        context = self._find(request.context)
        if request.language is not None and known(request.language) != context.language:
            raise InvalidRequestError(
                f"Context {context.id!r} runs {context.language}, not {request.language}.",
                hint="Leave the language out, or name another context.",
            )
        return context

    async def close(self) -> None:
        for context in list(self._contexts.values()):
            await context.close()
        await self._pool.close()
