"""The local side of `skerry code`: what happens is shown while it happens, and Ctrl-C reaches the code."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skerry.cli.output import print_json
from skerry.cli.pictures import Way
from skerry.cli.results import Gallery, save
from skerry.record import Record

if TYPE_CHECKING:
    from skerry import AsyncSandbox, CodeError, CodeEvent, Execution

INTERRUPTED = ("KeyboardInterrupt", "Interrupted")
"""What the languages call it. Anything else says itself what became of the context."""


async def execute(sandbox: AsyncSandbox, code: str, cwd: str | None, options: dict[str, Any], view: View) -> int:
    """Run code and show what happens; the exit code."""
    record = Record(code)
    async with sandbox:
        made = None
        if cwd is not None:
            made = options["context"] = await sandbox.create_code_context(options["language"] or "python", cwd=cwd)
        try:
            async with Interruption(sandbox) as interruption, sandbox.run_code_stream(code, **options) as events:
                async for event in events:
                    record.add(event)
                    view.show(event)
                    if event.type == "start":
                        interruption.context = event.context_id
        except asyncio.CancelledError:
            return 130
        finally:
            if made is not None:
                await sandbox.delete_code_context(made)
    return view.end(record.execution(), interrupted=interruption.asked)


class Interruption:
    """Ctrl-C: the first interrupts the code and lets it say its last words, the second leaves at once."""

    def __init__(self, sandbox: AsyncSandbox) -> None:
        self._sandbox = sandbox
        self._asking: asyncio.Task[None] | None = None
        self.context: str | None = None

    @property
    def asked(self) -> bool:
        return self._asking is not None

    async def __aenter__(self) -> Interruption:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._pressed, task)
        return self

    async def __aexit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    def _pressed(self, task: asyncio.Task[Any]) -> None:
        if self.context is None or self._asking is not None:
            task.cancel()
        else:
            self._asking = asyncio.create_task(self._interrupt(self.context, task))

    async def _interrupt(self, context: str, task: asyncio.Task[Any]) -> None:
        if not await self._sandbox.interrupt_code_context(context):
            task.cancel()  # the code has not begun, or is just ending


class View:
    """Shows an execution while it happens, and keeps what is to be kept of it."""

    def __init__(self, way: Way | None, directory: Path | None, as_json: bool) -> None:
        self._way, self._directory, self._as_json = way, directory, as_json
        self._line_open = False
        self._gallery: Gallery | None = None

    def show(self, event: CodeEvent) -> None:
        if self._as_json:
            return
        if event.type in ("stdout", "stderr"):
            stream = sys.stdout if event.type == "stdout" else sys.stderr
            stream.buffer.write((event.text or "").encode(errors="replace"))
            stream.flush()
            if event.type == "stdout" and event.text:
                self._line_open = not event.text.endswith("\n")
        elif event.type == "result" and event.result is not None:
            self._gallery = self._gallery or Gallery(self._way)
            if self._line_open:
                print()
                self._line_open = False
            self._gallery.show(event.result)
        elif event.type == "notice":
            print(f"notice: {event.text}", file=sys.stderr)
        elif event.type == "error" and event.error is not None:
            print_error(event.error)

    def end(self, execution: Execution, *, interrupted: bool) -> int:
        """Keep the results and say how it ended; the exit code."""
        if self._directory is not None:
            for path, note in save(execution.results, self._directory):
                print(f"wrote {path}" + (f" ({note})" if note else ""), file=sys.stderr)
        if self._as_json:
            print_json(execution)
        if execution.error is None:
            return 0
        if execution.timed_out:
            return 124
        if interrupted:
            if execution.error.name in INTERRUPTED:
                print(f"Interrupted the code, not its context {execution.context_id}.", file=sys.stderr)
            return 130
        return 1


def print_error(error: CodeError) -> None:
    """Where it happened and what; the traceback of code that ran out of time does not say the latter."""
    lines = "\n".join(error.traceback).rstrip("\n").split("\n") if error.traceback else []
    if not any(line.startswith(error.name) for line in lines):
        lines.append(f"{error.name}: {error.message}")
    if not sys.stderr.isatty():
        return print("\n".join(lines), file=sys.stderr)
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    for line in lines:
        marked = line.lstrip().startswith("-") and ">" in line
        console.print(Text(line, "bold red" if line.startswith(error.name) else "bold" if marked else "dim"))
