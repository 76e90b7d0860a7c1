"""One task at work: a sandbox, the repository, the agent, its answer, and what it changed.

How far it has come is in the store before the next step begins (``step``), so that another process can go on:

    waiting     nothing was done yet
    preparing   the sandbox is being made and the repository cloned: begun anew
    prompting   the agent works: asked to go on, in the same session
    collecting  the agent is through: what it changed is still to be collected
    leaving     all of that is in the store: the sandbox is still to be put away
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import structlog

from skerry import logs
from skerry.agents import artifacts
from skerry.agents.aside import NoChangesKnown
from skerry.agents.changes import Base, Changes
from skerry.agents.config import Preparation
from skerry.agents.contract import DIRECTORY, Agent, Prompt, Running
from skerry.agents.desk import Desk
from skerry.agents.hidden import Hidden
from skerry.agents.ids import nanoid
from skerry.agents.journal import Journal
from skerry.agents.models import (
    AgentEvent,
    AgentFault,
    ExecutionComplete,
    Permission,
    Retry,
    StepFinish,
    StepStart,
    Token,
    Tokens,
    ToolCall,
)
from skerry.agents.muster import Muster
from skerry.agents.task_models import CreateTask, TaskDiff, TaskStatus
from skerry.agents.workplace import Found, furnish
from skerry.control.actor import Caller, actor, caller
from skerry.control.inquiry import inquiry
from skerry.control.metrics import Metrics
from skerry.control.task_rows import TaskRow
from skerry.errors import AgentSessionNotFoundError, SandboxExistsError, SandboxNotFoundError, SkerryError
from skerry.models import CreateSandbox, KeyScope, Secrets, now, shown_id
from skerry.runtime.runtime import Runtime

log = structlog.get_logger(__name__)

ATTEMPTS = 3
"""How often a task is taken up again after its server ended; one that ends its server would do so for ever."""
WINDING_UP = 15.0
"""Seconds that an agent has to stop when it is told to."""
COLLECTING = 300.0
LONGEST_OUTPUT = 16 * 1024
"""Characters of a tool's output that are kept of each call."""
LONGEST_RESPONSE = 4 << 20
GO_ON = (
    "The server was restarted while you were working on this, so what ran has ended; the files are as you left them. "
    "Look at what is done already, do the rest, and finish. This is what you were asked to do:\n\n"
)


@dataclass(frozen=True, slots=True)
class Outcome:
    status: TaskStatus
    error: str | None = None
    code: str | None = None

    @classmethod
    def of(cls, error: SkerryError) -> Outcome:
        said = f"{error.message.rstrip('.')}. {error.hint}" if error.hint else error.message
        return cls(TaskStatus.FAILED, said, error.code)


COMPLETED = Outcome(TaskStatus.COMPLETED)
BROKEN = Outcome(TaskStatus.FAILED, "Something went wrong in the server; its log says what.", "internal_error")
CANCELLED = Outcome(TaskStatus.CANCELLED, "The task was cancelled.", "cancelled")


class Run:
    def __init__(
        self,
        desk: Desk,
        row: TaskRow,
        hidden: Hidden,
        snapshot: str | None = None,
        muster: Muster | None = None,
        fellow: Run | None = None,
    ) -> None:
        """``snapshot``: what to make the sandbox from, with the repository in it. ``muster``: with whom to begin.
        ``fellow``: one of the same team, which differs by its prompt, its agent and its model."""
        self.row = row
        self.request = CreateTask.model_validate(row.request)
        self._desk = desk
        self._hidden = hidden
        self._snapshot = snapshot
        self._muster = muster or Muster(())
        self.has_sandbox = False
        """Whether it was begun just now, with its sandbox, together with others."""
        self._journal = Journal(desk.rows, row.id, lambda: desk.told(row.id))
        self._prepared: Preparation
        self._secrets: Secrets
        if fellow is not None and (fellow.row.agent, fellow.row.model) == (row.agent, row.model):
            self._prepared, self._secrets = fellow._prepared, fellow._secrets
        else:
            self._prepared = desk.prepared(self.request, row.model, self.directory, hidden.config)
            given = CreateSandbox.model_validate({"secrets": hidden.secrets}).secrets
            self._secrets = {**self._prepared.secrets, **given}
        self._wanted = asyncio.Event()
        self._asked = asyncio.Event()
        self._runtime: Runtime | None = None
        self._running: Running | None = None
        self._answer = _Answer()
        self._tokens = Tokens.model_validate(row.tokens)
        self._cost = row.cost
        self._trouble: str | None = None
        """Why the model is asked again."""
        self._began = time.monotonic()

    @property
    def sandbox(self) -> str:
        assert self.row.sandbox_id is not None
        return self.row.sandbox_id

    @property
    def directory(self) -> str:
        return self.request.directory or DIRECTORY

    def cancel(self) -> None:
        """Stop the agent, keep what it has done."""
        self._wanted.set()

    async def cancelled(self) -> None:
        """When somebody wants it to stop."""
        await self._wanted.wait()

    async def go(self) -> None:
        """To the end of the task. Cancelled, it lets go of everything and leaves the task as it is."""
        inquiry.set(None)
        actor.set("task")
        caller.set(Caller("task", owner=self.row.owner, scope=KeyScope.USE))
        logs.about(owner=self.row.owner, user_id=self.row.user_id)
        self._journal.open()
        try:
            async with AsyncExitStack() as stack:
                try:
                    outcome = await self._supervised(stack)
                finally:
                    self._muster.do_without(self.row.id)
                if self._asked.is_set():
                    self._record("session_message", *_answered(outcome, self._cost))
                if self.row.step != "leaving":
                    if self._runtime is not None:
                        self._runtime = await self._awake(stack) or self._runtime
                    collected = await self._collected(outcome)
                    await self._save(step="leaving", error=outcome.error, error_code=outcome.code, **collected)
            await self._leave_sandbox()
            await self._end(outcome)
        finally:
            await asyncio.shield(self._journal.close())

    # -- the work ------------------------------------------------------------------------------------------------------

    async def _supervised(self, stack: AsyncExitStack) -> Outcome:
        """What the agent does, within its time, and until somebody wants it to stop."""
        if self._wanted.is_set():
            return CANCELLED
        work = asyncio.ensure_future(self._do(stack))
        wish = asyncio.ensure_future(self._wanted.wait())
        clock = asyncio.ensure_future(self._overtime())
        try:
            await asyncio.wait((work, wish, clock), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            await self._wind_up(work)
        finally:
            for each in (clock, wish, work):
                each.cancel()
            await asyncio.gather(clock, wish, work, return_exceptions=True)
        if self._wanted.is_set():
            return CANCELLED
        said = f"The agent was not through after {self.request.timeout:g} seconds."
        if self._trouble is not None:
            said += f" The last that was heard of its model: {self._trouble}"
        return Outcome(TaskStatus.FAILED, said, "timeout")

    async def _overtime(self) -> None:
        """When the agent has had its time; what comes before it has bounds of its own."""
        await self._asked.wait()
        await asyncio.sleep(self.request.timeout)

    async def _wind_up(self, work: asyncio.Future[Outcome]) -> None:
        """Have the agent stop by itself, so that it leaves its session in order; not for ever."""
        if self._running is None or self.row.session_id is None:
            return
        with suppress(SkerryError, OSError, TimeoutError):
            async with asyncio.timeout(WINDING_UP):
                await self._running.abort(self.row.session_id)
                await asyncio.wait((work,))

    async def _do(self, stack: AsyncExitStack) -> Outcome:
        try:
            if self.row.step == "leaving":
                return self._before()
            if self.row.step == "collecting":
                await self._desk.registry.get(self.sandbox)
                self._runtime = await stack.enter_async_context(self._desk.registry.use(self.sandbox))
                return self._before()
            resumed = self.row.step == "prompting" and self.row.session_id is not None
            if resumed:
                await self._desk.registry.get(self.sandbox)  # one that is gone is not made anew, and empty
            else:
                await self._begin_anew()
            self._runtime = await stack.enter_async_context(self._desk.registry.use(self.sandbox))
            found = None if resumed else await self._furnished(self._runtime)
            await self._muster.arrive(self.row.id)
            return await self._ask(self._runtime, found)
        except SkerryError as error:
            return Outcome.of(error) if self.row.error_code is None else self._before()
        except NoChangesKnown as error:
            return Outcome(TaskStatus.FAILED, str(error), "git_failed")
        except OSError as error:
            return Outcome(TaskStatus.FAILED, f"The sandbox could not be used: {error}.", "sandbox_lost")

    def _before(self) -> Outcome:
        """How the agent ended, according to the process that worked on this before."""
        if self.row.error_code in (None, CANCELLED.code):
            return COMPLETED if self.row.error_code is None else CANCELLED
        return Outcome(TaskStatus.FAILED, self.row.error, self.row.error_code)

    async def _begin_anew(self) -> None:
        """A sandbox; one that another process had begun to prepare is not to be trusted."""
        registry = self._desk.registry
        if not self.has_sandbox:
            if self.row.step == "preparing" and self.row.made_sandbox:
                with suppress(SandboxNotFoundError):
                    await registry.destroy(self.sandbox)
            await self._save(step="preparing", status=TaskStatus.RUNNING, started_at=self.row.started_at or now())
        self._journal.add("start", sandboxId=self.row.sandbox_id, createdNewSandbox=self.row.made_sandbox)
        self._journal.add("status", message="Preparing the sandbox.")
        if self.has_sandbox:
            return
        try:
            await registry.create(self.sandbox_request())
        except SandboxExistsError:
            if self._secrets and not self.row.made_sandbox:
                await registry.add_secrets(self.sandbox, self._secrets)

    def sandbox_request(self) -> CreateSandbox:
        """The sandbox that the task wants."""
        request, row = self.request, self.row
        labels = {"task": row.id, **request.labels}
        for name, value in (("team", row.team_id), ("userId", request.user_id)):
            if value:
                labels[name] = value
        given: dict[str, Any] = {"id": self.shown_sandbox, "env": request.env, "labels": labels}
        if request.image is not None:
            given["image"] = request.image
        if request.limits is not None:
            given["limits"] = request.limits
        if request.egress is not None:
            given["egress"] = request.egress
        if self._secrets:
            given["secrets"] = self._secrets
        if (snapshot := self._snapshot or request.snapshot) is not None:
            given["snapshot"] = snapshot
        elif row.provider != self._desk.registry.provider.capabilities().name:
            given["provider"] = row.provider
        given["toolboxes"] = [*dict.fromkeys([*self._prepared.toolboxes, *request.toolboxes])]
        return CreateSandbox.model_validate(given)

    @property
    def agent(self) -> Agent:
        return self._desk.agents[self.row.agent]

    @property
    def shown_sandbox(self) -> str:
        return shown_id(self.sandbox)

    async def _furnished(self, runtime: Runtime) -> Found:
        """The directory to work in."""
        if self._snapshot is not None:
            return Found(fresh=False)
        say = partial(self._journal.add, "status")
        return await furnish(runtime, self.directory, self.request, self._hidden, lambda text: say(message=text))

    async def _look(self, runtime: Runtime, found: Found) -> None:
        """Note what is there before the agent does anything."""
        try:
            base = await Changes(runtime, self.directory, self.row.id).begin(found.commit, fresh=found.fresh)
        except NoChangesKnown as error:
            self._journal.add("warning", message=f"There will be no diff: {error}")
            return
        await self._save(base=asdict(base))

    # -- the agent -----------------------------------------------------------------------------------------------------

    async def _ask(self, runtime: Runtime, found: Found | None) -> Outcome:
        """``found``: what there was in the directory; None if the agent has worked there before."""
        resumed = found is None
        self._running = running = await self._started(runtime, found)
        session = self.row.session_id
        if session is None:
            session = await running.create_session(_title(self.row))
            self._record("session_created", f"Session {session} was begun.", {}, session)
        await self._save(step="prompting", session_id=session, attempts=self.row.attempts + 1)
        said = "Going on where the server before ended." if resumed else "The agent is working."
        self._journal.add("status", message=said, sessionId=session)
        self._asked.set()
        text = GO_ON + self.row.message if resumed else self.row.message
        prompt = Prompt(text, _message_id(), model=self.row.model, system=self.request.system)
        async with aclosing(running.prompt(session, prompt)) as events:
            async for event in events:
                if self._answer.first is None:
                    self._answer.first = time.monotonic() - self._began
                    self._desk.registry.metrics.first_event(self._answer.first)
                if isinstance(event, ExecutionComplete):
                    return _outcome(event)
                await self._hear(event)
        return Outcome(TaskStatus.FAILED, "The agent ended without a word.", "agent_died")

    def _record(self, kind: str, message: str, details: dict[str, Any], session: str | None = None) -> None:
        """In the history of the sandbox, and so to those whom webhooks tell of it."""
        told = {"session": session or self.row.session_id, "task": self.row.id, **details}
        self._desk.registry.history.record(self.sandbox, kind, message, details=told)

    async def _started(self, runtime: Runtime, found: Found | None) -> Running:
        """The agent, started while it is looked what there is: neither knows of the other."""
        self._journal.add("status", message=f"Starting {self.row.agent}.")
        start = asyncio.ensure_future(self._start(runtime))
        look = None if found is None else asyncio.ensure_future(self._look(runtime, found))
        try:
            if look is not None:
                await look
            return await start
        finally:
            for each in (start, look):
                if each is not None:
                    each.cancel()
            await asyncio.gather(start, *(() if look is None else (look,)), return_exceptions=True)

    async def _start(self, runtime: Runtime) -> Running:
        setup = self._prepared.setup
        if self.row.made_sandbox and not self._hidden.secrets:  # what other secrets are for is not known
            setup = await self._desk.narrowed(self._prepared, runtime.sessions.env)
        return await self.agent.start(runtime, setup)

    async def _hear(self, event: AgentEvent) -> None:
        journal = self._journal
        if isinstance(event, Token):
            self._trouble = None
            if new := self._answer.hear(event.content):
                journal.add("chunk", content=new)
        elif isinstance(event, ToolCall):
            output = None if event.output is None else event.output[:LONGEST_OUTPUT]
            journal.add("tool_call", event=_plain(event.model_copy(update={"output": output})))
        elif isinstance(event, StepFinish):
            self._cost += event.cost
            self._tokens += event.tokens
            self._trouble = None
            journal.add("step_finish", event=_plain(event))
            with suppress(SkerryError):  # spent is spent, whatever becomes of this server; of its store not at once
                await self._save(tokens=self._tokens.model_dump(), cost=self._cost)
        elif isinstance(event, Permission):
            journal.add("permission", event=_plain(event))
            await self._answer_for(event)
        elif isinstance(event, Retry):
            self._trouble = event.message
            journal.add("retry", message=event.message, event=_plain(event))
        elif isinstance(event, StepStart):
            journal.add("step_start", event=_plain(event))
        else:
            assert isinstance(event, AgentFault)  # what follows it says the same, and is the end

    async def _answer_for(self, asked: Permission) -> None:
        assert self._running is not None
        with suppress(AgentSessionNotFoundError):  # OpenCode takes a no to one question for a no to all that wait
            await self._running.answer(asked.id, "once" if self.request.permissions == "allow" else "reject")

    # -- the end -------------------------------------------------------------------------------------------------------

    async def _awake(self, stack: AsyncExitStack) -> Runtime | None:
        """The sandbox as it is now: it may have ended under the agent, and have all its files."""
        # Who may only read makes none anew in the place of one that is gone.
        acting = caller.set(Caller("task", owner=self.row.owner, scope=KeyScope.READ_ONLY))
        try:
            return await stack.enter_async_context(self._desk.registry.use(self.sandbox))
        except (SkerryError, OSError):
            return None
        finally:
            caller.reset(acting)

    async def _collected(self, outcome: Outcome) -> dict[str, Any]:
        """What the agent said and did, as columns. Whatever goes wrong here, the outcome is what it is."""
        said: dict[str, Any] = {"tokens": self._tokens.model_dump(), "cost": self._cost}
        if self._answer.text:
            said["response"] = self._answer.text
        if self.row.step == "prompting":
            await self._save(step="collecting", error=outcome.error, error_code=outcome.code, **said)
        if self._runtime is None or self.row.base is None:
            return said
        self._journal.add("status", message="Looking at what has changed.")
        base, runtime = Base(**self.row.base), self._runtime
        changes = Changes(runtime, self.directory, self.row.id)
        diff, patch, unchanged = TaskDiff(error="It took too long to find out."), None, set[str]()
        try:
            async with asyncio.timeout(COLLECTING):
                try:
                    diff, patch = await changes.collect(base)
                    unchanged = await changes.tracked(base, artifacts.DIRECTORY) - {file.path for file in diff.files}
                except NoChangesKnown as error:
                    diff = TaskDiff(error=str(error))
                said["artifacts"] = await self._kept(runtime, unchanged)
        except (SkerryError, OSError, TimeoutError) as error:
            log.warning("a task's results could not be collected", task=self.row.id, error=repr(error))
            self._journal.add("warning", message=f"Not everything that it left could be collected: {error}")
        finally:
            if self.request.afterwards != "destroy" or not self.row.made_sandbox:
                await changes.forget()
        return {**said, "diff": diff.model_dump(mode="json", exclude={"patch"}), "patch": patch}

    async def _kept(self, runtime: Runtime, unchanged: set[str]) -> list[dict[str, Any]]:
        kept = []
        async for info, content in artifacts.gather(runtime, self.directory, self.request.artifacts, unchanged):
            if info.kept:
                await self._desk.rows.keep(self.row.id, info.path, content)
            kept.append(info.model_dump())
        return kept

    async def _leave_sandbox(self) -> None:
        registry, afterwards = self._desk.registry, self.request.afterwards
        if not self.row.made_sandbox or afterwards == "keep":
            return
        try:
            await (registry.destroy(self.sandbox) if afterwards == "destroy" else registry.stop(self.sandbox))
        except SandboxNotFoundError:
            return
        except (SkerryError, OSError) as error:
            self._journal.add("warning", message=f"The sandbox could not be left as wished: {error}")

    async def _end(self, outcome: Outcome) -> None:
        ended: dict[str, Any] = {
            "status": outcome.status,
            "error": outcome.error,
            "error_code": outcome.code,
            "completed_at": now(),
            "step": "ended",
            "runner": None,
        }
        await self._save(**ended)
        note_end(self._desk.registry.metrics, self.row)
        if outcome.status is TaskStatus.COMPLETED:
            said = {"sessionId": self.row.session_id, "sandboxId": self.row.sandbox_id}
            return self._journal.add("done", status=outcome.status, **said)
        self._journal.add("error", message=outcome.error, code=outcome.code, status=outcome.status)

    async def _save(self, **changes: Any) -> None:
        saved = await self._desk.rows.update(self.row.id, unless_ended=True, **changes)
        if saved is None:
            raise asyncio.CancelledError  # it was forgotten: there is nobody left to work for
        self.row = saved
        self._desk.told(self.row.id)


@dataclass(slots=True)
class _Answer:
    """The agent's words, which come whole each time, as what is new of them."""

    text: str = ""
    first: float | None = None

    def hear(self, content: str) -> str:
        before, self.text = self.text, content[:LONGEST_RESPONSE]
        if self.text.startswith(before):
            return self.text[len(before) :]
        return f"\n\n{self.text}" if before else self.text


def note_end(metrics: Metrics, row: TaskRow) -> None:
    """A task has ended: that is counted and logged, whoever has ended it."""
    seconds = ((row.completed_at or now()) - row.created_at).total_seconds()
    metrics.task(row.status, max(0.0, seconds), row.tokens, row.cost, row.owner)
    about = {"sandbox": row.sandbox_id, "provider": row.provider, "owner": row.owner, "user_id": row.user_id}
    log.info("task", task=row.id, status=row.status, code=row.error_code, **about)


def _outcome(event: ExecutionComplete) -> Outcome:
    if event.success:
        return COMPLETED
    return Outcome(TaskStatus.FAILED, event.error or "The agent failed.", event.code or "agent_failed")


def _answered(outcome: Outcome, cost: float) -> tuple[str, dict[str, Any]]:
    """What is told of a message when the agent is done with it."""
    done = outcome.status is TaskStatus.COMPLETED
    said = "The agent answered a message." if done else f"The agent did not answer: {outcome.error}"
    return said, {"code": outcome.code, "cost": cost}


def _plain(event: AgentEvent) -> dict[str, Any]:
    return event.model_dump(mode="json", by_alias=True, exclude_none=True)


def _title(row: TaskRow) -> str:
    if row.role:
        return f"{row.role} agent"
    return row.message.strip().partition("\n")[0][:80]


def _message_id() -> str:
    return f"msg_{nanoid(24)}"
