"""Everything that can be done in one running machine."""

from __future__ import annotations

import asyncio
import base64
import binascii
import codecs
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from skerry.errors import InvalidRequestError, MissingCommandError, SkerryError, WaitTimeoutError
from skerry.limits import shown_size
from skerry.models import ExecEvent, ExecRequest, ExecResult, ProcessInfo, WaitForPort, WaitResult, now
from skerry.portal.contract import Portal
from skerry.runtime.backlog import Backlog
from skerry.runtime.capture import RESULT_LIMIT, Capture, Pump
from skerry.runtime.commands import run_once
from skerry.runtime.environment import WORKSPACE, check_cwd, check_env, check_text, merged
from skerry.runtime.faults import Before, Faults, Reached
from skerry.runtime.files import Files
from skerry.runtime.git import Git
from skerry.runtime.interpreter.context import Remembered
from skerry.runtime.interpreter.contexts import Contexts, Records
from skerry.runtime.interpreter.pool import Provision
from skerry.runtime.ports import port_opens
from skerry.runtime.processes import WAIT, Processes
from skerry.runtime.sessions import Sessions
from skerry.runtime.shell import Outcome, Task
from skerry.runtime.terminals import Terminals
from skerry.runtime.watch import Watches

NOTHING_SPECIAL = Provision()


class Runtime:
    """The sessions, processes, terminals, files, watches, git and code contexts of a machine, over its portal."""

    sessions_kind: type[Sessions] = Sessions
    files_kind: type[Files] = Files

    def __init__(
        self,
        portal: Portal,
        *,
        env: Mapping[str, str],
        on_process: Callable[[ProcessInfo], Awaitable[None]],
        past: Sequence[ProcessInfo] = (),
        provision: Provision = NOTHING_SPECIAL,
        contexts: Records | None = None,
        past_contexts: Sequence[Remembered] = (),
        faults: Faults | None = None,
    ) -> None:
        self.portal = portal
        self.faults = Faults() if faults is None else faults
        self.on_command: Callable[[float, int, bool], None] | None = None
        """Told of every command that ended: seconds, exit code, and whether it ran out of time."""
        self.sessions = self.sessions_kind(portal, env)
        self.processes = Processes(self.sessions, on_process, past, self.faults)
        self.terminals = Terminals(self.sessions)
        self.files = self.files_kind(portal)
        self.watches = Watches(portal)
        self.code = Contexts(
            portal, self.sessions.env, provision, contexts, past_contexts, self.faults, self.sessions.flow
        )
        self.git = Git(portal, self.sessions.env, in_session=self._in_session)

    async def take_leave(self) -> None:
        """The machine will ask every process to end: know it from one that ends for reasons of its own."""
        self.processes.take_leave()
        await self.terminals.hang_up()

    async def close(self) -> None:
        await self.processes.close()
        await self.watches.close()
        await self.code.close()
        await self.terminals.close()
        await self.sessions.close()

    # -- commands ------------------------------------------------------------------------------------------------------

    async def exec(self, request: ExecRequest) -> ExecResult:
        """Run a command to its end. A non-zero exit and a timeout are results, not errors; cancelling kills it."""
        task = _task(request)
        most = self.faults.limits.output or RESULT_LIMIT
        stdout, stderr = Capture(most), Capture(most)
        began, before, reached = time.perf_counter(), self.faults.begin(), None
        err, failed = b"", False
        try:
            outcome = await self._run(request, task, stdout.add, stderr.add)
            out, err = stdout.take(), stderr.take()
            failed = outcome.exit_code != 0
        finally:
            stdout.close()
            stderr.close()
            reached = self.faults.end(before, failed, err)
        if reached is None and (stdout.dropped or stderr.dropped):
            reached = Reached("output", f"Of each stream only the first {shown_size(most)} are in the result.")
        return ExecResult.model_construct(
            stdout=_text(out, request.encoding),
            stderr=_text(err, request.encoding),
            exit_code=outcome.exit_code,
            success=outcome.exit_code == 0,
            command=_shown(request),
            duration=round((time.perf_counter() - began) * 1000, 3),
            timestamp=now(),
            session_id=request.session,
            timed_out=outcome.timed_out,
            shell_ended=outcome.shell_ended,
            stdout_truncated=stdout.dropped,
            stderr_truncated=stderr.dropped,
            encoding=request.encoding,
            limit=None if reached is None else reached.limit,
            limit_message=None if reached is None else reached.message,
        )

    async def exec_stream(self, request: ExecRequest, *, builtins: bool = False) -> AsyncIterator[ExecEvent]:
        """The same, as events while it runs. Closing the iterator kills the command; a slow reader slows only it.

        With ``builtins``, an argument vector in a session may be `cd` or `export`, and changes the session.
        """
        task = _task(request, builtins=builtins)
        if request.session is not None:
            self.sessions.find(request.session)
        events = _Events(request.encoding)
        before: Before | None = self.faults.begin()
        running = asyncio.get_running_loop().create_task(
            self._run(request, task, events.stdout, events.stderr, on_start=events.started)
        )
        running.add_done_callback(lambda _: events.finish())
        try:
            yield ExecEvent(type="start", command=_shown(request), session_id=request.session)
            async for event in events.read():
                yield event
            outcome = await running
            assert before is not None
            reached = self.faults.end(before, outcome.exit_code != 0, events.kept["stderr"].data)
            before = None
            yield ExecEvent(
                type="complete",
                command=_shown(request),
                exit_code=outcome.exit_code,
                session_id=request.session,
                result={
                    "exitCode": outcome.exit_code,
                    "success": outcome.exit_code == 0,
                    "timedOut": outcome.timed_out,
                    "stdout": events.kept["stdout"].text(),
                    "stderr": events.kept["stderr"].text(),
                    "limit": None if reached is None else reached.limit,
                    "limitMessage": None if reached is None else reached.message,
                },
            )
        except SkerryError as error:
            yield ExecEvent(type="error", command=_shown(request), error=str(error), code=error.code)
        finally:
            if not running.done():
                running.cancel()
                events.resume()
                await asyncio.gather(running, return_exceptions=True)
            if before is not None:
                self.faults.end(before)

    async def _run(
        self,
        request: ExecRequest,
        task: Task,
        on_stdout: Callable[[bytes], None],
        on_stderr: Callable[[bytes], None],
        on_start: Callable[[Sequence[Pump]], None] | None = None,
    ) -> Outcome:
        timeout = None if request.timeout is None else request.timeout / 1000
        began = time.perf_counter()
        if request.session is not None:
            session = self.sessions.find(request.session)
            outcome = await session.run(task, on_stdout, on_stderr, timeout=timeout, on_start=on_start)
        else:
            outcome = await run_once(
                self.portal,
                task,
                on_stdout,
                on_stderr,
                env=merged(self.sessions.env, request.env),
                cwd=request.cwd or WORKSPACE,
                timeout=timeout if timeout is not None else self.sessions.default_timeout,
                on_start=on_start,
                flow=self.sessions.flow,
            )
        if self.on_command is not None:
            self.on_command(time.perf_counter() - began, outcome.exit_code, outcome.timed_out)
        return outcome

    async def _in_session(self, id: str) -> tuple[Portal, Mapping[str, str]]:
        session = self.sessions.find(id)
        _, env = await session.state()
        return session.portal, env

    # -- ports ---------------------------------------------------------------------------------------------------------

    async def wait_for_port(self, port: int, request: WaitForPort) -> WaitResult:
        given = request.timeout if "timeout" in request.model_fields_set else WAIT
        seconds = None if given is None else given / 1000
        try:
            async with self.portal.clock.timeout(seconds):
                return await port_opens(
                    self.portal,
                    port,
                    mode=request.mode,
                    path=request.path,
                    status_min=request.status_min,
                    status_max=request.status_max,
                )
        except TimeoutError:
            raise WaitTimeoutError(
                f"Nothing answered on port {port} within {seconds:g} seconds.", hint="Is the server started?"
            ) from None


class _Tail:
    """The last part of a stream, for the closing event of those who did not listen to the others."""

    LIMIT = 64 * 1024

    def __init__(self) -> None:
        self.data = b""

    def add(self, data: bytes) -> None:
        self.data = (self.data + data)[-self.LIMIT :]

    def text(self) -> str:
        return self.data.decode(errors="replace")


class _Events(Backlog[ExecEvent]):
    """The output of a command; what its reader has no room for waits in the pipes."""

    def __init__(self, encoding: str) -> None:
        super().__init__()
        self._encoding = encoding
        self._decoders: dict[str, Any] = {
            name: codecs.getincrementaldecoder("utf-8")("replace") for name in ("stdout", "stderr")
        }
        self.kept = {"stdout": _Tail(), "stderr": _Tail()}
        self._pumps: Sequence[Pump] = ()

    def started(self, pumps: Sequence[Pump]) -> None:
        self._pumps = pumps

    def stdout(self, data: bytes) -> None:
        self._write("stdout", data)

    def stderr(self, data: bytes) -> None:
        self._write("stderr", data)

    def _write(self, name: Any, data: bytes) -> None:
        self.kept[name].add(data)
        raw = self._encoding == "base64"
        text = base64.b64encode(data).decode() if raw else self._decoders[name].decode(data)
        if text:
            self.add(ExecEvent.model_construct(type=name, timestamp=now(), data=text), len(data))

    def pause(self) -> None:
        for pump in self._pumps:
            pump.pause()

    def resume(self) -> None:
        for pump in self._pumps:
            pump.resume()


def _task(request: ExecRequest, *, builtins: bool = False) -> Task:
    if not request.command.strip():
        raise MissingCommandError("No command was given.", hint='Send {"command": "…"}.')
    for word in (request.command, *(request.args or ())):
        check_text(word, "The command")
    check_env(request.env)
    check_cwd(request.cwd)
    stdin = None
    if request.stdin is not None:
        try:
            stdin = (
                base64.b64decode(request.stdin, validate=True)
                if request.encoding == "base64"
                else request.stdin.encode()
            )
        except (binascii.Error, ValueError):
            raise InvalidRequestError(f"stdin is not valid {request.encoding}.") from None
    return Task(request.command, request.args, builtins, request.cwd, request.env, stdin)


def _shown(request: ExecRequest) -> str:
    return " ".join([request.command, *(request.args or ())])


def _text(data: bytes, encoding: str) -> str:
    return base64.b64encode(data).decode() if encoding == "base64" else data.decode(errors="replace")
