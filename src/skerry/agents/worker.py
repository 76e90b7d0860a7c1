"""AgentPod's worker: sandboxes with a coding agent in them, which are sent messages.

What such a sandbox is, is kept with it: its labels say which agent it has, its environment holds the agent's settings,
and its door the keys. So an agent that has ended, with its sandbox or without, is started again as it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import structlog
from pydantic import ValidationError

from skerry.agents.config import PLACEHOLDER, SETTINGS, Preparation, check_model, prepare, server_variables
from skerry.agents.contract import DIRECTORY, Prompt, Setup
from skerry.agents.known import OPENCODE
from skerry.agents.models import (
    AgentEvent,
    Credential,
    ExecutionComplete,
    MessageDone,
    MessageStart,
    Permission,
    StepFinish,
    Token,
    WorkerAnswer,
    WorkerCreate,
    WorkerDeleted,
    WorkerInfo,
    WorkerMessage,
    WorkerSync,
)
from skerry.agents.opencode.running import RunningOpenCode
from skerry.agents.opencode.turn import message_id
from skerry.agents.placing import differing, put_back
from skerry.agents.shift import Shift
from skerry.control.actor import SERVER, caller, own_id
from skerry.control.egress import Displaced
from skerry.control.inquiry import inquiry
from skerry.control.registry import Registry
from skerry.errors import (
    AgentConfigError,
    AgentDiedError,
    AgentError,
    AgentSessionNotFoundError,
    ConflictError,
    FilesMissingError,
    InvalidRequestError,
    ModelFailedError,
    ModelUnknownError,
    NotFoundError,
    SandboxNotFoundError,
    SkerryError,
)
from skerry.models import (
    CreateSandbox,
    GitClone,
    KeyScope,
    SandboxInfo,
    State,
    StoredWorkspace,
    SyncRequest,
    UpdateSandbox,
    shown_id,
)
from skerry.runtime.runtime import Runtime

log = structlog.get_logger(__name__)

AGENT = "agent"
UNFINISHED = "unfinished"
"""In place of the agent's name, until the sandbox has all that it was to have."""
USER = "userId"
TITLE = "Agent Task"
_STATUS = {
    State.CREATED: "created",
    State.STARTING: "starting",
    State.ACTIVE: "running",
    State.FROZEN: "sleeping",
    State.HIBERNATED: "sleeping",
    State.FAILED: "error",
    State.DESTROYED: "deleted",
}
_ERRORS: dict[str, type[AgentError]] = {
    "model_denied": ModelFailedError,
    "model_failed": ModelFailedError,
    "model_unreachable": ModelFailedError,
    "model_unknown": ModelUnknownError,
    "agent_config_invalid": AgentConfigError,
    "agent_died": AgentDiedError,
    "agent_session_not_found": AgentSessionNotFoundError,
}

WorkerEvent = MessageStart | AgentEvent | MessageDone


class Worker:
    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._shifts: WeakValueDictionary[str, Shift] = WeakValueDictionary()
        self._makings: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._returns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._settings: WeakKeyDictionary[Runtime, Mapping[str, str]] = WeakKeyDictionary()
        """What a message has brought of them: an agent that has ended is started again with it."""

    # -- sandboxes -----------------------------------------------------------------------------------------------------

    async def create(self, request: WorkerCreate) -> WorkerInfo:
        """A sandbox with its repository and its agent running; all of it, or nothing and an error."""
        preparation = self._prepare(request.config)
        self._note_user(request.user_id)
        id = own_id(request.id or f"sandbox-{int(time.time())}-{secrets.token_hex(4)}")
        labels = {AGENT: OPENCODE.name, **({USER: request.user_id} if request.user_id else {})}
        async with self._makings.setdefault(id, asyncio.Lock()):
            await self._clear_away(id)
            made = await self._registry.create(
                CreateSandbox(
                    id=shown_id(id),
                    provider=request.provider,
                    image=request.image,
                    env=dict(preparation.setup.env),
                    labels={**labels, AGENT: UNFINISHED},
                    limits=request.limits,
                    egress=request.egress,
                    secrets=preparation.secrets,
                    toolboxes=list(preparation.toolboxes),
                )
            )
            try:
                async with self._registry.use(made.id) as runtime:
                    if request.git_url is not None:
                        clone = GitClone(repo_url=request.git_url, branch=request.git_branch, target_dir=DIRECTORY)
                        await runtime.git.clone(clone)
                    agent = await OPENCODE.start(runtime, preparation.setup)
                    await agent.check()
                await self._registry.update(made.id, UpdateSandbox(labels=labels))
            except BaseException:
                await self._registry.destroy(made.id)
                raise
        return await self.get(made.id)

    async def _clear_away(self, id: str) -> None:
        """What is left of one whose server was killed while it made it."""
        with contextlib.suppress(SandboxNotFoundError):
            if (await self._registry.get(id)).labels.get(AGENT) == UNFINISHED:
                await self._registry.destroy(id)

    async def get(self, id: str) -> WorkerInfo:
        """What is true now; looking wakes nothing."""
        return await self._described(await self._require(id))

    async def wake(self, id: str) -> WorkerInfo:
        """Awake, with its agent."""
        async with self.agent(id):
            pass
        return await self.get(id)

    async def delete(self, id: str) -> WorkerDeleted:
        """The sandbox is destroyed, and what a bucket holds of its workspace deleted, also of one that is gone: the
        bucket may have been away when it was."""
        gone: SandboxNotFoundError | None = None
        try:
            await self._require(id)
            await self._registry.destroy(id)
        except SandboxNotFoundError as error:
            gone = error
        files = 0
        if await self._stored(id) is not None:
            files = await self._registry.workspaces.delete(id)
        elif gone is not None:
            raise gone
        return WorkerDeleted(sandbox_id=id, files=files)

    async def sync(self, id: str, request: SyncRequest | None = None) -> WorkerSync:
        request = request or SyncRequest(dir=DIRECTORY, bucket=self._registry.settings.worker_bucket)
        if "dir" not in request.model_fields_set:
            request = request.model_copy(update={"dir": DIRECTORY})
        await self._require_whole(id)
        async with self._held(id) as runtime:
            done = await self._registry.workspaces.sync(runtime, id, request)
        return WorkerSync(**done.model_dump(), success=done.ok)

    # -- the agent -----------------------------------------------------------------------------------------------------

    def runs(self, id: str) -> bool:
        """Whether the sandbox is awake and its agent there."""
        runtime = self._registry.peek(id)
        return runtime is not None and OPENCODE.running(runtime) is not None

    @contextlib.asynccontextmanager
    async def agent(self, id: str, change: Preparation | None = None) -> AsyncGenerator[RunningOpenCode, None]:
        """The agent of a sandbox, woken and started if need be, held awake for as long as this is."""
        info = await self._require_whole(id)
        if change is not None and (lacking := sorted({*change.toolboxes} - {*info.toolboxes})):
            raise ConflictError(
                f"Sandbox {shown_id(id)!r} was made without {', '.join(lacking)}, which tools and plugins need.",
                hint="Make it with such a configuration, or offer tools as an MCP server.",
            )
        shift = self._shifts.setdefault(id, Shift())
        async with self._held(id) as runtime:

            async def begin() -> RunningOpenCode:
                if change is None:
                    setup = Setup(env=self._settings.get(runtime, {}))
                    return OPENCODE.running(runtime) or await OPENCODE.start(runtime, setup)
                return await self._changed(id, runtime, change, shift)

            async with shift.entered(begin) as running:
                yield running

    async def _changed(self, id: str, runtime: Runtime, change: Preparation, shift: Shift) -> RunningOpenCode:
        """The agent with these settings, files and keys, or those of before and an error."""
        setup = change.setup
        running, before = OPENCODE.running(runtime), await differing(runtime, setup)
        if running is not None and running.started_with == dict(setup.env) and not before:
            await self._add_secrets(id, change)
            return running
        await shift.alone()  # what others have asked it for would die with it, or be done with a key that is refused
        displaced = await self._add_secrets(id, change)
        try:
            if (running := OPENCODE.running(runtime)) is not None:
                await running.stop()
            agent = await OPENCODE.start(runtime, setup)
            await agent.check()
        except BaseException:
            if (running := OPENCODE.running(runtime)) is not None:
                await running.stop()
            await put_back(runtime, before)
            if displaced:
                await self._registry.put_back_secrets(id, displaced)
            raise
        self._settings[runtime] = setup.env
        return agent

    async def _add_secrets(self, id: str, change: Preparation) -> Displaced:
        with _nothing_made():
            return await self._registry.add_secrets(id, change.secrets) if change.secrets else {}

    @contextlib.asynccontextmanager
    async def _held(self, id: str) -> AsyncGenerator[Runtime, None]:
        """Its runtime, woken if need be. Should its files be missing, they are brought from its bucket: an empty
        workspace must not pass for the one that was there.
        """
        async with contextlib.AsyncExitStack() as stack:
            try:
                runtime = await self._enter(stack, id)
            except FilesMissingError:
                async with self._returns.setdefault(id, asyncio.Lock()):
                    try:
                        runtime = await self._enter(stack, id)
                    except FilesMissingError as missing:
                        await self._bring_back(id, missing)
                        runtime = await self._enter(stack, id)
            yield runtime

    async def _enter(self, stack: contextlib.AsyncExitStack, id: str) -> Runtime:
        with _nothing_made():
            return await stack.enter_async_context(self._registry.use(id))

    async def _bring_back(self, id: str, missing: FilesMissingError) -> None:
        stored = await self._stored(id)
        if stored is None or not _of_this_one(stored, await self._registry.get(id)):
            raise missing
        async with self._registry.refill(id) as runtime:
            await runtime.files.mkdir(DIRECTORY, recursive=True)
            pull = SyncRequest(direction="pull", dir=DIRECTORY, bucket=stored.bucket)
            done = await self._registry.workspaces.sync(runtime, id, pull)
            if not done.ok:
                raise FilesMissingError(
                    f"The files of sandbox {shown_id(id)!r} are missing, and its bucket has not all of its workspace.",
                    hint="Start it fresh and pull what is left: POST …/start {fresh: true}, POST …/sync.",
                    details={"errors": done.errors[:20]},
                )
            self._registry.backups.made_good(id, runtime)

    async def authorize(self, id: str, provider: str, credential: bytes) -> None:
        """What OpenCode is given to show to a provider of models: kept at the door, and a placeholder inside."""
        async with self.agent(id) as agent:
            try:
                given = Credential.model_validate_json(credential)
            except ValidationError:
                given = Credential()
            if given.type != "api" or given.key is None:
                raise InvalidRequestError(
                    "Only a key can be given like this: {type: 'api', key}.",
                    hint="Tokens belong in the `auth` of the sandbox's configuration, or of a message's.",
                )
            settings = json.loads(agent.started_with.get(SETTINGS) or "{}").get("provider") or {}
            about = {provider: settings[provider]} if provider in settings else {}
            secrets = self._prepare({"auth": {provider: given}, "provider": about}).secrets
            await self._registry.add_secrets(id, secrets)
            await agent.authorize(provider, PLACEHOLDER)

    async def answer(self, id: str, request: WorkerMessage) -> WorkerAnswer:
        """What the agent says to a message; raises ``AgentError`` where it could not answer."""
        done: MessageDone | None = None
        async with contextlib.aclosing(self.message(id, request, attended=False)) as events:
            async for event in events:
                if isinstance(event, MessageDone):
                    done = event
        assert done is not None
        if not done.success:
            kind = _ERRORS.get(done.code or "", AgentError)
            details = {"sessionId": done.session_id, "code": done.code}
            raise kind(done.error or "The agent did not answer.", details=details)
        return WorkerAnswer.model_validate(done.model_dump(exclude={"type"}))

    async def message(
        self, id: str, request: WorkerMessage, *, attended: bool = True
    ) -> AsyncGenerator[WorkerEvent, None]:
        """The same as it happens. Leaving early stops the agent.

        ``attended``: whether somebody is there whom it can ask for leave to use a tool; else it is denied.
        """
        check_model(request.model)
        change = None if request.config is None else self._prepare(request.config)
        async with self.agent(id, change) as agent:
            session = request.session_id
            if session is None:
                session = await agent.create_session(TITLE)
                self._record(id, "session_created", f"Session {session} was begun.", {"session": session})
            else:
                await agent.require_session(session)
            prompt = Prompt(request.message, f"msg_{secrets.token_hex(13)}", request.model)
            # One message at a time in a session: what OpenCode would make of two is neither's answer.
            lock = self._turns.setdefault(f"{id}/{session}", asyncio.Lock())
            async with lock:
                yield MessageStart(session_id=session, message_id=prompt.message_id)
                kept = False
                try:
                    async with contextlib.aclosing(self._turn(id, agent, session, prompt, attended)) as events:
                        async for event in events:
                            if isinstance(event, MessageDone):  # after it nobody may be listening
                                kept = True
                                await self._after(id)
                            yield event
                finally:
                    if not kept:
                        await self._after(id)

    async def _turn(
        self, id: str, agent: RunningOpenCode, session: str, prompt: Prompt, attended: bool
    ) -> AsyncGenerator[WorkerEvent, None]:
        done = MessageDone(session_id=session, message_id=prompt.message_id, response="")
        began, ended = time.perf_counter(), False
        try:
            async with contextlib.aclosing(agent.prompt(session, prompt)) as events:
                async for event in events:
                    match event:
                        case Token():
                            done.response = event.content
                        case StepFinish():
                            done.cost += event.cost
                            done.tokens += event.tokens
                        case ExecutionComplete():
                            ended = True
                            done.success, done.error, done.code = event.success, event.error, event.code
                        case Permission() if not attended:
                            with contextlib.suppress(AgentSessionNotFoundError):  # a no to one is a no to all that wait
                                await agent.answer(event.id, "reject")
                    yield event
        finally:
            if not ended:
                done.success, done.error, done.code = False, "Nobody waited for its answer.", "aborted"
                if agent.alive:
                    with contextlib.suppress(SkerryError):
                        await agent.abort(session)
            self._told(id, done, time.perf_counter() - began)
        if done.success:
            done.parts = await _parts(agent, session, prompt.message_id)
        yield done

    def _told(self, id: str, done: MessageDone, took: float) -> None:
        said = "The agent answered a message." if done.success else f"The agent did not answer: {done.error}"
        details = {"session": done.session_id, "message": done.message_id, "code": done.code, "cost": done.cost}
        self._record(id, "session_message", said, details, took)
        metrics = self._registry.metrics
        metrics.message_latency.observe(took)
        if (beyond := metrics.beyond("sandbox.message_latency", took, sandbox=id)) is not None:
            about = {"metric": "sandbox.message_latency", "value": round(took, 3)}
            self._registry.history.record(id, "alert", beyond, by=SERVER, details=about)

    async def _after(self, id: str) -> None:
        """What the agent has made is kept elsewhere too, where a bucket is set for that."""
        bucket = self._registry.settings.worker_bucket
        if bucket is None or self._registry.peek(id) is None:  # what was put to sleep, or destroyed, is left so
            return
        try:
            await self.sync(id, SyncRequest(dir=DIRECTORY, bucket=bucket))
        except SkerryError as error:
            log.warning("workspace not synced", sandbox=id, reason=error.message)

    # -- within --------------------------------------------------------------------------------------------------------

    def _prepare(self, config: dict[str, Any] | None) -> Preparation:
        has = server_variables(self._registry.settings, self._registry.reception.closed)
        return prepare(OPENCODE.name, config, has=has)

    async def _require(self, id: str) -> SandboxInfo:
        info = await self._registry.get(id)
        if OPENCODE.toolbox not in info.toolboxes:
            raise ConflictError(
                f"Sandbox {shown_id(info.id)!r} has no agent.", hint="Make one with POST /sandbox, or with its toolbox."
            )
        self._note_user(info.labels.get(USER))
        return info

    async def _require_whole(self, id: str) -> SandboxInfo:
        info = await self._require(id)
        if info.labels.get(AGENT) == UNFINISHED:
            why = "is still being made" if self._being_made(info.id) else "was not finished: its server ended before"
            raise ConflictError(
                f"Sandbox {shown_id(info.id)!r} {why}.", hint="POST /sandbox makes it, DELETE takes it away."
            )
        return info

    def _being_made(self, id: str) -> bool:
        lock = self._makings.get(id)
        return lock is not None and lock.locked()

    def _note_user(self, user: str | None) -> None:
        """Log lines of the request say whom its sandbox is for."""
        if user is not None and (asked := inquiry.get()) is not None:
            asked.user_id = user

    async def _described(self, info: SandboxInfo) -> WorkerInfo:
        runtime, stored = self._registry.look(info.id), await self._stored(info.id)
        agent, status = info.labels.get(AGENT, OPENCODE.name), _STATUS[info.state]
        if agent == UNFINISHED:
            agent, status = OPENCODE.name, "starting" if self._being_made(info.id) else "error"
        return WorkerInfo.model_validate(
            {
                "sandbox_id": info.id,
                "status": status,
                "agent": agent,
                "agent_running": runtime is not None and OPENCODE.running(runtime) is not None,
                "has_workspace": stored is not None and _of_this_one(stored, info),
                "user_id": info.labels.get(USER),
                "last_active_at": info.last_active_at,
            }
        )

    async def _stored(self, id: str) -> StoredWorkspace | None:
        with contextlib.suppress(NotFoundError):
            return await self._registry.workspaces.get(id)
        return None

    def _record(self, id: str, kind: str, message: str, details: dict[str, Any], took: float | None = None) -> None:
        self._registry.history.record(id, kind, message, details=details, took=took)


def _of_this_one(stored: StoredWorkspace, info: SandboxInfo) -> bool:
    """What was stored before there was this sandbox is of another that had its name, and maybe for somebody else."""
    return stored.workspace_synced_at >= info.created_at


@contextlib.contextmanager
def _nothing_made() -> Iterator[None]:
    """What is used is there. Using a sandbox makes it otherwise: one that was deleted meanwhile would come back."""
    before = caller.set(replace(caller.get(), scope=KeyScope.READ_ONLY))
    try:
        yield
    finally:
        caller.reset(before)


async def _parts(agent: RunningOpenCode, session: str, prompt: str) -> list[Any]:
    """Those of the last message that answers it."""
    found: list[Any] = []
    try:
        for message in await agent.messages(session):
            if message.get("info", {}).get("parentID") == message_id(prompt):
                found = message.get("parts") or []
    except AgentError as error:
        log.warning("the parts of an answer could not be had", reason=error.message)
    return found
