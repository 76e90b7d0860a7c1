"""Sessions: shells by name, each with its own directory and variables, running beside each other."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from skerry.errors import (
    ConflictError,
    FileNotFoundInSandboxError,
    SandboxLostError,
    SessionExistsError,
    SessionNotFoundError,
    SkerryError,
    UnsupportedError,
)
from skerry.models import CreateSession, SessionInfo, now
from skerry.portal.contract import Portal
from skerry.runtime.capture import Capture, Pump
from skerry.runtime.environment import DEFAULTS, WORKSPACE, check_cwd, check_env, check_id, merged
from skerry.runtime.flow import Flow
from skerry.runtime.shell import Outcome, Shell, ShellGone, Task

DEFAULT = "default"
ATTEMPTS = 3
"""How many shells are killed before a command can be given to them until it counts as killed itself."""


class Session:
    """A shell that is started when it is needed and replaced when it ends; its commands run in order."""

    def __init__(
        self,
        id: str,
        portal: Portal,
        prefixes: Callable[[], str],
        *,
        env: Mapping[str, str],
        cwd: str,
        isolated: bool,
        command_timeout: float | None = None,
        request: CreateSession,
        flow: Flow | None = None,
        kind: type[Shell] = Shell,
    ) -> None:
        self.id = id
        self._flow = flow
        self.request = request
        self.portal = portal
        self.isolated = isolated
        self.command_timeout = command_timeout
        self._env = {**env, "SESSION_ID": id, "SESSION_CWD": cwd, "SESSION_ISOLATED": "1" if isolated else "0"}
        self._cwd = cwd
        self._prefixes = prefixes
        self._kind = kind
        self._shell: Shell | None = None
        self._lock = asyncio.Lock()
        self._state: tuple[str, dict[str, str]] = (cwd, self._env)
        self._stale = False
        self._created = now()
        self._commands = 0
        self._closed: SkerryError | None = None

    def info(self) -> SessionInfo:
        return SessionInfo(
            id=self.id,
            cwd=self._state[0],
            env=self.request.env,
            isolated=self.isolated,
            created_at=self._created,
            busy=self._lock.locked(),
            commands=self._commands,
            command_timeout=self.command_timeout,
        )

    async def run(
        self,
        task: Task,
        on_stdout: Callable[[bytes], None],
        on_stderr: Callable[[bytes], None],
        *,
        timeout: float | None = None,
        on_start: Callable[[Sequence[Pump]], None] | None = None,
    ) -> Outcome:
        async with self._lock:
            self._commands += 1
            limit = timeout if timeout is not None else self.command_timeout
            for _ in range(ATTEMPTS):
                with contextlib.suppress(ShellGone):
                    return await self._once(task, on_stdout, on_stderr, timeout=limit, on_start=on_start)
            return Outcome(128 + signal.SIGKILL, shell_ended=True)

    async def _once(
        self, task: Task, on_stdout: Callable[[bytes], None], on_stderr: Callable[[bytes], None], **options: Any
    ) -> Outcome:
        shell = await self._ready()
        self._stale = True
        try:
            return await shell.run(task, on_stdout, on_stderr, **options)
        except (OSError, asyncio.CancelledError):
            caller = asyncio.current_task()
            if self._closed is None or (caller is not None and caller.cancelling()):
                raise
            raise self._closed from None  # while the command was put where the shell would find it
        finally:
            if not shell.alive and self._shell is shell:
                self._shell = None
                self._state = (self._cwd, self._env)
                await shell.close()

    async def warm(self) -> None:
        async with self._lock:
            await self._ready()

    async def _ready(self) -> Shell:
        if self._closed is not None:
            raise self._closed
        if self._shell is not None:
            await self._shell.recovered()
        if self._shell is None or not self._shell.alive:
            shell = self._kind(self.portal, self._prefixes(), self._flow)
            try:
                await shell.start(env=self._env, cwd=self._cwd)
            except (FileNotFoundError, NotADirectoryError):
                # Someone removed the directory this session started in. A shell at the root is of more use than none.
                await shell.start(env=self._env, cwd="/")
            if self._closed is not None:  # meanwhile, when there was no shell to end yet
                await shell.close()
                raise self._closed
            self._shell = shell
        return self._shell

    async def state(self) -> tuple[str, dict[str, str]]:
        """Directory and exported variables as the shell has them now; as it last had them while it is busy."""
        if self._shell is not None and self._stale and not self._lock.locked():
            captured = Capture()
            async with self._lock:
                with contextlib.suppress(ShellGone):
                    await self._once(Task(step="state"), captured.add, _nothing)
            words = captured.take().decode(errors="surrogateescape").split("\0")
            pairs = (word.partition("=") for word in words[1:] if "=" in word)
            if words[0].startswith("/"):
                self._state = (words[0], {name: value for name, _, value in pairs})
                self._stale = False
        return self._state

    async def close(self, why: SkerryError) -> None:
        """End the shell and all it started; commands that still queue get ``why``."""
        self._closed = why
        if self._shell is not None:
            await self._shell.close()
            self._shell = None


class Sessions:
    shell: type[Shell] = Shell

    def __init__(self, portal: Portal, env: Mapping[str, str]) -> None:
        self.portal = portal
        self.flow = Flow()
        self._env = merged(DEFAULTS, env)
        self._sessions: dict[str, Session] = {}
        self._counter = itertools.count(1)
        timeout = env.get("COMMAND_TIMEOUT_MS", "")
        self._timeout = int(timeout) / 1000 if timeout.isdigit() and int(timeout) > 0 else None

    @property
    def env(self) -> dict[str, str]:
        """What every command starts with."""
        return dict(self._env)

    @property
    def default_timeout(self) -> float | None:
        return self._timeout

    async def create(self, request: CreateSession) -> SessionInfo:
        """A new session, or the one that was created with the very same request."""
        id = request.id or f"session-{int(time.time() * 1000)}-{secrets.token_hex(3)}"
        check_id(id, "a session")
        check_env(request.env)
        check_cwd(request.cwd)
        old = self._sessions.get(id)
        if old is not None and old.request == request:
            return old.info()
        if old is not None or id == DEFAULT:
            raise SessionExistsError(
                f"Session {id!r} already exists, with other options.",
                hint="Use it, delete it first, or choose another id.",
            )
        try:
            await self.portal.stat(request.cwd)
        except OSError:
            if request.cwd != WORKSPACE:
                raise FileNotFoundInSandboxError(
                    f"The session's directory {request.cwd!r} does not exist.", hint="Make it first, with mkdir."
                ) from None
        portal, isolated = self.portal, False
        if request.isolation:
            with contextlib.suppress(UnsupportedError):
                portal, isolated = await self.portal.isolate(), True
        session = self._make(id, portal, isolated, request)
        if id in self._sessions:  # two at once
            await session.close(SessionExistsError(f"Session {id!r} already exists."))
            if isolated:
                await portal.close()
            raise SessionExistsError(f"Session {id!r} already exists.")
        self._sessions[id] = session
        return session.info()

    def _make(self, id: str, portal: Portal, isolated: bool, request: CreateSession) -> Session:
        timeout = request.command_timeout / 1000 if request.command_timeout else self._timeout
        return Session(
            id,
            portal,
            lambda: f"{portal.scratch}/{next(self._counter)}-",
            env=merged(self._env, request.env),
            cwd=request.cwd,
            isolated=isolated,
            command_timeout=timeout,
            request=request,
            flow=self.flow,
            kind=self.shell,
        )

    async def warm(self) -> None:
        """Start the default shell before anyone asks."""
        await self.find(DEFAULT).warm()

    def find(self, id: str) -> Session:
        """The session of that id; the default one exists as soon as it is asked for."""
        session = self._sessions.get(id)
        if session is None and id == DEFAULT:
            session = self._make(id, self.portal, False, CreateSession(id=DEFAULT, isolation=False))
            self._sessions[id] = session
        if session is None:
            raise SessionNotFoundError(
                f"Session {id!r} not found",
                hint="Create it first.",
                details={"availableSessions": sorted({DEFAULT, *self._sessions})},
            )
        return session

    def get(self, id: str) -> SessionInfo:
        return self.find(id).info()

    def list(self) -> list[SessionInfo]:
        return [session.info() for session in self._sessions.values()]

    async def delete(self, id: str) -> None:
        if id == DEFAULT:
            raise ConflictError(
                "The default session cannot be deleted.", hint="Run `exit` in it to begin again with a fresh shell."
            )
        session = self.find(id)
        del self._sessions[id]
        with contextlib.suppress(SandboxLostError):
            await session.close(SessionNotFoundError(f"Session {id!r} was deleted."))
        if session.isolated:
            await session.portal.close()

    async def close(self) -> None:
        gone = SandboxLostError("The sandbox is no longer running: it was stopped.")
        for session in list(self._sessions.values()):
            await session.close(gone)
        self._sessions.clear()


def _nothing(data: bytes) -> None:
    return None
