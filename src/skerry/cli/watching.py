"""The local side of `skerry task`: what the agent does is shown while it does it, and Ctrl-C asks what is meant."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from typing import TYPE_CHECKING, Any

from skerry.cli.output import counted, print_json

if TYPE_CHECKING:
    from skerry import AsyncClient
    from skerry.agents.task_models import TaskEvent, TaskInfo
    from skerry.client._async.connection import AsyncStream

QUESTION = "\n[c]ancel the task, [d]etach and let it go on, or Enter to go on watching? "
WITHOUT_SERVER = "\n[c]ancel the task, or Enter to go on watching? "
SILENCE = 2.0
"""Seconds without a word after which it is said why."""
_LONGEST = 120


async def watch(client: AsyncClient, events: AsyncStream[TaskEvent], view: View) -> int:
    """Show a task to its end; the exit code."""
    task: str | None = None
    detachable = (await client.connection.endpoint()).host is None
    waiting, unwanted = making_ready(view), False
    async with client, Presses() as presses, events:
        while True:
            coming = asyncio.ensure_future(anext(events, None))
            try:
                while not coming.done():
                    pressed = asyncio.ensure_future(presses.next())
                    await asyncio.wait((coming, pressed), return_when=asyncio.FIRST_COMPLETED)
                    if pressed.done() and not coming.done():
                        wish = await presses.ask(QUESTION if detachable else WITHOUT_SERVER) if task else "c"
                        if wish == "d" and detachable:
                            return view.detached(task or "")
                        if wish == "c":
                            if task is not None:
                                view.note("Cancelling.")
                                await client.cancel_task(task)
                            elif unwanted or not detachable:
                                return 130
                            else:
                                unwanted = True
                                view.note(
                                    "It is cancelled as soon as it has begun. Ctrl-C again does not wait for that."
                                )
                    elif pressed.done():
                        presses.repeat()  # something came at the same moment, and is shown first
                    pressed.cancel()
                    await asyncio.gather(pressed, return_exceptions=True)
            finally:
                waiting.cancel()
                coming.cancel()  # a stream that somebody waits for cannot be closed
                await asyncio.gather(coming, return_exceptions=True)
            event = coming.result()
            if event is None:
                return view.lost()
            task = event.task_id or task
            view.show(event)
            if unwanted and task is not None:
                unwanted = False
                await client.cancel_task(task)
            if event.type in ("done", "error"):
                return view.end(event)


def making_ready(view: View) -> asyncio.TimerHandle:
    """Says why nothing comes, unless it is cancelled before."""
    said = "Making ready. What is asked for the first time, such as an agent, is installed now."
    return asyncio.get_running_loop().call_later(SILENCE, view.note, said)


class Presses:
    """Ctrl-C, and what is answered to the question that it leads to. Where nobody can be asked it means to cancel.

    Who is told to end meanwhile leaves in order: an exit in the middle of anything would be a traceback.
    """

    def __init__(self) -> None:
        self._pressed = asyncio.Event()
        self._before: dict[int, Any] = {}
        self._told: int | None = None

    async def __aenter__(self) -> Presses:
        loop, watching = asyncio.get_running_loop(), asyncio.current_task()
        assert watching is not None
        loop.add_signal_handler(signal.SIGINT, self._pressed.set)
        for number in (signal.SIGTERM, signal.SIGHUP):
            self._before[number] = signal.getsignal(number)
            loop.add_signal_handler(number, self._leave, number, watching)
        return self

    async def __aexit__(self, *_: object) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_signal_handler(signal.SIGINT)
        for number, handler in self._before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
        if self._told is not None:
            raise SystemExit(128 + self._told)

    def _leave(self, number: int, watching: asyncio.Task[Any]) -> None:
        self._told = number
        watching.cancel()

    async def next(self) -> None:
        await self._pressed.wait()
        self._pressed.clear()

    def repeat(self) -> None:
        """It was not seen to."""
        self._pressed.set()

    async def ask(self, question: str) -> str:
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            return "c"
        print(question, end="", file=sys.stderr, flush=True)
        loop, typed = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(sys.stdin, typed.set)
        answer, again = asyncio.ensure_future(typed.wait()), asyncio.ensure_future(self.next())
        try:
            await asyncio.wait((answer, again), return_when=asyncio.FIRST_COMPLETED)
            if again.done():  # pressed a second time
                return "c"
        finally:
            loop.remove_reader(sys.stdin)
            for each in (answer, again):
                each.cancel()
            await asyncio.gather(answer, again, return_exceptions=True)
        return sys.stdin.readline().strip().lower()[:1]


class View:
    """The answer and the patch go to stdout, what else there is to know to stderr; with ``as_json``, only the task."""

    def __init__(self, as_json: bool, *, prefix: str = "") -> None:
        self._as_json = as_json
        self._line_open = False
        self._prefix = prefix

    def show(self, event: TaskEvent) -> None:
        if self._as_json:
            return
        if event.type == "chunk" and event.content:
            sys.stdout.write(event.content)
            sys.stdout.flush()
            self._line_open = not event.content.endswith("\n")
        elif event.type == "tool_call" and event.event is not None:
            self._tool(event.event)
        elif event.type in ("status", "warning", "retry") and event.message:
            self.note(event.message if event.type == "status" else f"{event.type}: {event.message}")
        elif event.type == "permission" and event.event is not None:
            self.note(f"asks for leave: {event.event.get('tool')} {' '.join(event.event.get('patterns') or [])}")

    def _tool(self, call: dict[str, Any]) -> None:
        if call["status"] == "running":
            self.note(f"{call['tool']}: {_shown(call.get('args') or {})}", mark="▸")
        elif call["status"] == "error":
            self.note(f"{call['tool']}: {_line(call.get('output') or 'failed')}", mark="✗")

    def note(self, text: str, mark: str = "·") -> None:
        if self._as_json:
            return
        self._close_line()
        line = f"{self._prefix}{mark} {text}"
        print(f"\033[2m{line}\033[0m" if sys.stderr.isatty() else line, file=sys.stderr, flush=True)

    def end(self, event: TaskEvent) -> int:
        task = event.task
        if task is None:
            print(f"error: {event.message}", file=sys.stderr)
            return 1
        if self._as_json:
            print_json(task)
        else:
            self._close_line()
            print_diff(task)
            print(summary(task), file=sys.stderr)
        return exit_code(task)

    def detached(self, task: str) -> int:
        self._close_line()
        print(f"The task goes on: `skerry tasks {task} --follow` joins it again.", file=sys.stderr)
        return 0

    def lost(self) -> int:
        self._close_line()
        print("error: The server closed before the task had ended; `skerry tasks` shows it.", file=sys.stderr)
        return 1

    def _close_line(self) -> None:
        if self._line_open:
            print(flush=True)
            self._line_open = False


def exit_code(task: TaskInfo) -> int:
    return {"completed": 0, "cancelled": 130}.get(task.status, 1)


def summary(task: TaskInfo) -> str:
    """How it ended and what it took, in a line or two."""
    facts: list[str] = [task.status]
    if task.completed_at is not None and task.started_at is not None:
        facts.append(f"{(task.completed_at - task.started_at).total_seconds():.1f} s")
    diff = task.diff
    if diff is not None and diff.files:
        facts.append(f"{counted(len(diff.files), 'file')} changed (+{diff.additions} -{diff.deletions})")
    used = task.tokens.input + task.tokens.output
    if used:
        facts.append(counted(used, "token"))
    if task.cost:
        facts.append(f"{task.cost:.4f} USD")
    if task.artifacts:
        facts.append(counted(len(task.artifacts), "artifact"))
    lines = [f"{task.id}: {', '.join(facts)}"]
    if task.error:
        lines.append(f"error: {task.error} ({task.error_code})")
    if (lack := lacking(task)) is not None:
        lines.append(lack)
    return "\n".join(lines)


def lacking(task: TaskInfo) -> str | None:
    """Why its patch is not all that the agent did."""
    if task.diff is None:
        return None
    if task.diff.error:
        return f"There is no diff: {task.diff.error}"
    return "The patch is larger than what is kept: there are files missing in it." if task.diff.truncated else None


def print_diff(task: TaskInfo) -> None:
    if task.diff is None or not task.diff.patch:
        return
    text = task.diff.patch
    if not sys.stdout.isatty():
        return print(text, end="")
    from rich.console import Console
    from rich.syntax import Syntax

    Console().print(Syntax(text.rstrip("\n"), "diff", background_color="default", word_wrap=True))


def _shown(arguments: dict[str, Any]) -> str:
    for name in ("command", "filePath", "file_path", "path", "pattern", "url"):
        if isinstance(arguments.get(name), str):
            return _line(arguments[name])
    return _line(json.dumps(arguments, ensure_ascii=False)) if arguments else ""


def _line(text: str) -> str:
    first = " ".join(text.split())
    return first if len(first) <= _LONGEST else f"{first[:_LONGEST]}…"
