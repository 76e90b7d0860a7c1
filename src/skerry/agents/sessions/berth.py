"""The sandbox of a session: started when it is wanted, heard of while it is there, left when it is done with."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from contextvars import Context
from typing import Any, Protocol

from skerry.agents.sessions import life, tokens
from skerry.agents.sessions.journal import clean
from skerry.agents.sessions.keeping import Keeping
from skerry.agents.sessions.life import Box, Times
from skerry.agents.sessions.models import SandboxStatus
from skerry.agents.sessions.spawner import Attendance, Spawner
from skerry.agents.sessions.state import State
from skerry.control.registry import Registry
from skerry.errors import SkerryError

SNAPSHOT_PATIENCE = 5.0
"""Seconds that the bridge has to say that it is ready for a snapshot; it is taken then in any case."""
HEARD_EVERY = 20.0
"""Seconds between two times that a heartbeat is written down."""
OVER_CODE = 4410
PREPARING = {status.value: status for status in (SandboxStatus.SYNCING, SandboxStatus.WARMING)}
"""What the bridge says of a sandbox that has come and is not ready."""


class Line(Protocol):
    """The bridge's connection."""

    async def send(self, message: dict[str, Any]) -> None: ...

    async def close(self, code: int) -> None: ...


class Berth:
    def __init__(
        self,
        state: State,
        registry: Registry,
        spawner: Spawner,
        times: Times,
        clock: Callable[[], float],
        lost: Callable[[], None],
    ) -> None:
        """``lost`` is called when the bridge cannot be told something any more."""
        self.line: Line | None = None
        self.attendance: Attendance | None = None
        self.warned = False
        self.starting = False
        self.keeping = Keeping(state, registry)
        self._state = state
        self._registry = registry
        self._spawner = spawner
        self._times = times
        self._clock = clock
        self._lost = lost
        self._written = 0.0
        self._ready_for_snapshot: asyncio.Event | None = None

    @property
    def box(self) -> Box:
        row = self._state.row
        return Box(
            status=self._state.sandbox_status,
            connected=self.line is not None,
            starting=self.starting,
            spawned_at=row.spawned_at,
            heard_at=row.heard_at,
            active_at=row.active_at,
            warned=self.warned,
            snapshot=row.snapshot,
            failures=row.failures,
            failed_at=row.failed_at,
        )

    @property
    def live(self) -> bool:
        there = self._state.sandbox_status in life.COMING | life.THERE
        return self.line is not None or self.attendance is not None or there

    @property
    def useful(self) -> bool:
        """Whether it can be given something to do."""
        return self.line is not None and self._state.sandbox_status in life.THERE

    @property
    def ended(self) -> str | None:
        """Why the sandbox that was started is of no use any more, if so."""
        attended = self.attendance
        if attended is None:
            return None
        if self._registry.look(attended.sandbox) is not attended.runtime:
            return "The sandbox has ended."
        return attended.left

    @property
    def complaint(self) -> str:
        """What is wrong, in the words of what runs in it."""
        return "" if self.attendance is None else self.attendance.complaint

    # -- the bridge ----------------------------------------------------------------------------------------------------

    async def attach(self, line: Line, sandbox: str) -> bool:
        """The bridge has come, or has come back; whether it was let in."""
        state = self._state
        if sandbox != state.row.sandbox_id or state.sandbox_status in life.OVER:
            await line.close(OVER_CODE)  # done with, while it was being let in
            return False
        before, self.line = self.line, line
        if before is not None:
            await before.close(1001)  # it has noticed before us that this one is dead
        now = self._clock()
        state.row.active_at = state.row.active_at or now
        await state.set(heard_at=now)
        if state.sandbox_status in life.THERE:
            self._tell_ready()
        return True

    def detach(self, line: Line) -> bool:
        """The connection is gone; the sandbox may come back. Whether it was the one in use."""
        if self.line is not line:
            return False
        self.line = None
        self._state.row.heard_at = self._clock()
        return True

    async def say(self, message: dict[str, Any]) -> None:
        line = self.line
        if line is not None:
            try:
                await line.send(message)
            except (ConnectionError, RuntimeError):
                if self.detach(line):
                    self._lost()

    async def heard(self) -> None:
        """It lives."""
        row, now = self._state.row, self._clock()
        row.heard_at = now
        if now - self._written > HEARD_EVERY:
            self._written = now
            await self._state.set(heard_at=now, active_at=row.active_at)

    async def prepares(self, status: str) -> None:
        """What a heartbeat says: the repository is fetched, the agent is started."""
        wanted, at = PREPARING.get(status), self._state.sandbox_status
        if wanted is not None and at in life.COMING and at is not wanted:
            await self._state.set_sandbox(wanted)

    async def ready(self, agent_session: str | None) -> None:
        """Repository and agent are there; ``agent_session`` is the agent's own name for what it remembers."""
        state = self._state
        if agent_session is not None and agent_session != state.row.agent_session:
            await state.set(agent_session=clean(agent_session[:200]))
            self.note("session_created", "The agent's session was begun.", {"agentSession": state.row.agent_session})
        if state.sandbox_status in life.COMING:
            await state.set(sandbox_status=SandboxStatus.READY.value, failures=0, failed_at=None, error=None)
            self._tell_ready()

    def note(self, kind: str, message: str, details: dict[str, Any], took: float | None = None) -> None:
        """For the sandbox's history, and for webhooks."""
        if self._state.sandbox is not None:
            about = {"session": self._state.row.id, **details}
            self._registry.history.record(self._state.sandbox, kind, message, details=about, took=took)

    def ready_for_snapshot(self) -> None:
        if self._ready_for_snapshot is not None:
            self._ready_for_snapshot.set()

    def _tell_ready(self) -> None:
        self._state.hub.tell({"type": "sandbox_ready"})
        self._state.hub.tell({"type": "sandbox_status", "status": self._state.row.sandbox_status})

    # -- starting ------------------------------------------------------------------------------------------------------

    async def spawn(self, snapshot: str | None, context: Context) -> None:
        """Anew, or from the session's own snapshot. What cannot be started raises."""
        self.starting = True
        try:
            await self._spawn(snapshot)
        finally:
            self.starting = False
        self._spawner.warm_up(self._state.row, context)
        if snapshot is not None:
            restored = {"message": "The sandbox is as it was.", "snapshot": snapshot}
            self._state.hub.tell({"type": "sandbox_restored", **restored})

    async def _spawn(self, snapshot: str | None) -> None:
        state, row = self._state, self._state.row
        token = tokens.fresh()
        warmed = None if snapshot is not None else self._spawner.warmed(row)
        sandbox = f"{row.id}-{secrets.token_hex(3)}"
        state.hub.tell({"type": "sandbox_spawning"})
        # Written down first: whatever comes from this sandbox will be known, and nothing from another.
        await state.set_sandbox(
            SandboxStatus.SPAWNING,
            sandbox_id=sandbox,
            sandbox_token=tokens.digest(token),
            spawned_at=self._clock(),
            heard_at=None,
            error=None,
        )

        async def made() -> None:
            await state.set_sandbox(SandboxStatus.CONNECTING)

        begin, restored = snapshot or warmed, snapshot is not None
        try:
            self.attendance = await self._spawner.start(row, sandbox, token, begin, restored=restored, made=made)
        except SkerryError as error:
            if error.code == "snapshot_not_found":  # somebody deleted it
                if snapshot is not None:
                    await state.set(snapshot=None)
                elif warmed is not None:
                    self._spawner.warm.forget(warmed)
            raise

    # -- ending --------------------------------------------------------------------------------------------------------

    async def condemn(self, status: SandboxStatus, reason: str) -> bool:
        """From now on it is not let in again. Whether there is something in it to be kept."""
        state = self._state
        used = state.sandbox_status in life.THERE
        changes: dict[str, Any] = {"error": None if status is SandboxStatus.STOPPED else reason[:4000]}
        if status is SandboxStatus.FAILED:
            changes |= {"failures": life.failures(self.box, self._clock(), self._times), "failed_at": self._clock()}
        await state.set_sandbox(status, **changes)
        if status is SandboxStatus.FAILED:
            state.hub.tell({"type": "sandbox_error", "error": reason})
        elif status is SandboxStatus.STALE:
            state.hub.tell({"type": "sandbox_warning", "message": reason})
        return used

    async def leave(self, reason: str, *, keep: bool) -> None:
        """Keep what is in it, send the bridge away, and destroy it."""
        state, kept = self._state, True
        if keep and not self.keeping.possible:
            message = "This provider has no snapshots: what was not pushed is gone with the sandbox."
            state.hub.tell({"type": "sandbox_warning", "message": message})
        elif keep and state.sandbox is not None:
            stale = state.sandbox_status is SandboxStatus.STALE
            kept = await self.keeping.keep("heartbeat_timeout" if stale else "inactivity")
        line, self.line = self.line, None
        if line is not None:
            try:
                await line.send({"type": "shutdown", "reason": reason})
                await line.close(OVER_CODE)
            except (ConnectionError, RuntimeError):
                pass
        attendance, self.attendance = self.attendance, None
        if attendance is not None:
            await attendance.close()
        if state.sandbox is not None and kept:
            await self._spawner.discard(state.sandbox)
        elif state.sandbox is not None:
            message = f"No snapshot could be taken; the files are in sandbox {state.row.sandbox_id!r}."
            state.hub.tell({"type": "sandbox_warning", "message": message})

    # -- snapshots -----------------------------------------------------------------------------------------------------

    async def snapshot(self, reason: str) -> None:
        """Between two prompts, so that it holds the whole of one and nothing of the next."""
        if not self.keeping.possible or self.line is None:
            return
        await self._state.set_sandbox(SandboxStatus.SNAPSHOTTING)
        self._ready_for_snapshot = asyncio.Event()
        try:
            await self.say({"type": "snapshot", "reason": reason})
            async with asyncio.timeout(SNAPSHOT_PATIENCE):
                await self._ready_for_snapshot.wait()
        except TimeoutError:
            pass
        finally:
            self._ready_for_snapshot = None
        await self.keeping.keep(reason)
