"""One session: its queue of prompts, its sandbox, and those who watch.

Everything that takes time is done by one task (``_drive``), one step after the other; it is woken (``kick``) whenever
something changed. What comes from the sandbox is written down and acknowledged beside it.
"""

from __future__ import annotations

import asyncio
import secrets
import time
import traceback
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any

import structlog

from skerry.agents.sessions import life
from skerry.agents.sessions.asking import Asking, not_asked
from skerry.agents.sessions.behalf import on_behalf_of
from skerry.agents.sessions.berth import Berth, Line
from skerry.agents.sessions.hub import Hub
from skerry.agents.sessions.journal import Bounds, Journal, clean
from skerry.agents.sessions.life import Times
from skerry.agents.sessions.models import MessageStatus, PermissionReply, SandboxStatus, SessionStatus
from skerry.agents.sessions.spawner import Attendance, Spawner
from skerry.agents.sessions.state import State
from skerry.control.registry import Registry
from skerry.control.session_rows import EventRow, MessageRow, SessionRow, SessionRows
from skerry.errors import ConflictError, PushFailedError, SessionArchivedError, SkerryError
from skerry.models import now

log = structlog.get_logger(__name__)

AGAIN = 5.0
"""Seconds until something that failed unexpectedly is tried again."""
LOST = "sandbox_lost"


class Session:
    def __init__(
        self,
        row: SessionRow,
        rows: SessionRows,
        registry: Registry,
        spawner: Spawner,
        times: Times,
        clock: Callable[[], float],
        bounds: Bounds,
    ) -> None:
        self.hub = Hub()
        self._rows = rows
        self._state = State(row, rows, self.hub)
        self._berth = Berth(self._state, registry, spawner, times, clock, self.kick)
        self._asking = Asking(times.push, self._berth.say)
        self._journal = Journal(row.id, rows, self.hub, bounds)
        self._times = times
        self._clock = clock
        self._wanted = False
        """Whether a sandbox is wanted though nothing waits: somebody types."""
        self._snapshot_due: str | None = None
        self._stopping: str | None = None
        self._sent: str | None = None
        """The prompt that this connection of the bridge was told of."""
        self._ending: tuple[SandboxStatus, str] | None = None
        self._said_refusal = 0.0
        self._dirty = False
        self._driver: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self.used_at = time.monotonic()
        self.opening = asyncio.Lock()
        """Held by who opens a pull request: two at once are to find the same."""

    # -- what is known -------------------------------------------------------------------------------------------------

    @property
    def id(self) -> str:
        return self.row.id

    @property
    def row(self) -> SessionRow:
        return self._state.row

    @property
    def status(self) -> SandboxStatus:
        return self._state.sandbox_status

    @property
    def attendance(self) -> Attendance | None:
        return self._berth.attendance

    @property
    def at_rest(self) -> bool:
        """Whether nothing is lost if it is forgotten here."""
        done = self._driver is None or self._driver.done()
        return done and not (self._berth.live or len(self.hub) or self._timer or self._ending or self._dirty)

    def context(self) -> Context:
        return on_behalf_of(self.row.owner)

    # -- what people ask for -------------------------------------------------------------------------------------------

    async def prompt(self, message: MessageRow) -> int:
        """Queue it; its place in the queue, 1 for the one that is next."""
        position = await self._rows.add_message(message)
        if self.row.status in (SessionStatus.CREATED, SessionStatus.COMPLETED):
            await self.set_status(SessionStatus.ACTIVE)
        self.touch()
        queued = {"messageId": message.id, "position": position, "content": message.content, "author": message.author}
        self.hub.tell({"type": "prompt_queued", **queued})
        self.kick()
        return position

    async def stop(self) -> bool:
        """Stop what is being worked at, or would be if its sandbox were there and free; whether there was something."""
        message = await self._rows.processing(self.id)
        waits = message is None
        if message is None:
            message = await self._take_next()
        if message is None:
            return False
        self._stopping = message.id
        self.touch()
        if waits and not self._berth.useful:
            await self._give_up("It was stopped.")  # it may take long to come, and may never
        else:
            await self._berth.say({"type": "stop", "messageId": message.id})
            self.kick()
        return True

    async def answer(self, permission: str, reply: PermissionReply, by: str) -> None:
        """Give the agent the answer that it waits for, and see that it has it."""
        self.touch()
        if await self._rows.processing(self.id) is None:
            raise not_asked(permission)
        if not self._berth.useful:
            raise ConflictError("The session's sandbox is not there just now.", hint="Wait until it is back.")
        await self._asking.answer(permission, reply, by)

    def warm(self) -> None:
        """Somebody types: there will be a prompt soon."""
        self.touch()
        if self.row.status == SessionStatus.ARCHIVED:
            return
        if self._berth.line is None and not self._berth.starting:
            self._wanted = True
            self.hub.tell({"type": "sandbox_warming"})
            self.kick()

    async def push(self, branch: str) -> str:
        """Push what is committed; the commit. A sandbox that was put away is brought back for it."""
        self.touch()
        if not self._berth.useful:
            await self._asking.sandbox(self._bring_back)
        return await self._asking.push(branch)

    async def _bring_back(self) -> None:
        if self.row.status == SessionStatus.ARCHIVED:
            raise SessionArchivedError("The session is archived.", hint="Unarchive it first.")
        kept = self.row.snapshot is not None and self._berth.keeping.possible
        if not (kept or self._berth.live):
            raise PushFailedError("The session has no sandbox just now.", hint="Send a prompt first.")
        self._wanted = True
        self.kick()

    async def set_status(self, status: SessionStatus) -> None:
        await self._state.set_status(status)

    def touch(self) -> None:
        self._berth.warned = False
        self.row.active_at = self._clock()

    def put_away(self, reason: str) -> None:
        """Stop the sandbox, if there is one, keeping what is in it."""
        if self._berth.live or self._berth.starting:
            self._end(SandboxStatus.STOPPED, reason)

    # -- what the sandbox says -----------------------------------------------------------------------------------------

    async def attach(self, line: Line, sandbox: str) -> None:
        """The bridge has come, or has come back."""
        if await self._berth.attach(line, sandbox):
            self._sent = None
            self.kick()
            if self._berth.useful:
                await self._asking.push_again()

    def detach(self, line: Line) -> None:
        """The connection is gone; the sandbox may come back."""
        if self._berth.detach(line):
            self.kick()

    async def hear(self, line: Line, message: dict[str, Any]) -> None:
        """What is an event is in the store before it is acknowledged."""
        if line is not self._berth.line:
            return  # another has taken its place, and will be told all of it
        await self._berth.heard()
        match kind := str(message.get("type")):
            case "ready":
                known = message.get("agentSession")
                await self._berth.ready(str(known) if known else None)
                self.kick()
            case "heartbeat":
                await self._berth.prepares(str(message.get("status")))
            case "snapshot_ready":
                self._berth.ready_for_snapshot()
            case _ if isinstance(message.get("id"), str):
                await self._event(kind, message)
                await line.send({"type": "ack", "id": message["id"]})

    async def _event(self, kind: str, message: dict[str, Any]) -> None:
        row = self._journal.row(kind, message)
        if kind == "execution_complete" and await self._given_up(row):
            return
        added = await self._journal.add(row)
        # Also for one that was there already: whoever wrote it down may not have come as far as this.
        if kind == "execution_complete" and row.message_id is not None:
            await self._completed(row.message_id, row.data)
        self._tell(added)  # last: who is told of an end finds the prompt ended
        self._asking.hear(message)
        await self._journal.bound()

    async def _given_up(self, row: EventRow) -> bool:
        """Whether the end of it was said already, because nobody could be expected to say it any more."""
        message = None if row.message_id is None else await self._rows.message(self.id, row.message_id)
        return message is not None and message.status == MessageStatus.FAILED and not row.data.get("success")

    def _tell(self, added: EventRow | None) -> None:
        if added is not None:
            self.row.active_at = self._clock()
            self._journal.tell(added)

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
        said = "The agent is done with a prompt." if error is None else f"A prompt failed: {error[:500]}"
        took = None if message.started_at is None else (now() - message.started_at).total_seconds()
        self._berth.note("session_message", said, {"message": message.id, "status": status.value}, took)

    async def failed(self, error: str) -> None:
        """The supervisor says that the sandbox is of no use."""
        self._end(SandboxStatus.FAILED, clean(error))  # in it is what programs have printed

    # -- time ----------------------------------------------------------------------------------------------------------

    def pulse(self) -> None:
        """Called every second: what should have happened and has not?"""
        now = self._clock()
        box = self._berth.box
        if self._ending is not None:
            return
        if (reason := self._berth.ended) is not None:
            # What ends before it is ready has failed to start, and counts as that.
            return self._end(SandboxStatus.FAILED if self.status in life.COMING else SandboxStatus.STALE, reason)
        if life.late(box, now, self._times):
            reason = f"The sandbox did not report within {self._times.stuck:g} seconds. {self._berth.complaint}"
            return self._end(SandboxStatus.FAILED, reason.strip())
        if life.stale(box, now, self._times):
            reason = f"Nothing was heard of the sandbox for {self._times.heartbeat:g} seconds."
            return self._end(SandboxStatus.STALE, reason)
        busy = self._sent is not None or self._snapshot_due is not None
        idle = life.idleness(box, now, self._times, clients=len(self.hub), busy=busy)
        if idle.action == "warn":
            self._berth.warned = True
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
        if self._berth.useful:
            self._wanted = False
            self._asking.sandbox_came()
            if self._snapshot_due is not None:
                reason, self._snapshot_due = self._snapshot_due, None
                if self.row.repo_name is not None:
                    await self._berth.say({"type": "refresh_diff"})
                await self._berth.snapshot(reason)
            return await self._give_prompt()
        working = await self._rows.processing(self.id) is not None
        if working or self._wanted or await self._rows.waiting(self.id):
            await self._get_sandbox()

    async def _give_prompt(self) -> None:
        """The one that is being worked at, should the bridge not know of it; or the next."""
        message = await self._rows.processing(self.id)
        if message is None:
            message = await self._take_next()
        if message is None:
            if self.status is not SandboxStatus.READY:
                await self._state.set_sandbox(SandboxStatus.READY)
            return
        if self._sent != message.id:
            self._sent = message.id
            await self._berth.say(
                {
                    "type": "prompt",
                    "messageId": message.id,
                    "content": message.content,
                    "model": message.model or self.row.model,
                    "author": message.author,
                    "identity": await self._identity(message.author),
                    "attachments": message.attachments,
                }
            )
            if self._stopping == message.id:
                await self._berth.say({"type": "stop", "messageId": message.id})
            if self.status is not SandboxStatus.RUNNING:
                await self._state.set_sandbox(SandboxStatus.RUNNING)

    async def _take_next(self) -> MessageRow | None:
        message = await self._rows.take_next(self.id)
        if message is not None:
            self.hub.tell({"type": "processing_status", "isProcessing": True, "messageId": message.id})
        return message

    async def _identity(self, author: str | None) -> dict[str, str] | None:
        """In whose name is committed what is done for them; None if they have not said."""
        who = None if author is None else await self._rows.participant(self.id, author)
        return None if who is None or who.email is None else {"name": who.name or who.user, "email": who.email}

    # -- the sandbox ---------------------------------------------------------------------------------------------------

    async def _get_sandbox(self) -> None:
        now = self._clock()
        decision = life.start(self._berth.box, now, self._times, snapshots=self._berth.keeping.possible)
        if decision.action == "refuse" and now - self._said_refusal > self._times.breaker_window:
            self._said_refusal = now
            error = f"{decision.reason} {self.row.error or ''}".strip()
            self.hub.tell({"type": "sandbox_error", "error": error, "refused": True})
        if decision.action == "refuse":
            self._asking.sandbox_came(PushFailedError(f"There is no sandbox to push from. {decision.reason}"))
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
        try:
            await self._berth.spawn(snapshot, self.context())
        except SkerryError as error:
            return await self._over(SandboxStatus.FAILED, error.message)
        self._wanted = False

    async def _over(self, status: SandboxStatus, reason: str) -> None:
        """The sandbox is done with. What it said is said first: from now on it is not let in again."""
        keep = await self._berth.condemn(status, reason)
        self._asking.fail("The sandbox has ended.")
        if status is SandboxStatus.FAILED:
            self._asking.sandbox_came(PushFailedError(f"There is no sandbox to push from. {reason}"))
        await self._give_up(reason)
        await self._berth.leave(reason, keep=keep)
        over = status is SandboxStatus.STOPPED and self.row.status == SessionStatus.ACTIVE
        if over and not await self._rows.waiting(self.id):
            await self.set_status(SessionStatus.COMPLETED)

    async def _give_up(self, reason: str) -> None:
        """What was being worked at will not be finished."""
        message = await self._rows.processing(self.id)
        if message is None:
            return
        stopped = self._stopping == message.id
        error, code = ("It was stopped.", "aborted") if stopped else (reason, LOST)
        data = {"success": False, "error": error, "code": code, "messageId": message.id}
        id = f"{message.id}-{secrets.token_hex(4)}"
        added = await self._journal.add(EventRow(self.id, id, "execution_complete", message.id, data))
        await self._finish(message, MessageStatus.FAILED, error)
        self._tell(added)

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
        if self._berth.live and self.row.sandbox_id is not None:
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
        if self._berth.live:
            await self._state.set(sandbox_status=SandboxStatus.PENDING.value)  # no snapshot of what goes
            await self._over(SandboxStatus.STOPPED, "The session was deleted.")
        await self._berth.keeping.forget()

    async def aside(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Do something on behalf of the session's owner, whoever asks."""
        return await asyncio.get_running_loop().create_task(work, context=self.context())
