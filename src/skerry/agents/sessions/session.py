"""One session: its queue of prompts, its sandbox, and those who watch.

Everything that takes time is done by one task (``_drive``), one step after the other; it is woken (``kick``) whenever
something changed. What comes from the sandbox is written down and acknowledged beside it.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
import traceback
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, Protocol

import structlog

from skerry.agents.sessions import life, tokens
from skerry.agents.sessions.hub import Hub
from skerry.agents.sessions.life import Box, Times
from skerry.agents.sessions.models import MessageStatus, SandboxStatus, SessionStatus
from skerry.agents.sessions.push import Pushes
from skerry.agents.sessions.spawner import Attendance, Spawner
from skerry.control.actor import Caller, actor, caller
from skerry.control.registry import Registry
from skerry.control.session_rows import EventRow, MessageRow, SessionRow, SessionRows
from skerry.errors import PushFailedError, SkerryError
from skerry.models import CreateSnapshot, KeyScope

log = structlog.get_logger(__name__)

ACTOR = "session"
SNAPSHOT_PATIENCE = 5.0
"""Seconds that the bridge has to say that it is ready for a snapshot; it is taken then in any case."""
HEARD_EVERY = 20.0
"""Seconds between two times that a heartbeat is written down."""
OVER_CODE = 4410
AGAIN = 5.0
"""Seconds until something that failed unexpectedly is tried again."""
LARGEST_EVENT = 4 * 2**20
LOST = "sandbox_lost"


def on_behalf_of(owner: str) -> Context:
    """In which what is done is done for an owner, whoever asks."""
    context = Context()
    context.run(caller.set, Caller(ACTOR, owner=owner, scope=KeyScope.USE))
    context.run(actor.set, ACTOR)
    return context


class Line(Protocol):
    """The bridge's connection."""

    async def send(self, message: dict[str, Any]) -> None: ...

    async def close(self, code: int) -> None: ...


class Session:
    def __init__(
        self,
        row: SessionRow,
        rows: SessionRows,
        registry: Registry,
        spawner: Spawner,
        times: Times,
        clock: Callable[[], float],
    ) -> None:
        self.row = row
        self.hub = Hub()
        self.pushes = Pushes(times.push)
        self.line: Line | None = None
        self.attendance: Attendance | None = None
        self._rows = rows
        self._registry = registry
        self._spawner = spawner
        self._times = times
        self._clock = clock
        self._starting = False
        self._warned = False
        self._wanted = False
        """Whether a sandbox is wanted though nothing waits: somebody types."""
        self._snapshot_due: str | None = None
        self._ready_for_snapshot: asyncio.Event | None = None
        self._stopping: str | None = None
        self._sent: str | None = None
        """The prompt that this connection of the bridge was told of."""
        self._ending: tuple[SandboxStatus, str] | None = None
        self._said_refusal = 0.0
        self._written = 0.0
        self._dirty = False
        self._driver: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self.used_at = time.monotonic()

    # -- what is known -------------------------------------------------------------------------------------------------

    @property
    def id(self) -> str:
        return self.row.id

    @property
    def status(self) -> SandboxStatus:
        return SandboxStatus(self.row.sandbox_status)

    @property
    def box(self) -> Box:
        row = self.row
        return Box(
            status=self.status,
            connected=self.line is not None,
            starting=self._starting,
            spawned_at=row.spawned_at,
            heard_at=row.heard_at,
            active_at=row.active_at,
            warned=self._warned,
            snapshot=row.snapshot,
            failures=row.failures,
            failed_at=row.failed_at,
        )

    @property
    def can_snapshot(self) -> bool:
        return self._registry.provider.capabilities().snapshots != "none"

    @property
    def live(self) -> bool:
        return self.line is not None or self.attendance is not None or self.status in life.COMING | life.THERE

    @property
    def at_rest(self) -> bool:
        """Whether nothing is lost if it is forgotten here."""
        done = self._driver is None or self._driver.done()
        return done and not (self.live or len(self.hub) or self._timer or self._ending or self._dirty)

    def context(self) -> Context:
        return on_behalf_of(self.row.owner)

    # -- what people ask for -------------------------------------------------------------------------------------------

    async def prompt(self, message: MessageRow) -> int:
        """Queue it; its place in the queue, 1 for the one that is next."""
        position = await self._rows.add_message(message)
        if self.row.status in (SessionStatus.CREATED, SessionStatus.COMPLETED):
            await self.set_status(SessionStatus.ACTIVE)
        await self.touch()
        queued = {"messageId": message.id, "position": position, "content": message.content, "author": message.author}
        self.hub.tell({"type": "prompt_queued", **queued})
        self.kick()
        return position

    async def stop(self) -> bool:
        """Stop what is being worked at; whether something was."""
        message = await self._rows.processing(self.id)
        if message is None:
            return False
        self._stopping = message.id
        await self.touch()
        if self.line is not None:
            await self._say({"type": "stop", "messageId": message.id})
        return True

    async def warm(self) -> None:
        """Somebody types: there will be a prompt soon."""
        await self.touch()
        if self.line is None and not self._starting:
            self._wanted = True
            self.hub.tell({"type": "sandbox_warming"})
            self.kick()

    async def push(self, branch: str) -> str:
        if self.line is None:
            raise PushFailedError("The session has no sandbox just now.", hint="Send a prompt first.")
        await self.touch()
        return await self.pushes.wait(branch, self._say)

    async def set_status(self, status: SessionStatus) -> None:
        await self._set(status=status.value)
        self.hub.tell({"type": "session_status", "status": status.value})

    async def touch(self) -> None:
        self._warned = False
        self.row.active_at = self._clock()

    def put_away(self, reason: str) -> None:
        """Stop the sandbox, keeping what is in it."""
        self._end(SandboxStatus.STOPPED, reason)

    # -- what the sandbox says -----------------------------------------------------------------------------------------

    async def attach(self, line: Line, sandbox: str) -> None:
        """The bridge has come, or has come back."""
        if sandbox != self.row.sandbox_id or self.status in life.OVER:
            return await line.close(OVER_CODE)  # done with, while it was being let in
        before, self.line = self.line, line
        if before is not None:
            await before.close(1001)  # it has noticed before us that this one is dead
        self._sent = None
        now = self._clock()
        self.row.active_at = self.row.active_at or now
        changes: dict[str, Any] = {"heard_at": now, "failures": 0, "failed_at": None, "error": None}
        if self.status in life.COMING:
            changes["sandbox_status"] = SandboxStatus.READY.value
        await self._set(**changes)
        self.hub.tell({"type": "sandbox_ready"})
        self._tell_status()
        self.kick()

    def detach(self, line: Line) -> None:
        """The connection is gone; the sandbox may come back."""
        if self.line is line:
            self.line = None
            self.row.heard_at = self._clock()
            self.kick()

    async def hear(self, line: Line, message: dict[str, Any]) -> None:
        """What is an event is in the store before it is acknowledged."""
        if line is not self.line:
            return  # another has taken its place, and will be told all of it
        now = self._clock()
        self.row.heard_at = now
        if now - self._written > HEARD_EVERY:
            self._written = now
            await self._rows.update(self.id, heard_at=now, active_at=self.row.active_at)
        kind = str(message.get("type"))
        if kind == "ready":
            if message.get("agentSession"):
                await self._set(agent_session=str(message["agentSession"])[:200])
        elif kind == "snapshot_ready":
            if self._ready_for_snapshot is not None:
                self._ready_for_snapshot.set()
        elif kind != "heartbeat" and isinstance(message.get("id"), str):
            await self._event(kind, message)
            await line.send({"type": "ack", "id": message["id"]})

    async def _event(self, kind: str, message: dict[str, Any]) -> None:
        id = str(message["id"])[:200]
        about = message.get("messageId")
        data = {name: value for name, value in message.items() if name not in ("id", "type", "sandboxId", "timestamp")}
        if len(json.dumps(data)) > LARGEST_EVENT:
            data = {"messageId": about, "truncated": True, "success": bool(data.get("success"))}
        row = EventRow(self.id, id, kind[:100], str(about)[:200] if about else None, _clean(data))
        if kind == "execution_complete" and await self._given_up(row):
            return
        await self.record(row)
        # Also for one that was there already: whoever wrote it down may not have come as far as this.
        if kind == "execution_complete" and row.message_id is not None:
            await self._completed(row.message_id, row.data)
        elif kind in ("push_complete", "push_error"):
            self.pushes.hear(message)

    async def _given_up(self, row: EventRow) -> bool:
        """Whether the end of it was said already, because nobody could be expected to say it any more."""
        message = None if row.message_id is None else await self._rows.message(self.id, row.message_id)
        return message is not None and message.status == MessageStatus.FAILED and not row.data.get("success")

    async def record(self, row: EventRow) -> None:
        added = await self._rows.add_event(row)
        if added is not None:
            self.row.active_at = self._clock()
            shown = {"id": added.id, "number": added.number, "type": added.type, "messageId": added.message_id}
            event = {**added.data, **shown, "at": added.at.isoformat()}
            self.hub.tell({"type": "sandbox_event", "event": event})

    async def _completed(self, id: str, data: dict[str, Any]) -> None:
        message = await self._rows.message(self.id, id)
        if message is None:
            return
        success = bool(data.get("success"))
        status = MessageStatus.COMPLETED if success else MessageStatus.FAILED
        if message.status == MessageStatus.PROCESSING:
            await self._finish(message, status, None if success else str(data.get("error") or "It failed."))
            self._snapshot_due = "execution_complete"
            self.kick()
        elif message.status == MessageStatus.FAILED and success:
            # It was given up, and had in fact been done: the word of it only came late.
            await self._rows.finish(id, status.value, None)

    async def _finish(self, message: MessageRow, status: MessageStatus, error: str | None) -> None:
        await self._rows.finish(message.id, status.value, error)
        self._sent = None
        if self._stopping == message.id:
            self._stopping = None
        self.hub.tell({"type": "processing_status", "isProcessing": False, "messageId": message.id})

    async def failed(self, error: str) -> None:
        """The supervisor says that the sandbox is of no use."""
        self._end(SandboxStatus.FAILED, error)

    # -- time ----------------------------------------------------------------------------------------------------------

    def pulse(self) -> None:
        """Called every second: what should have happened and has not?"""
        now = self._clock()
        box = self.box
        if self._ending is not None:
            return
        attended = self.attendance
        if attended is not None and self._registry.look(attended.sandbox) is not attended.runtime:
            return self._end(SandboxStatus.STALE, "The sandbox has ended.")
        if life.late(box, now, self._times):
            return self._end(SandboxStatus.FAILED, f"The sandbox did not report within {self._times.stuck:g} seconds.")
        if life.stale(box, now, self._times):
            reason = f"Nothing was heard of the sandbox for {self._times.heartbeat:g} seconds."
            return self._end(SandboxStatus.STALE, reason)
        busy = self._sent is not None or self._snapshot_due is not None
        idle = life.idleness(box, now, self._times, clients=len(self.hub), busy=busy)
        if idle.action == "warn":
            self._warned = True
            minutes = self._times.extension / 60
            message = f"The session is idle; its sandbox is put away in {minutes:g} minutes."
            self.hub.tell({"type": "sandbox_warning", "message": message})
        elif idle.action == "stop":
            self._end(SandboxStatus.STOPPED, "The session was idle.")

    def _end(self, status: SandboxStatus, reason: str) -> None:
        if self._ending is None:
            self._ending = (status, reason)
            self.kick()

    # -- one step after the other --------------------------------------------------------------------------------------

    def kick(self) -> None:
        self._dirty = True
        if not self._closed and (self._driver is None or self._driver.done()):
            self._driver = asyncio.get_running_loop().create_task(self._drive(), context=self.context())

    def kick_at(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        delay = max(0.0, when - self._clock())
        self._timer = asyncio.get_running_loop().call_later(delay, self._ring)

    def _ring(self) -> None:
        self._timer = None
        self.kick()

    async def _drive(self) -> None:
        while self._dirty and not self._closed:
            self._dirty = False
            try:
                await self._step()
            except SkerryError as error:
                log.warning("session_step_failed", session=self.id, code=error.code, message=error.message)
                self.kick_at(self._clock() + AGAIN)
            except Exception as error:  # noqa: BLE001 - a session that stands still helps nobody
                frames = [f"{f.filename}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)]
                log.error("session_step_failed", session=self.id, error=type(error).__qualname__, frames=frames[-6:])
                self.kick_at(self._clock() + AGAIN)

    async def _step(self) -> None:
        if self._ending is not None:
            status, reason = self._ending
            try:
                await self._over(status, reason)
            finally:
                self._ending = None
            self._dirty = True
            return
        if self.row.status == SessionStatus.ARCHIVED:
            return
        if self.line is not None and self.status in life.THERE:
            if self._snapshot_due is not None:
                await self._snapshot()
            return await self._give_prompt()
        working = await self._rows.processing(self.id) is not None
        if working or self._wanted or await self._rows.waiting(self.id):
            await self._get_sandbox()

    async def _give_prompt(self) -> None:
        """The one that is being worked at, should the bridge not know of it; or the next."""
        message = await self._rows.processing(self.id)
        if message is None:
            message = await self._rows.take_next(self.id)
            if message is not None:
                self.hub.tell({"type": "processing_status", "isProcessing": True, "messageId": message.id})
        if message is None:
            if self.status is not SandboxStatus.READY:
                await self._set_sandbox(SandboxStatus.READY)
            return
        if self._sent != message.id:
            self._sent = message.id
            await self._say(
                {
                    "type": "prompt",
                    "messageId": message.id,
                    "content": message.content,
                    "model": message.model or self.row.model,
                    "author": message.author,
                    "attachments": message.attachments,
                }
            )
            if self._stopping == message.id:
                await self._say({"type": "stop", "messageId": message.id})
            if self.status is not SandboxStatus.RUNNING:
                await self._set_sandbox(SandboxStatus.RUNNING)

    async def _say(self, message: dict[str, Any]) -> None:
        line = self.line
        if line is not None:
            try:
                await line.send(message)
            except (ConnectionError, RuntimeError):
                self.detach(line)

    # -- the sandbox ---------------------------------------------------------------------------------------------------

    async def _get_sandbox(self) -> None:
        now = self._clock()
        decision = life.start(self.box, now, self._times, snapshots=self.can_snapshot)
        if decision.action == "refuse" and now - self._said_refusal > self._times.breaker_window:
            self._said_refusal = now
            self.hub.tell({"type": "sandbox_error", "error": f"{decision.reason} {self.row.error or ''}".strip()})
        if decision.action in ("wait", "refuse"):
            if decision.again is not None:
                self.kick_at(decision.again)
            return
        if decision.action == "nothing":
            return
        if self.status in life.COMING | life.THERE:
            self._end(SandboxStatus.STALE, decision.reason)  # and then it is decided anew, by what is left of it
            return
        await self._spawn(self.row.snapshot if decision.action == "restore" else None)

    async def _spawn(self, snapshot: str | None) -> None:
        self._starting = True
        try:
            token = tokens.fresh()
            warmed = None if snapshot is not None else self._spawner.warmed(self.row)
            sandbox = f"{self.id}-{secrets.token_hex(3)}"
            # Written down first: whatever comes from this sandbox will be known, and nothing from another.
            await self._set(
                sandbox_id=sandbox,
                sandbox_token=tokens.digest(token),
                sandbox_status=SandboxStatus.SPAWNING.value,
                spawned_at=self._clock(),
                heard_at=None,
                error=None,
            )
            self.hub.tell({"type": "sandbox_spawning"})
            self._tell_status()
            try:
                await self._set_sandbox(SandboxStatus.CONNECTING)
                begin = snapshot or warmed
                restored = snapshot is not None
                self.attendance = await self._spawner.start(self.row, sandbox, token, begin, restored=restored)
            except SkerryError as error:
                if error.code == "snapshot_not_found":  # somebody deleted it
                    if snapshot is not None:
                        await self._set(snapshot=None)
                    elif warmed is not None:
                        self._spawner.warm.forget(warmed)
                return await self._over(SandboxStatus.FAILED, error.message)
            self._wanted = False
            self._spawner.warm_up(self.row, self.context())
            if snapshot is not None:
                self.hub.tell(
                    {"type": "sandbox_restored", "message": "The sandbox is as it was.", "snapshot": snapshot}
                )
        finally:
            self._starting = False

    async def _over(self, status: SandboxStatus, reason: str) -> None:
        """The sandbox is done with. What it said is said first: from now on it is not let in again."""
        used = self.status in life.THERE
        changes: dict[str, Any] = {"sandbox_status": status.value, "error": reason[:4000]}
        if status is SandboxStatus.STOPPED:
            changes["error"] = None
        if status is SandboxStatus.FAILED:
            changes |= {"failures": life.failures(self.box, self._clock(), self._times), "failed_at": self._clock()}
        await self._set(**changes)
        self._tell_status()
        if status is SandboxStatus.FAILED:
            self.hub.tell({"type": "sandbox_error", "error": reason})
        elif status is SandboxStatus.STALE:
            self.hub.tell({"type": "sandbox_warning", "message": reason})
        await self._give_up(reason)
        kept = True
        if used and self.row.sandbox_id is not None and self.can_snapshot:
            kept = await self._keep_files("heartbeat_timeout" if status is SandboxStatus.STALE else "inactivity")
        line, self.line = self.line, None
        if line is not None:
            try:
                await line.send({"type": "shutdown", "reason": reason})
                await line.close(OVER_CODE)
            except (ConnectionError, RuntimeError):
                pass
        self.pushes.fail("The sandbox has ended.")
        attendance, self.attendance = self.attendance, None
        if attendance is not None:
            await attendance.close()
        if self.row.sandbox_id is not None and kept:
            await self._spawner.discard(self._inside_id(self.row.sandbox_id))
        elif self.row.sandbox_id is not None:
            message = f"No snapshot could be taken; the files are in sandbox {self.row.sandbox_id!r}."
            self.hub.tell({"type": "sandbox_warning", "message": message})

    async def _give_up(self, reason: str) -> None:
        """What was being worked at will not be finished."""
        message = await self._rows.processing(self.id)
        if message is None:
            return
        stopped = self._stopping == message.id
        error, code = ("It was stopped.", "aborted") if stopped else (reason, LOST)
        data = {"success": False, "error": error, "code": code, "messageId": message.id}
        await self.record(
            EventRow(self.id, f"{message.id}-{secrets.token_hex(4)}", "execution_complete", message.id, data)
        )
        await self._finish(message, MessageStatus.FAILED, error)

    async def _snapshot(self) -> None:
        """Between two prompts, so that it holds the whole of one and nothing of the next."""
        reason, self._snapshot_due = self._snapshot_due or "", None
        if not self.can_snapshot or self.line is None:
            return
        await self._set_sandbox(SandboxStatus.SNAPSHOTTING)
        self._ready_for_snapshot = asyncio.Event()
        try:
            await self._say({"type": "snapshot", "reason": reason})
            async with asyncio.timeout(SNAPSHOT_PATIENCE):
                await self._ready_for_snapshot.wait()
        except TimeoutError:
            pass
        finally:
            self._ready_for_snapshot = None
        await self._keep_files(reason)

    async def _keep_files(self, reason: str) -> bool:
        assert self.row.sandbox_id is not None
        before = self.row.snapshot
        try:
            sandbox = self._inside_id(self.row.sandbox_id)
            made = await self._registry.snapshots.create(sandbox, CreateSnapshot(labels={"session": self.id}))
        except SkerryError as error:
            log.warning("session_snapshot_failed", session=self.id, code=error.code, message=error.message)
            self.hub.tell({"type": "sandbox_warning", "message": f"No snapshot could be taken: {error.message}"})
            return error.code == "sandbox_not_found"
        await self._set(snapshot=made.id)
        self.hub.tell({"type": "snapshot_saved", "snapshot": made.id, "reason": reason})
        if before is not None:
            try:
                await self._registry.snapshots.delete(before, force=True)
            except SkerryError as error:
                log.info("session_snapshot_left", session=self.id, snapshot=before, code=error.code)
        return True

    # -- within --------------------------------------------------------------------------------------------------------

    def _inside_id(self, sandbox: str) -> str:
        return Caller(ACTOR, owner=self.row.owner).id(sandbox)

    async def _set(self, **changes: Any) -> None:
        await self._rows.update(self.id, **changes)
        for name, value in changes.items():
            setattr(self.row, name, value)

    async def _set_sandbox(self, status: SandboxStatus) -> None:
        await self._set(sandbox_status=status.value)
        self._tell_status()

    def _tell_status(self) -> None:
        self.hub.tell({"type": "sandbox_status", "status": self.row.sandbox_status})

    # -- beginning and end ---------------------------------------------------------------------------------------------

    async def settle(self) -> None:
        """A server before this one has left it: put right what is not as it says."""
        if self.status in life.COMING | life.THERE:
            self._end(SandboxStatus.STALE, "The server ended while the sandbox ran.")
        self.kick()

    async def close(self) -> None:
        """The server ends. The sandbox ends with it, and its files are kept."""
        if self._timer is not None:
            self._timer.cancel()
        if self._driver is not None and not self._driver.done():
            await asyncio.wait([self._driver])
        self._closed = True
        await self.aside(self._leave())

    async def _leave(self) -> None:
        if self.live and self.row.sandbox_id is not None:
            await self._over(SandboxStatus.STOPPED, "The server was stopped.")

    async def remove(self) -> None:
        """Everything of it but its row."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._driver is not None and not self._driver.done():
            await asyncio.wait([self._driver])
        await self.aside(self._remove())
        self.hub.close()

    async def _remove(self) -> None:
        if self.live:
            await self._set(sandbox_status=SandboxStatus.PENDING.value)  # no snapshot of what goes
            await self._over(SandboxStatus.STOPPED, "The session was deleted.")
        if self.row.snapshot is not None:
            try:
                await self._registry.snapshots.delete(self.row.snapshot, force=True)
            except SkerryError as error:
                log.info("session_snapshot_left", session=self.id, snapshot=self.row.snapshot, code=error.code)

    async def aside(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Do something on behalf of the session's owner, whoever asks."""
        return await asyncio.get_running_loop().create_task(work, context=self.context())


def _clean(value: Any) -> Any:
    """Without what no database holds: the agent's tools may print anything."""
    if isinstance(value, str):
        return value.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_clean(str(key)): _clean(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_clean(each) for each in value]
    if isinstance(value, float) and value - value != 0:
        return None
    return value
