# Generated from src/skerry/client/_async/code.py by scripts/generate_sync.py; change that file and run it again.
"""Code that runs in contexts, which keep their state."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import Any, TypeVar
from urllib.parse import quote

from pydantic import BaseModel

from skerry.client._sync.connection import Link, Stream
from skerry.client.concurrency import call
from skerry.client.execution import ContextRef, Patience, ReceivedEvent, context_name
from skerry.client.values import EnvChanges, Seconds, given, milliseconds
from skerry.errors import InternalError, InterpreterNotReadyError
from skerry.models import CodeContext, CodeError, CodeEvent, CodeResult, ContextList, Execution, Interrupted
from skerry.record import Record

M = TypeVar("M", bound=BaseModel)

OutputListener = Callable[[CodeEvent], Any]
ResultListener = Callable[[CodeResult], Any]
ErrorListener = Callable[[CodeError], Any]


class Code:
    _link: Link

    def run_code(
        self,
        code: str,
        context: ContextRef | None = None,
        *,
        language: str | None = None,
        env: EnvChanges | None = None,
        timeout: Seconds | None = None,
        on_stdout: OutputListener | None = None,
        on_stderr: OutputListener | None = None,
        on_result: ResultListener | None = None,
        on_error: ErrorListener | None = None,
    ) -> Execution:
        """Run code and return its output, its results (the last expression's value is one) and its error.

        Code that fails is a result with ``error``, not an exception; ``raise_for_error`` makes it one. Without a
        ``context`` it runs in the default one of its ``language`` (python), which is made on first use and kept.
        ``env`` holds for this run alone. ``timeout`` is in seconds: code that outlives it is interrupted, and killed if
        it does not heed that. The callbacks get each piece while the code runs: output as an event with ``text`` and
        ``timestamp``, results and the error as such. Cancelling interrupts the code; its context lives on.
        """
        body = self._code_body(code, context, language, env, timeout)
        if not (on_stdout or on_stderr or on_result or on_error):
            return self._patient_post(Execution, "/code", body)
        record = Record(code)
        events = self._code_events(body)
        try:
            for event in events:
                record.add(event)
                if event.type == "stdout":
                    call(on_stdout, event)
                elif event.type == "stderr":
                    call(on_stderr, event)
                elif event.type == "result":
                    call(on_result, event.result)
                elif event.type == "error":
                    call(on_error, event.error)
        finally:
            events.close()
        return record.execution()

    def run_code_stream(
        self,
        code: str,
        context: ContextRef | None = None,
        *,
        language: str | None = None,
        env: EnvChanges | None = None,
        timeout: Seconds | None = None,
    ) -> Stream[CodeEvent]:
        """Run code and iterate over what happens: start, then stdout, stderr, result, notice, error, then complete.

        An ``error`` event is the code's own; what is no fault of the code raises. Closing the iterator interrupts the
        code. ``timeout`` is in seconds.
        """
        return Stream(self._code_events(self._code_body(code, context, language, env, timeout)))

    def create_code_context(
        self,
        language: str = "python",
        *,
        cwd: str = "/workspace",
        env: Mapping[str, str] | None = None,
        timeout: Seconds | None = None,
        id: str | None = None,
    ) -> CodeContext:
        """Make a context: an interpreter with variables, directory and environment of its own.

        ``language`` is python, javascript or typescript. ``timeout``, in seconds, is for runs that have none of their
        own.
        """
        body = {"language": language, "cwd": cwd}
        body |= given(env=dict(env) if env else None, timeout=milliseconds(timeout), id=id)
        return self._patient_post(CodeContext, "/contexts", body)

    def list_code_contexts(self) -> list[CodeContext]:
        """The contexts of this sandbox, default ones included."""
        return (self._link.get(ContextList, "/contexts")).contexts

    def get_code_context(self, context: ContextRef) -> CodeContext:
        """What is known about a context now; raises ``ContextNotFoundError`` when there is none."""
        return self._link.get(CodeContext, self._context_path(context))

    def delete_code_context(self, context: ContextRef) -> None:
        """End a context, what runs in it and all it remembers."""
        self._link.request("DELETE", self._context_path(context))

    def restart_code_context(self, context: ContextRef) -> CodeContext:
        """Give a context a fresh interpreter: its variables are gone, its settings stay."""
        return self._link.post(CodeContext, f"{self._context_path(context)}/restart")

    def interrupt_code_context(self, context: ContextRef) -> bool:
        """Interrupt what runs in a context and keep its variables; whether anything was running."""
        return (self._link.post(Interrupted, f"{self._context_path(context)}/interrupt")).interrupted

    def warm_code(self, language: str = "python", count: int = 1, *, preload: bool = True) -> None:
        """Have interpreters ready, so that the next ``count`` contexts of this language start at once.

        With ``preload``, Python's have numpy, pandas and matplotlib imported.
        """
        body = {"language": language, "count": count, "preload": preload}
        self._link.request("POST", "/code/warm", json=body)

    def _context_path(self, context: ContextRef) -> str:
        return f"/contexts/{quote(context_name(context) or '', safe='')}"

    def _code_body(
        self,
        code: str,
        context: ContextRef | None,
        language: str | None,
        env: EnvChanges | None,
        timeout: Seconds | None,
    ) -> dict[str, Any]:
        options = given(
            context=context_name(context),
            language=language,
            env=dict(env) if env else None,
            timeout=milliseconds(timeout),
        )
        return {"code": code, **options}

    def _patient_post(self, model: type[M], path: str, body: dict[str, Any]) -> M:
        """Ask again while the interpreter is still starting: nothing has run then."""
        patience = Patience()
        while True:
            try:
                return self._link.post(model, path, body)
            except InterpreterNotReadyError as error:
                patience.wait(error)

    def _code_events(self, body: dict[str, Any]) -> Generator[CodeEvent, None]:
        """What happens, to its end; asked for again while the interpreter is still starting, but not after that."""
        patience = Patience()
        last = None
        while True:
            events = self._link.events(ReceivedEvent, "POST", "/code/stream", json=body)
            try:
                for event in events:
                    if event.code is not None:
                        raise event.failure()
                    again, last = last is not None and event.type == "start", event.type
                    if not again:
                        yield event
                if last != "complete":
                    raise InternalError("The stream of events ended before the code did.")
                return
            except InterpreterNotReadyError as error:
                if last not in (None, "start"):
                    raise
                patience.wait(error)
            finally:
                events.close()
