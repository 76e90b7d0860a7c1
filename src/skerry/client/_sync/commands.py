# Generated from src/skerry/client/_async/commands.py by scripts/generate_sync.py; change that file and run it again.
"""Commands and sessions."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from typing import Any
from urllib.parse import quote

from skerry.client._sync.connection import Link, Stream
from skerry.client.concurrency import call
from skerry.client.values import EnvChanges, SafeResult, Seconds, SessionRef, decoded, given, milliseconds, session_name
from skerry.client.wire import Written, stdin_text, stream_error
from skerry.errors import InternalError, SkerryError
from skerry.models import Encoding, ExecEvent, ExecResult, SessionInfo, SessionList, now

_MINIMAL = {"Prefer": "return=minimal"}

Listener = Callable[[str], Any]
OutputListener = Callable[[str, str], Any]


class Commands:
    _link: Link
    _bound: str | None = None

    def exec(
        self,
        command: str,
        args: Sequence[str] | None = None,
        *,
        cwd: str | None = None,
        env: EnvChanges | None = None,
        timeout: Seconds | None = None,
        session: SessionRef = "default",
        stdin: str | bytes | None = None,
        encoding: Encoding = "utf-8",
        on_stdout: Listener | None = None,
        on_stderr: Listener | None = None,
        on_output: OutputListener | None = None,
        stream: bool = False,
    ) -> ExecResult:
        """Run a command to its end; a non-zero exit code is a result, not an exception.

        ``command`` is read by the session's shell; with ``args`` it is a program that is run without one. ``timeout``
        is in seconds: a command that outlives it is killed with everything it started and returns exit code 124 with
        ``timed_out``. ``session=None`` runs in a fresh shell. The callbacks (or ``stream=True`` with the client's own
        ``on_output``) get the output while it is written.
        """
        hooks = self._link.hooks
        call(hooks.on_command_start, command, list(args or ()))
        try:
            body = self._body(command, args, cwd, env, timeout, session, stdin, encoding)
            if stream or on_stdout or on_stderr or on_output:
                result = self._exec_live(body, on_stdout, on_stderr, on_output)
            else:
                response = self._link.request("POST", "/exec", json=body, headers=_MINIMAL)
                result = ExecResult.model_validate_json(response.content)
                if hooks.on_output is not None:
                    for name, data in (("stdout", result.stdout), ("stderr", result.stderr)):
                        if data:
                            call(hooks.on_output, name, data)
        except SkerryError:
            call(hooks.on_command_complete, False, -1)
            raise
        call(hooks.on_command_complete, result.success, result.exit_code)
        if result.encoding != encoding:
            result.stdout = decoded(result.stdout, result.encoding).decode(errors="replace")
            result.stderr = decoded(result.stderr, result.encoding).decode(errors="replace")
            result.encoding = encoding
        return result

    def exec_stream(
        self,
        command: str,
        args: Sequence[str] | None = None,
        *,
        cwd: str | None = None,
        env: EnvChanges | None = None,
        timeout: Seconds | None = None,
        session: SessionRef = "default",
        stdin: str | bytes | None = None,
        encoding: Encoding = "utf-8",
    ) -> Stream[ExecEvent]:
        """Run a command and iterate over its events: start, stdout, stderr, then complete or error.

        Closing the iterator kills the command. ``timeout`` is in seconds. With ``encoding="base64"`` the data of the
        output events are the exact bytes, in base64.
        """
        body = self._body(command, args, cwd, env, timeout, session, stdin, encoding)
        return Stream(self._hooked(self._link.events(ExecEvent, "POST", "/exec/stream", json=body), command, args))

    def safe_exec(
        self,
        command: str,
        args: Sequence[str] | None = None,
        *,
        cwd: str | None = None,
        env: EnvChanges | None = None,
        timeout: Seconds | None = None,
        session: SessionRef = "default",
    ) -> SafeResult:
        """Run a command without raising: ``{output, exitCode}``, or ``{error, exitCode}``, -1 for a sandbox error."""
        try:
            result = self.exec(command, args, cwd=cwd, env=env, timeout=timeout, session=session)
        except SkerryError as error:
            return {"error": str(error), "exitCode": -1}
        if result.success:
            return {"output": result.stdout, "exitCode": 0}
        return {"error": result.stderr or result.stdout, "exitCode": result.exit_code}

    def list_sessions(self) -> list[SessionInfo]:
        """The sessions that are alive in this sandbox."""
        return (self._link.get(SessionList, "/sessions")).sessions

    def delete_session(self, session: str) -> None:
        """End a session and what runs in it."""
        self._link.request("DELETE", f"/sessions/{quote(session, safe='')}")

    def _body(
        self,
        command: str,
        args: Sequence[str] | None,
        cwd: str | None,
        env: EnvChanges | None,
        timeout: Seconds | None,
        session: SessionRef,
        stdin: str | bytes | None,
        encoding: Encoding,
    ) -> dict[str, Any]:
        body: dict[str, Any] = {"command": command}
        if args is not None:
            body["args"] = list(args)
        name = self._bound or session_name(session)
        if name != "default":
            body["session"] = name
        if isinstance(stdin, bytes):
            stdin, encoding = stdin_text(stdin, encoding)
        elif stdin is not None and encoding == "base64":
            stdin, encoding = stdin_text(stdin.encode(), encoding)
        if encoding != "utf-8":
            body["encoding"] = encoding
        body.update(given(cwd=cwd, env=dict(env) if env else None, timeout=milliseconds(timeout), stdin=stdin))
        return body

    def _hooked(
        self, events: Generator[ExecEvent, None], command: str, args: Sequence[str] | None
    ) -> Generator[ExecEvent, None]:
        hooks = self._link.hooks
        call(hooks.on_command_start, command, list(args or ()))
        try:
            for event in events:
                if event.type in ("stdout", "stderr"):
                    call(hooks.on_output, event.type, event.data or "")
                elif event.type == "complete":
                    call(hooks.on_command_complete, event.exit_code == 0, event.exit_code)
                elif event.type == "error":
                    call(hooks.on_command_complete, False, -1)
                yield event
        finally:
            events.close()

    def _exec_live(
        self,
        body: dict[str, Any],
        on_stdout: Listener | None,
        on_stderr: Listener | None,
        on_output: OutputListener | None,
    ) -> ExecResult:
        started, began = now(), time.monotonic()
        encoding = body.get("encoding", "utf-8")
        written = {"stdout": Written(encoding), "stderr": Written(encoding)}
        events = self._link.events(ExecEvent, "POST", "/exec/stream", json=body)
        try:
            for event in events:
                if event.type in written:
                    data = event.data or ""
                    call(self._link.hooks.on_output, event.type, data)
                    call(on_output, event.type, data)
                    call(on_stdout if event.type == "stdout" else on_stderr, data)
                    written[event.type].add(data)
                elif event.type == "complete":
                    return ExecResult(
                        stdout=written["stdout"].text(),
                        stderr=written["stderr"].text(),
                        exit_code=event.exit_code if event.exit_code is not None else -1,
                        success=event.exit_code == 0,
                        command=event.command or body["command"],
                        duration=round((time.monotonic() - began) * 1000, 3),
                        timestamp=started,
                        session_id=event.session_id,
                        timed_out=bool((event.result or {}).get("timedOut")),
                        stdout_truncated=written["stdout"].dropped,
                        stderr_truncated=written["stderr"].dropped,
                        encoding=encoding,
                    )
                elif event.type == "error":
                    raise stream_error({"code": event.code, "message": event.error})
        finally:
            events.close()
        raise InternalError("The stream of the command's output ended before the command did.")
