"""Tasks: what agents are asked to do, each in a sandbox, on record from the moment it is accepted.

Each open task belongs to one process (``runner.py``). Whoever comes after a process that died takes up what was its, or
fails it, with the reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from datetime import UTC, date, datetime, time, timedelta
from typing import Any
from weakref import WeakValueDictionary

import structlog

from skerry.agents import run
from skerry.agents.availability import provider_for
from skerry.agents.contract import DIRECTORY, Agent
from skerry.agents.desk import Desk
from skerry.agents.fit import check_fit
from skerry.agents.hidden import Hidden, reason_of
from skerry.agents.ids import nanoid
from skerry.agents.muster import Muster
from skerry.agents.news import Interval, News
from skerry.agents.opencode.catalogue import Catalogue
from skerry.agents.run import ATTEMPTS, CANCELLED, Outcome, Run
from skerry.agents.runner import Runner
from skerry.agents.task_models import (
    AgentUsage,
    CreateTask,
    CreateTeam,
    TaskEvent,
    TaskInfo,
    TaskList,
    TaskStatus,
)
from skerry.agents.templates import filled
from skerry.agents.views import described, last_of, summary, summed, told
from skerry.control.actor import caller, own_id
from skerry.control.inquiry import wanted_for
from skerry.control.registry import Registry
from skerry.control.task_rows import TaskRow
from skerry.egress.secret import SecretUnavailable
from skerry.errors import (
    ArtifactNotFoundError,
    ConflictError,
    InvalidRequestError,
    SandboxExistsError,
    SandboxNotFoundError,
    SkerryError,
    TaskNotFoundError,
)
from skerry.models import CreateSandbox, now
from skerry.runtime.repository import check_branch, parse_repository

log = structlog.get_logger(__name__)

QUICK = "quick-task"
"""The sandbox that each owner's quick tasks share."""
LOOK = 1.0
"""Seconds between looks for wishes that came by way of another server."""
ADOPT = 10.0
"""Seconds between looks for tasks whose process died, such as a command that worked without a server."""
EXPIRE = 3600.0
SHOW = 60.0
"""Seconds between signs of life to other servers, while there is work."""
SILENCE = timedelta(hours=1)
"""After which a server that left tasks open is taken for gone."""
PAGE = 500
LAST = ("done", "error")
RESTARTED, LOST = "server_restarted", "server_lost"


class Tasks:
    def __init__(self, registry: Registry, agents: Mapping[str, Agent], *, resume: bool = True) -> None:
        """``resume``: whether tasks are taken up again that a process before has left; if not, they fail."""
        self.agents = agents
        self._registry = registry
        self._rows = registry.tasks
        self._resume = resume
        self._news = News()
        cache = registry.settings.cache or registry.settings.home / "cache"
        self._desk = Desk(registry, self._rows, agents, self._news.tell, Catalogue(cache))
        self._runs: dict[str, tuple[Run, asyncio.Task[None]]] = {}
        self._slots = asyncio.Semaphore(registry.settings.task_slots)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._keeper: asyncio.Task[None] | None = None
        self._runner = Runner(registry.settings.home)

    # -- opening and closing -------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """From now on tasks are worked on; those that nobody works on any more are seen to."""
        self._runner.open(self._registry.node)
        await self._registry.show_life()
        await self._adopt()
        self._keeper = asyncio.get_running_loop().create_task(self._keep())

    async def close(self) -> None:
        """Let go of all tasks: the next server takes them up again, where that is wished for."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        left = dict(self._runs)
        for _, task in left.values():
            task.cancel()
        await asyncio.gather(*(task for _, task in left.values()), return_exceptions=True)
        if not self._resume:
            for id in left:
                await self._fail(id, "The program that worked on it ended.")
        self._runner.close()

    @property
    def runner(self) -> str:
        """The name of this process, in the rows of what it works on."""
        return self._runner.name

    async def _adopt(self) -> None:
        """Take up what a process of this home has left; of those that live, each sees to its own."""
        for row in await self._rows.open_of(self._registry.node, but=self.runner):
            if not self._runner.lives(row.runner) and await self._rows.adopt(row.id, row.runner, self.runner):
                await self._take_up(row)

    async def _take_up(self, row: TaskRow) -> None:
        reason = "The server ended while this task was worked on"
        if row.status == TaskStatus.PENDING and self._resume:
            return await self._start(row)
        if not self._resume:
            return await self._fail(row.id, f"{reason}.")
        ended = row.step == "leaving"
        if not ended and row.request.get("onRestart") == "fail":
            return await self._conclude(row, f"{reason}.")
        # That an agent was asked is counted when it is; what comes before and after may end a server as well.
        times = row.attempts + (row.step in ("preparing", "collecting"))
        if not ended and times >= ATTEMPTS:
            return await self._conclude(row, f"{reason}, {times} times by now: it is not taken up again.")
        row = await self._rows.update(row.id, attempts=times) or row
        log.info("a task is taken up again", task=row.id, step=row.step)
        await self.note(row.id, "status", message=f"{reason}; this one takes it up again.")
        await self._start(row)

    async def _conclude(self, row: TaskRow, reason: str) -> None:
        """It has failed; what its agent did until then is in the result, and its sandbox is left as was wished."""
        step = "collecting" if row.step == "prompting" else "leaving"
        failed = {"step": step, "error": reason, "error_code": RESTARTED}
        if (updated := await self._rows.update(row.id, unless_ended=True, **failed)) is not None:
            log.warning("a task was failed", task=row.id, reason=reason)
            await self._start(updated)

    async def _give_up(self) -> None:
        """Fail what other servers left that are gone for good: nobody else would ever say so."""
        for id in await self._rows.abandoned(self._registry.node, now() - SILENCE):
            await self._fail(id, "The server that worked on it was not heard of for an hour.", LOST)

    async def _fail(self, id: str, reason: str, code: str = RESTARTED) -> None:
        await self.end(id, Outcome(TaskStatus.FAILED, reason, code))
        log.warning("a task was failed", task=id, reason=reason)

    async def end(self, id: str, outcome: Outcome, *, only_at: str | None = None) -> None:
        """It has ended so, without having been worked on to its end. ``only_at``: unless it has gone on from there."""
        ended = {"status": outcome.status, "error": outcome.error, "error_code": outcome.code, "completed_at": now()}
        changes = {"runner": None, "step": "ended", **ended}
        if (row := await self._rows.update(id, unless_ended=True, only_at=only_at, **changes)) is not None:
            run.note_end(self._registry.metrics, row)
            await self.note(id, "error", message=outcome.error, code=outcome.code, status=outcome.status)

    async def end_unless_begun(self, id: str, outcome: Outcome) -> None:
        """The same, of one that may be worked on already, and then ends by itself."""
        if id not in self._runs:
            await self.end(id, outcome)

    async def note(self, id: str, type: str, **data: Any) -> None:
        """Something happened to it, beside what those who work on it tell."""
        await self._rows.add_events(id, [(type, now(), data)])
        self._news.tell(id)

    async def _keep(self) -> None:
        """See to wishes that reached another server of this store, and to what others left; forget what is old."""
        adopting, expiring, showing = Interval(ADOPT, waits=True), Interval(EXPIRE), Interval(SHOW)
        while True:
            try:
                if self._resume and adopting.over():
                    await self._adopt()
                    await self._give_up()
                if self._runs:
                    for id in await self._rows.to_cancel(self.runner):
                        self._runs[id][0].cancel() if id in self._runs else None
                    if showing.over():
                        await self._registry.show_life()
                if expiring.over():
                    await self._rows.expire(now() - timedelta(days=self._registry.settings.task_days))
            except SkerryError as error:
                log.warning("tasks could not be looked after", reason=error.message)
            await asyncio.sleep(LOOK)

    # -- asking --------------------------------------------------------------------------------------------------------

    async def create(self, request: CreateTask, *, retry_of: str | None = None) -> TaskRow:
        """Accept a task and begin with it. What makes no sense is refused, and nothing is on record then."""
        wanted_for(request.user_id)
        row, hidden = self.row_of(request)
        row.retry_of = retry_of
        if row.made_sandbox and request.snapshot is not None:
            row.provider = await self._registry.snapshots.place(request.snapshot, request.provider)
        work = Run(self._desk, row, hidden)
        if not row.made_sandbox:
            asked = work.sandbox_request()
            try:
                found = await self._registry.get(work.sandbox)
                check_fit(asked, found, await self._registry.egress(work.sandbox), request.provider)
                row.provider = found.provider
            except SandboxNotFoundError:
                await self.require(asked)
        await self._rows.insert(row)
        if row.made_sandbox:
            # Here, where quotas and what cannot be are answered with an error and not with a task that failed.
            try:
                await self._registry.create(work.sandbox_request())
            except SandboxExistsError:
                pass
            except BaseException:
                await self._rows.forget(row.id)
                raise
        self.start(work)
        return row

    def row_of(self, request: CreateTask) -> tuple[TaskRow, Hidden]:
        """A task that whoever asks may have, checked, and not on record yet."""
        if request.template_id is not None:
            text = filled(request.template_id, request.values, request.message)
            request = request.model_copy(update={"message": text, "template_id": None, "values": {}})
        provider = provider_for(self._registry, request.provider, request.use_case)
        request, hidden = self.checked(request)
        if request.session_id is not None and request.sandbox_id is None and not request.reuse:
            raise InvalidRequestError("A session is one of a sandbox: say which.", hint="Send sandboxId beside it.")
        return self.row(request, provider, hidden), hidden

    def row(self, request: CreateTask, provider: str, hidden: Hidden) -> TaskRow:
        """Of one that was checked."""
        id = f"task-{nanoid()}"
        given = QUICK if request.reuse else request.sandbox_id
        return TaskRow(
            id=id,
            node=self._registry.node,
            runner=self.runner,
            message=request.message,
            provider=provider,
            agent=request.agent,
            owner=caller.get().owner,
            sandbox_id=own_id(given or id),
            made_sandbox=given is None,
            session_id=request.session_id,
            user_id=request.user_id,
            model=request.model,
            git_url=request.git_url,
            git_branch=request.git_branch,
            request=dumped(request),
            secrets=hidden.sealed(self._registry.vault, id),
        )

    async def require(self, asked: CreateSandbox) -> None:
        """Raises for a sandbox that could not be made, while whoever wants it is there to be told."""
        registry, provider = self._registry, self._registry.provider
        registry.check(asked)
        for toolbox in asked.toolboxes:
            await provider.require_toolbox(toolbox)
        if asked.snapshot is not None:
            await registry.snapshots.get(asked.snapshot)
        else:
            await provider.require_image(asked.image, asked.provider or provider.capabilities().name)

    def checked(self, request: Any) -> tuple[Any, Hidden]:
        """A request that can be worked on, without what must not be read, and that apart."""
        if request.agent not in self.agents:
            raise InvalidRequestError(
                f"There is no agent {request.agent[:60]!r}.", hint=f"There are {', '.join(sorted(self.agents))}."
            )
        directory = getattr(request, "directory", None) or DIRECTORY
        self._desk.prepared(request, getattr(request, "model", None), directory, request.config)
        changes: dict[str, Any] = {"secrets": {}, "config": None}
        username = password = None
        if request.git_url is not None:
            check_branch(request.git_branch)
            repository = parse_repository(request.git_url)
            username, password, changes["git_url"] = repository.username, repository.password, repository.url
        secrets = request.model_dump(mode="json", by_alias=True, include={"secrets"})["secrets"]
        return request.model_copy(update=changes), Hidden(secrets, username, password, request.config)

    # -- working -------------------------------------------------------------------------------------------------------

    async def _start(self, row: TaskRow) -> None:
        snapshot = None
        try:
            if row.team_id is not None and (team := await self._rows.team(row.team_id)) is not None:
                snapshot = team[0].snapshot
            work = self.work(row, snapshot)
        except (SkerryError, SecretUnavailable, ValueError, KeyError) as error:  # an older server wrote it, or another
            return await self._fail(row.id, f"It could not be taken up again: {reason_of(error)}")
        self.start(work)

    def work(
        self,
        row: TaskRow,
        snapshot: str | None = None,
        muster: Muster | None = None,
        hidden: Hidden | None = None,
        fellow: Run | None = None,
    ) -> Run:
        hidden = hidden or Hidden.opened(self._registry.vault, row.id, row.secrets)
        return Run(self._desk, row, hidden, snapshot, muster, fellow)

    @property
    def free(self) -> int:
        """How many more may be begun and would work at once."""
        return self._registry.settings.task_slots - len(self._runs)

    def start(self, work: Run) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(self._work(work), name=work.row.id)
        self._runs[work.row.id] = work, task
        task.add_done_callback(lambda _: self._ended(work.row.id))
        return task

    def _ended(self, id: str) -> None:
        self._runs.pop(id, None)
        self._news.tell(id)

    async def _work(self, work: Run) -> None:
        id = work.row.id
        try:
            async with self._turn(work):
                await work.go()
        except asyncio.CancelledError:
            raise
        except Exception as error:
            # Whatever it was, the task does not stay open for ever.
            log.exception("a task broke", task=id)
            with suppress(SkerryError):
                await self.end(id, Outcome.of(error) if isinstance(error, SkerryError) else run.BROKEN)

    @asynccontextmanager
    async def _turn(self, work: Run) -> AsyncGenerator[None, None]:
        """Tasks in the same sandbox come one after the other: their changes could not be told apart."""
        lock = self._turns.setdefault(work.sandbox, asyncio.Lock())
        turn = asyncio.ensure_future(self._enter(lock))
        wish = asyncio.ensure_future(work.cancelled())
        try:
            await asyncio.wait((turn, wish), return_when=asyncio.FIRST_COMPLETED)
            yield
        finally:
            wish.cancel()
            turn.cancel()
            await asyncio.gather(wish, turn, return_exceptions=True)
            if not turn.cancelled():
                self._slots.release()
                lock.release()

    async def _enter(self, lock: asyncio.Lock) -> None:
        await lock.acquire()
        try:
            await self._slots.acquire()
        except BaseException:
            lock.release()
            raise

    # -- looking -------------------------------------------------------------------------------------------------------

    async def get(self, id: str) -> TaskInfo:
        return described(await self._mine(id))

    async def _mine(self, id: str) -> TaskRow:
        row = await self._rows.get(id, caller.get().owner)
        if row is None:
            raise TaskNotFoundError(
                f"There is no task {id[:80]!r}.", hint="`skerry tasks` lists them, or GET /api/v2/agents/tasks."
            )
        return row

    async def list(self, limit: int, offset: int = 0, **filters: str | None) -> TaskList:
        rows, total = await self._rows.list(caller.get().owner, limit=limit, offset=offset, **filters)
        return TaskList(tasks=[summary(row) for row in rows], total=total, limit=limit, offset=offset)

    async def wait(self, id: str) -> TaskInfo:
        """When it has ended. Leaving early leaves it alone."""
        with self._news.of(id) as news:
            await self._mine(id)  # there is one, which is theirs
            while True:
                news.clear()
                if id in self._runs:
                    await news.wait()
                    continue
                row = await self._mine(id)
                if TaskStatus(row.status).ended:
                    return described(row)
                await self._hark(id, news)

    async def follow(self, id: str, after: int = 0) -> AsyncGenerator[TaskEvent, None]:
        """Those after the one with that number, then each as it happens; ends with ``done`` or ``error``."""
        await self._mine(id)
        with self._news.of(id) as news:
            while True:
                news.clear()
                row = None if id in self._runs else await self._mine(id)
                page = await self._rows.events(id, after, PAGE)
                for event in page:
                    last = event.type in LAST
                    yield told(event, described(await self._mine(id)) if last else None)
                    if last:
                        return
                    after = event.id
                if len(page) < PAGE and row is not None and TaskStatus(row.status).ended:
                    yield last_of(row, after)  # its last event was lost with the server
                    return
                if len(page) < PAGE:
                    await self._hark(id, news)

    async def _hark(self, id: str, news: asyncio.Event) -> None:
        if id in self._runs:
            await news.wait()
            return
        with suppress(TimeoutError):  # another process works on it, and nobody here is told
            await asyncio.wait_for(news.wait(), LOOK)

    async def patch(self, id: str) -> bytes:
        row = await self._mine(id)
        return row.patch or b""

    async def artifact(self, id: str, path: str) -> bytes:
        row = await self._mine(id)
        content = await self._rows.artifact(row.id, path)
        if content is None:
            found = {each["path"]: each for each in row.artifacts}
            why = "there was too much of it, or of others, or it could not be read"
            said = f"was not kept: {why}" if path in found else "was not left"
            raise ArtifactNotFoundError(
                f"{path[:200]!r} {said} by task {id!r}.",
                details={"artifacts": [path for path, each in found.items() if each["kept"]]},
            )
        return content

    async def usage(self, since: date | None, until: date | None, user: str | None = None) -> AgentUsage:
        """``user``: only what was asked for with that label."""
        until = until or now().date()
        try:
            since = since or until - timedelta(days=29)
            start, end = (datetime.combine(day, time(), UTC) for day in (since, until + timedelta(days=1)))
        except OverflowError:
            raise InvalidRequestError(f"{until} is at the end of all days.") from None
        if since > until:
            raise InvalidRequestError(f"{since} is after {until}.", hint="`since` is the first day, `until` the last.")
        owner = caller.get().owner
        return summed(owner, await self._rows.spent(owner, start, end, user))

    # -- changing ------------------------------------------------------------------------------------------------------

    async def cancel(self, id: str) -> TaskInfo:
        """Stop the agent; what it has done so far is in the result. Of one that has ended, as it is."""
        await self.stop(id)
        return await self.wait(id)

    async def stop(self, id: str) -> None:
        """The same, without waiting for its end."""
        row = await self._mine(id)
        if not TaskStatus(row.status).ended:
            await self._rows.update(id, unless_ended=True, cancel=True)
            if id in self._runs:
                self._runs[id][0].cancel()
            elif row.team_id is not None and row.runner == self.runner:
                await self.end(id, CANCELLED, only_at="waiting")  # for what its team is prepared with

    async def retry(self, id: str) -> TaskRow:
        """The same once more, as another task, from the beginning."""
        row = await self._mine(id)
        if not TaskStatus(row.status).ended:
            raise ConflictError(f"Task {id!r} has not ended yet.", hint="Cancel it first, or wait.")
        request = CreateTask.model_validate(row.request)
        try:
            hidden = Hidden.opened(self._registry.vault, row.id, row.secrets)
        except (SecretUnavailable, ValueError) as error:
            raise ConflictError(
                f"The secrets of task {id!r} cannot be opened here: {error}", hint="Ask for it as a new one."
            ) from None
        update: dict[str, Any] = {"config": hidden.config} | {
            "secrets": CreateTask.model_validate({"message": "-", "secrets": hidden.secrets}).secrets
        }
        if row.made_sandbox:
            update["session_id"] = None
        team = None if row.team_id is None else await self._rows.team(row.team_id)
        if team is not None and team[0].request.get("snapshot") is not None:  # all that was prepared is in it
            request = request.model_copy(update={"git_url": None})
            update |= {"snapshot": team[0].request["snapshot"], "prepare": None}
        if request.git_url is not None:
            update["git_url"] = hidden.address(request.git_url)
        return await self.create(request.model_copy(update=update), retry_of=row.id)


def dumped(request: CreateTask | CreateTeam) -> dict[str, Any]:
    """As it is kept: without secrets."""
    kept: dict[str, Any] = request.model_dump(mode="json", by_alias=True, exclude_defaults=True, exclude={"secrets"})
    return kept | ({"message": request.message} if isinstance(request, CreateTask) else {})
