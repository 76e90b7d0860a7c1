"""Background processes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Literal
from urllib.parse import quote

from skerry.client._async.connection import AsyncLink, AsyncStream
from skerry.client.concurrency import AsyncBackground, AsyncContent, body_async, call_async
from skerry.client.values import EnvChanges, Seconds, SessionRef, given, milliseconds, session_name
from skerry.client.wire import flag
from skerry.errors import ProcessNotFoundError, SkerryError
from skerry.models import (
    Encoding,
    KilledCount,
    LogEvent,
    ProcessInfo,
    ProcessList,
    ProcessLogs,
    ProcessStatus,
    WaitResult,
)

Signal = str | int


class AsyncProcess:
    """A background process, and what was last known about it; ``refresh`` asks again."""

    def __init__(self, link: AsyncLink, info: ProcessInfo) -> None:
        self._link = link
        self._path = f"/processes/{quote(info.id, safe='')}"
        self._watcher: AsyncBackground | None = None
        self.info = info

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} {self.status} {self.command!r}>"

    @property
    def id(self) -> str:
        return self.info.id

    @property
    def pid(self) -> int | None:
        return self.info.pid

    @property
    def command(self) -> str:
        return self.info.command

    @property
    def status(self) -> ProcessStatus:
        return self.info.status

    @property
    def exit_code(self) -> int | None:
        return self.info.exit_code

    async def refresh(self) -> AsyncProcess:
        """Ask the server how the process is."""
        self.info = await self._link.get(ProcessInfo, self._path)
        return self

    async def kill(self, signal: Signal = "SIGTERM", *, grace: Seconds | None = None) -> AsyncProcess:
        """Signal it and everything it started; what is left after ``grace`` seconds (5) is killed."""
        body = {"signal": signal, **given(grace=milliseconds(grace))}
        self.info = await self._link.post(ProcessInfo, f"{self._path}/kill", body)
        return self

    async def logs(self) -> ProcessLogs:
        """All it has written so far."""
        return await self._link.get(ProcessLogs, f"{self._path}/logs")

    def stream_logs(self, *, replay: bool = True, follow: bool = True) -> AsyncStream[LogEvent]:
        """Iterate over what it writes: stdout, stderr, then exit. Closing the iterator leaves the process alone."""
        params = {"replay": flag(replay), "follow": flag(follow)}
        return AsyncStream(self._link.events(LogEvent, "GET", f"{self._path}/logs/stream", params=params))

    async def write_stdin(self, data: AsyncContent = b"", *, eof: bool = False) -> None:
        """Write to its standard input; ``eof`` closes it afterwards."""
        await self._link.request("POST", f"{self._path}/stdin", content=body_async(data), params={"eof": flag(eof)})

    async def wait_for_exit(self, timeout: Seconds | None = None) -> int:
        """Its exit code, once it has ended. Raises ``WaitTimeoutError`` after ``timeout`` seconds."""
        result = await self._wait({"until": "exit", **given(timeout=milliseconds(timeout))})
        await self.refresh()
        return result.exit_code if result.exit_code is not None else -1

    async def wait_for_log(
        self, pattern: str | re.Pattern[str], *, regex: bool = False, timeout: Seconds | None = None
    ) -> WaitResult:
        """The first line of its log that holds ``pattern``, a text or a regular expression, old lines included."""
        compiled = isinstance(pattern, re.Pattern)
        text = pattern.pattern if isinstance(pattern, re.Pattern) else pattern
        body = {"until": "log", "pattern": text, "regex": regex or compiled}
        return await self._wait(body | given(timeout=milliseconds(timeout)))

    async def wait_for_port(
        self,
        port: int,
        *,
        mode: Literal["tcp", "http"] = "http",
        path: str = "/",
        status: tuple[int, int] = (200, 399),
        timeout: Seconds | None = None,
    ) -> WaitResult:
        """Wait until something answers on ``port``; raises ``ProcessExitedError`` if the process ends before that."""
        body = {"until": "port", "port": port, "mode": mode, "path": path}
        limits = {"statusMin": status[0], "statusMax": status[1]}
        return await self._wait(body | limits | given(timeout=milliseconds(timeout)))

    async def _wait(self, body: dict[str, Any]) -> WaitResult:
        return await self._link.post(WaitResult, f"{self._path}/wait", body)

    def _watch(
        self,
        on_output: Callable[[str, str], Any] | None,
        on_exit: Callable[[int | None], Any] | None,
        on_error: Callable[[Exception], Any] | None,
    ) -> None:
        async def listen() -> None:
            try:
                async for event in self.stream_logs():
                    if event.type in ("stdout", "stderr"):
                        await call_async(on_output, event.type, event.data or "")
                    elif event.type == "exit":
                        await call_async(on_exit, event.exit_code)
            except SkerryError as error:
                await call_async(on_error, error)

        self._watcher = AsyncBackground(listen)


class AsyncProcesses:
    _link: AsyncLink
    _bound: str | None = None

    async def start_process(
        self,
        command: str,
        args: Sequence[str] | None = None,
        *,
        process_id: str | None = None,
        cwd: str | None = None,
        env: EnvChanges | None = None,
        session: SessionRef = None,
        timeout: Seconds | None = None,
        encoding: Encoding | None = None,
        auto_cleanup: bool | None = None,
        on_start: Callable[[AsyncProcess], Any] | None = None,
        on_output: Callable[[str, str], Any] | None = None,
        on_exit: Callable[[int | None], Any] | None = None,
        on_error: Callable[[Exception], Any] | None = None,
    ) -> AsyncProcess:
        """Start a command in the background and return at once. ``timeout``, in seconds, ends it if it runs longer."""
        body = {"command": command} | given(
            args=list(args) if args is not None else None,
            processId=process_id,
            cwd=cwd,
            env=dict(env) if env else None,
            session=self._bound or session_name(session),
            timeout=milliseconds(timeout),
            encoding=encoding,
            autoCleanup=auto_cleanup,
        )
        process = AsyncProcess(self._link, await self._link.post(ProcessInfo, "/processes", body))
        await call_async(on_start, process)
        if on_output or on_exit or on_error:
            process._watch(on_output, on_exit, on_error)
        return process

    async def list_processes(
        self, *, status: ProcessStatus | str | None = None, session: SessionRef = None
    ) -> list[AsyncProcess]:
        """The processes of this sandbox, also those that have ended and were not cleaned up."""
        params = given(status=str(status) if status else None, session=session_name(session))
        processes = (await self._link.get(ProcessList, "/processes", params)).processes
        return [AsyncProcess(self._link, info) for info in processes]

    async def get_process(self, process: str | int) -> AsyncProcess | None:
        """The process with this id, or this pid; None when there is none."""
        if isinstance(process, int):
            # Pids are used again; the one that still runs is the one that is meant.
            found = [one for one in await self.list_processes() if one.pid == process]
            return next((one for one in found if not one.status.ended), found[-1] if found else None)
        try:
            info = await self._link.get(ProcessInfo, f"/processes/{quote(process, safe='')}")
        except ProcessNotFoundError:
            return None
        return AsyncProcess(self._link, info)

    async def kill_process(
        self, process: str | int, signal: Signal = "SIGTERM", *, grace: Seconds | None = None
    ) -> AsyncProcess:
        """Signal a process, given by id or pid, and everything it started."""
        return await (await self._known(process)).kill(signal, grace=grace)

    async def kill_all_processes(self) -> int:
        """End every background process; how many there were."""
        response = await self._link.request("DELETE", "/processes")
        return KilledCount.model_validate_json(response.content).killed

    async def cleanup_completed_processes(self) -> int:
        """Forget the processes that have ended; how many there were."""
        return (await self._link.post(KilledCount, "/processes/cleanup")).killed

    async def get_process_logs(self, process: str) -> ProcessLogs:
        """All a process has written so far."""
        return await self._link.get(ProcessLogs, f"/processes/{quote(process, safe='')}/logs")

    def stream_process_logs(self, process: str, *, replay: bool = True, follow: bool = True) -> AsyncStream[LogEvent]:
        """Iterate over what a process writes: stdout, stderr, then exit."""
        path = f"/processes/{quote(process, safe='')}/logs/stream"
        params = {"replay": flag(replay), "follow": flag(follow)}
        return AsyncStream(self._link.events(LogEvent, "GET", path, params=params))

    async def wait_for_port(
        self,
        port: int,
        *,
        mode: Literal["tcp", "http"] = "tcp",
        path: str = "/",
        timeout: Seconds | None = None,
    ) -> WaitResult:
        """Wait until something inside the sandbox answers on ``port``."""
        body = {"mode": mode, "path": path} | given(timeout=milliseconds(timeout))
        return await self._link.post(WaitResult, f"/ports/{port}/wait", body)

    async def spawn(self, command: str) -> int:
        """Start a command in the background; its pid."""
        pid = (await self.start_process(command)).pid
        return pid if pid is not None else -1

    async def is_process_running(self, process: str | int) -> bool:
        """Whether the process with this id or pid is still running."""
        found = await self.get_process(process)
        return found is not None and not found.status.ended

    async def _known(self, process: str | int) -> AsyncProcess:
        found = await self.get_process(process)
        if found is None:
            raise ProcessNotFoundError(
                f"There is no process {process!r} in sandbox {self._link.id!r}.", hint="list_processes() names them."
            )
        return found
