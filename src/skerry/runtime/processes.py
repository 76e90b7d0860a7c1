"""Background processes: they outlive the request and the client that started them, and end with the sandbox."""

from __future__ import annotations

import asyncio
import base64
import codecs
import contextlib
import json
import os
import secrets
import signal as signals
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence

from skerry.errors import (
    InvalidRequestError,
    MissingCommandError,
    ProcessExistsError,
    ProcessExitedError,
    ProcessNotFoundError,
    SandboxLostError,
    WaitTimeoutError,
)
from skerry.limits import Limit
from skerry.models import (
    KillProcess,
    LogEvent,
    ProcessInfo,
    ProcessLogs,
    ProcessStatus,
    StartProcess,
    WaitRequest,
    WaitResult,
    now,
)
from skerry.portal.contract import Child, Portal
from skerry.runtime.capture import Pump
from skerry.runtime.commands import end_tree, spawn_command, spawn_failure
from skerry.runtime.environment import check_cwd, check_env, check_id, check_text, merged
from skerry.runtime.faults import TAIL, Faults, Met
from skerry.runtime.flow import Flow
from skerry.runtime.journal import SEGMENT, Journal
from skerry.runtime.output import pipe, write_all
from skerry.runtime.ports import port_opens
from skerry.runtime.sessions import DEFAULT, Sessions
from skerry.runtime.tool import Tool

KEPT = 1000
LOG_RATE = 48 << 20
"""Bytes a second that all processes of a sandbox together may log, after a burst: they are written to disk."""
WAIT = 60_000.0
"""Milliseconds to wait for a log line or a port where the caller does not say."""
LINE_LIMIT = 1 << 16


class Process:
    def __init__(
        self,
        info: ProcessInfo,
        portal: Portal,
        encoding: str = "utf-8",
        auto_cleanup: bool = True,
        segment: int = SEGMENT,
    ) -> None:
        self.info = info
        self.journal = Journal(segment)
        self.said = b""
        """The end of its stderr."""
        self.ended = asyncio.Event()
        self.encoding = encoding
        self.auto_cleanup = auto_cleanup
        self.portal = portal
        self.child: Child | None = None
        self.stdin = -1
        self.why_killed: str | None = None
        self.asked_to_end = False
        """Whether the whole machine was, so that its end is nobody's fault."""
        self.writing = asyncio.Lock()
        self._writer: asyncio.Future[None] | None = None

    async def write(self, data: bytes) -> None:
        """Raises BrokenPipeError when nobody reads it, or the process ends, before all of it is written."""
        self._writer = writer = asyncio.ensure_future(write_all(self.stdin, data))
        try:
            await asyncio.wait([writer])
        finally:
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)
        if writer.cancelled():
            raise BrokenPipeError
        writer.result()

    def complain(self, data: bytes) -> None:
        self.said = (self.said + data)[-TAIL:]
        self.journal.add("stderr", data)

    def close_stdin(self) -> None:
        if self.stdin < 0:
            return
        stdin, self.stdin = self.stdin, -1
        if self._writer is None or self._writer.done():
            os.close(stdin)
        else:
            # Not under it: the number may soon be another connection's, and would get the rest.
            self._writer.add_done_callback(lambda _: os.close(stdin))
            self._writer.cancel()

    def text(self, data: bytes) -> str:
        return base64.b64encode(data).decode() if self.encoding == "base64" else data.decode(errors="replace")


class Processes:
    def __init__(
        self,
        sessions: Sessions,
        on_change: Callable[[ProcessInfo], Awaitable[None]],
        past: Sequence[ProcessInfo] = (),
        faults: Faults | None = None,
    ) -> None:
        self._sessions = sessions
        self._faults = Faults() if faults is None else faults
        self._flow = Flow(LOG_RATE)
        self._on_change = on_change
        self._processes: dict[str, Process] = {}
        for info in past:
            self._processes[info.id] = Process(info, sessions.portal)
            self._processes[info.id].journal.close()
            self._processes[info.id].ended.set()
        self._tasks: set[asyncio.Future[None]] = set()

    # -- starting ------------------------------------------------------------------------------------------------------

    async def start(self, request: StartProcess) -> ProcessInfo:
        if not request.command.strip():
            raise MissingCommandError("No command was given.", hint='Send {"command": "…"}.')
        check_env(request.env)
        check_cwd(request.cwd)
        for word in (request.command, *(request.args or ())):
            check_text(word, "The command")
        id = request.process_id or f"proc_{int(time.time() * 1000)}_{secrets.token_hex(3)}"
        check_id(id, "a process")
        if id in self._processes:
            raise ProcessExistsError(f"Process {id!r} already exists.", hint="Choose another id, or none.")
        session = self._sessions.find(request.session or DEFAULT)
        info = ProcessInfo(
            id=id,
            command=" ".join([request.command, *(request.args or ())]),
            status=ProcessStatus.STARTING,
            start_time=now(),
            session_id=session.id,
        )
        most = self._faults.limits.log
        process = self._processes[id] = Process(
            info, session.portal, request.encoding, request.auto_cleanup, SEGMENT if most is None else most // 2
        )
        try:
            cwd, exported = await session.state()
            await self._spawn(process, request, merged(exported, request.env), request.cwd or cwd)
        except BaseException:
            del self._processes[id]
            raise
        self._forget_old()
        await self._on_change(process.info)
        return process.info

    async def _spawn(self, process: Process, request: StartProcess, env: dict[str, str], cwd: str) -> None:
        before = self._faults.count()
        out, their_out = pipe("read")
        err, their_err = pipe("read")
        their_in, process.stdin = pipe("write", size=65536)
        try:
            process.child = await spawn_command(
                process.portal, request.command, request.args, env=env, cwd=cwd, stdio=[their_in, their_out, their_err]
            )
        except OSError as error:
            _, message = spawn_failure(error, request.command, cwd)
            process.journal.add("stderr", message)
            self._finish(process, ProcessStatus.ERROR, None, message.decode().strip())
            for fd in (out, err):
                os.close(fd)
            return
        except BaseException:
            process.close_stdin()
            for fd in (out, err):
                os.close(fd)
            raise
        finally:
            for fd in (their_in, their_out, their_err):
                os.close(fd)
        process.info = process.info.model_copy(update={"pid": process.child.pid, "status": ProcessStatus.RUNNING})
        pumps = [
            Pump(out, lambda data: process.journal.add("stdout", data), self._flow),
            Pump(err, process.complain, self._flow),
        ]
        self._own(self._watch(process, process.child, pumps, before))
        if request.timeout is not None:
            self._own(self._expire(process, process.child, request.timeout / 1000))

    async def _watch(self, process: Process, child: Child, pumps: list[Pump], before: Met) -> None:
        try:
            code = await child.wait()
        except SandboxLostError as lost:
            for pump in pumps:
                pump.close()
            late = "It did not end in the time it had after SIGTERM, and was killed when the sandbox was put to sleep."
            self._finish(process, ProcessStatus.KILLED, None, late if process.asked_to_end else lost.message)
            return
        for pump in pumps:
            pump.drain()
        error: str | None
        exit_code = code if code >= 0 else 128 - code
        if process.why_killed is not None:
            status, error = ProcessStatus.KILLED, process.why_killed
        elif process.asked_to_end and code >= 0:
            status = ProcessStatus.COMPLETED if code == 0 else ProcessStatus.FAILED
            error = "It ended by itself after SIGTERM, when the sandbox was put to sleep."
        elif process.asked_to_end and code == -signals.SIGTERM:
            status, error = ProcessStatus.KILLED, "It was ended by SIGTERM, when the sandbox was put to sleep."
        elif code < 0:
            status, error = ProcessStatus.KILLED, f"It was ended by {signals.Signals(-code).name}."
        else:
            status, error = (ProcessStatus.COMPLETED if code == 0 else ProcessStatus.FAILED), None
        reached = None if process.why_killed or not exit_code else self._faults.blame(before, process.said)
        if reached is not None:
            error = f"{reached.message} {error}" if error else reached.message
        self._finish(process, status, exit_code, error, None if reached is None else reached.limit)
        for pump in pumps:
            pump.settle()
        try:
            await asyncio.gather(*(pump.ended for pump in pumps))
        finally:
            for pump in pumps:
                pump.close()

    def _finish(
        self,
        process: Process,
        status: ProcessStatus,
        exit_code: int | None,
        error: str | None,
        limit: Limit | None = None,
    ) -> None:
        process.info = process.info.model_copy(
            update={"status": status, "exit_code": exit_code, "end_time": now(), "error": error, "limit": limit}
        )
        process.close_stdin()
        process.journal.close()
        process.ended.set()
        self._own(self._on_change(process.info))

    async def _expire(self, process: Process, child: Child, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with process.portal.clock.timeout(seconds):
                await process.ended.wait()
                return
        process.why_killed = f"It ran longer than the {seconds:g} seconds it was given."
        await end_tree(child)

    def _own(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _forget_old(self) -> None:
        finished = [id for id, process in self._processes.items() if process.ended.is_set() and process.auto_cleanup]
        for id in finished[: max(0, len(self._processes) - KEPT)]:
            self._processes.pop(id).journal.discard()

    # -- looking -------------------------------------------------------------------------------------------------------

    def find(self, id: str) -> Process:
        """By its id or, as the older API has it, by its pid."""
        process = self._processes.get(id)
        if process is None and id.isdigit():
            pid = int(id)
            process = next((p for p in reversed(self._processes.values()) if p.info.pid == pid), None)
        if process is None:
            raise ProcessNotFoundError(f"Process {id!r} not found.", hint="List the processes to see which there are.")
        return process

    async def get(self, id: str) -> ProcessInfo:
        return self.find(id).info

    async def list(self, status: ProcessStatus | None = None, session: str | None = None) -> list[ProcessInfo]:
        found = [process.info for process in self._processes.values()]
        return [
            info
            for info in found
            if (status is None or info.status == status) and (session is None or info.session_id == session)
        ]

    async def logs(self, id: str) -> ProcessLogs:
        process = self.find(id)
        stdout, stderr = process.journal.text()
        return ProcessLogs(
            process_id=process.info.id,
            stdout=process.text(stdout),
            stderr=process.text(stderr),
            stdout_truncated=process.journal.dropped["stdout"],
            stderr_truncated=process.journal.dropped["stderr"],
        )

    async def stream(self, id: str, *, replay: bool = True, follow: bool = True) -> AsyncGenerator[LogEvent, None]:
        """The log as events: what there is, then what comes, then how it ended."""
        process = self.find(id)
        decoders = {name: codecs.getincrementaldecoder("utf-8")("replace") for name in ("stdout", "stderr")}
        async for entry in process.journal.read(replay=replay, follow=follow):
            raw = process.encoding == "base64"
            data = process.text(entry.data) if raw else decoders[entry.stream].decode(entry.data)
            if data:
                yield LogEvent(type=entry.stream, process_id=process.info.id, timestamp=entry.at, data=data)
        if process.ended.is_set():
            info = process.info
            said = info.error or f"Process {info.status} with exit code {info.exit_code}"
            yield LogEvent(type="exit", process_id=info.id, exit_code=info.exit_code, data=said)

    # -- ending --------------------------------------------------------------------------------------------------------

    async def kill(self, id: str, request: KillProcess) -> ProcessInfo:
        number = signal_number(request.signal)
        process = self.find(id)
        if process.ended.is_set() or process.child is None:
            return process.info
        if number in (signals.SIGTERM, signals.SIGKILL, signals.SIGINT, signals.SIGHUP, signals.SIGQUIT):
            process.why_killed = f"It was ended by {signals.Signals(number).name} on request."
            await end_tree(process.child, number, request.grace / 1000)
            await process.ended.wait()
        else:
            await process.child.kill(number)
        return process.info

    async def kill_all(self) -> int:
        running = [process.info.id for process in self._processes.values() if not process.ended.is_set()]
        await asyncio.gather(*(self.kill(id, KillProcess()) for id in running))
        return len(running)

    def forget(self, id: str) -> None:
        """One that has ended, so that its id can be used again."""
        process = self.find(id)
        if process.ended.is_set():
            self._processes.pop(process.info.id).journal.discard()

    async def cleanup(self) -> int:
        finished = [id for id, process in self._processes.items() if process.ended.is_set()]
        for id in finished:
            self._processes.pop(id).journal.discard()
        return len(finished)

    # -- talking and waiting -------------------------------------------------------------------------------------------

    async def write(self, id: str, data: bytes, eof: bool = False) -> None:
        process = self.find(id)
        if not data:
            # Nothing is lost if it has ended meanwhile, perhaps because of what it read.
            if eof:
                async with process.writing:
                    process.close_stdin()
            return
        async with process.writing:
            if process.stdin < 0:
                raise ProcessExitedError(f"The standard input of process {id!r} is closed.")
            try:
                await process.write(data)
            except BrokenPipeError:
                process.close_stdin()
                raise ProcessExitedError(f"Process {id!r} no longer reads its standard input.") from None
            if eof:
                process.close_stdin()

    async def wait(self, id: str, request: WaitRequest) -> WaitResult:
        process = self.find(id)
        if request.until == "log" and not request.pattern:
            raise InvalidRequestError("To wait for a log line, give a `pattern` to look for.")
        if request.until == "port" and request.port is None:
            raise InvalidRequestError("To wait for a port, give a `port`.")
        given = request.timeout if request.until == "exit" or "timeout" in request.model_fields_set else WAIT
        seconds = None if given is None else given / 1000
        try:
            async with process.portal.clock.timeout(seconds):
                if request.until == "exit":
                    await process.ended.wait()
                    return WaitResult(exit_code=process.info.exit_code)
                if request.until == "log":
                    return await self._wait_for_log(process, request)
                return await self._wait_for_port(process, request)
        except TimeoutError:
            what = {"exit": "end", "log": f"print {request.pattern!r}", "port": f"open port {request.port}"}
            raise WaitTimeoutError(
                f"Process {id!r} did not {what[request.until]} within {seconds:g} seconds.",
                hint="Look at its logs, or give it more time.",
            ) from None

    async def _wait_for_port(self, process: Process, request: WaitRequest) -> WaitResult:
        assert request.port is not None
        opens = asyncio.ensure_future(
            port_opens(
                process.portal,
                request.port,
                mode=request.mode,
                path=request.path,
                status_min=request.status_min,
                status_max=request.status_max,
            )
        )
        ends = asyncio.ensure_future(process.ended.wait())
        try:
            await asyncio.wait({opens, ends}, return_when=asyncio.FIRST_COMPLETED)
            if opens.done():
                return opens.result()
            raise self._exited(process, f"port {request.port} opened")
        finally:
            opens.cancel()
            ends.cancel()

    async def _wait_for_log(self, process: Process, request: WaitRequest) -> WaitResult:
        assert request.pattern is not None
        lines = _lines(process)
        try:
            if request.regex:
                found = await _search(process, request.pattern, lines)
                if found is not None:
                    return found
            else:
                async for line in lines:
                    if request.pattern in line:
                        return WaitResult(line=line)
        finally:
            await lines.aclose()
        raise self._exited(process, f"{request.pattern!r} appeared in its log")

    def _exited(self, process: Process, what: str) -> ProcessExitedError:
        info = process.info
        return ProcessExitedError(
            f"Process {info.id!r} ended (exit code {info.exit_code}) before {what}.",
            hint="Look at its logs.",
            details={"exitCode": info.exit_code, "status": info.status.value},
        )

    def take_leave(self) -> None:
        """Everything inside is about to be asked to end."""
        for process in self._processes.values():
            process.asked_to_end = not process.ended.is_set()

    def last_words(self) -> dict[str, Sequence[str]]:
        """After ``take_leave`` and the end of the machine: who ended when asked, and who had to be killed."""
        asked = [process.info for process in self._processes.values() if process.asked_to_end]
        ended = [info.id for info in asked if info.exit_code is not None]
        return {"ended": ended, "killed": [info.id for info in asked if info.exit_code is None]} if asked else {}

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for process in self._processes.values():
            if not process.ended.is_set():
                self._finish(process, ProcessStatus.KILLED, None, "The sandbox was stopped.")
            process.journal.discard()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _lines(process: Process) -> AsyncGenerator[str, None]:
    """The log line by line, both streams, also the last one without an end."""
    rest = {"stdout": b"", "stderr": b""}
    async for entry in process.journal.read():
        *whole, rest[entry.stream] = (rest[entry.stream] + entry.data).split(b"\n")
        for line in whole:
            yield line[:LINE_LIMIT].decode(errors="replace").rstrip("\r")
        rest[entry.stream] = rest[entry.stream][:LINE_LIMIT]
    for line in rest.values():
        if line:
            yield line.decode(errors="replace")


async def _search(process: Process, pattern: str, lines: AsyncIterator[str]) -> WaitResult | None:
    """Match a user's regular expression inside the sandbox: one can be written that never ends, and here it would hold
    up everyone."""
    async with Tool(process.portal, "match", {"pattern": pattern}, stdin=True) as tool:

        async def feed() -> None:
            with contextlib.suppress(BrokenPipeError):
                async for line in lines:
                    await tool.write(json.dumps(line).encode() + b"\n")
            tool.end_input()

        feeding = asyncio.get_running_loop().create_task(feed())
        try:
            async for found in tool.lines():
                groups = [None if group is None else str(group) for group in found["match"]]
                return WaitResult(line=str(found["line"]), match=groups)
            await tool.finish()
            return None
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)


def signal_number(value: str | int) -> int:
    """15, "15", "TERM" and "SIGTERM" are all the same signal."""
    text = str(value).upper()
    try:
        number = int(text) if text.isdigit() else getattr(signals, text if text.startswith("SIG") else f"SIG{text}")
        return int(signals.Signals(number))
    except (ValueError, AttributeError, TypeError):
        raise InvalidRequestError(f"{value!r} is not a signal.", hint="Use a name like SIGTERM or a number.") from None
