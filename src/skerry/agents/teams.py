"""Teams: several agents at once, each in a sandbox of its own, each failing alone.

Where the provider has snapshots, what they all begin with is made once: one sandbox clones and prepares, a snapshot is
taken of it, and each agent's sandbox is made from that. The snapshot goes when the team is through.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence, Set
from contextlib import suppress
from typing import Any

import structlog

from skerry import logs
from skerry.agents.availability import provider_for
from skerry.agents.contract import DIRECTORY
from skerry.agents.hidden import Hidden
from skerry.agents.ids import nanoid
from skerry.agents.models import Tokens
from skerry.agents.muster import Muster
from skerry.agents.run import BROKEN, Outcome, Run
from skerry.agents.task_models import CreateTask, CreateTeam, TaskStatus, TeamAgent, TeamInfo, TeamStatus, Work
from skerry.agents.tasks import Tasks, dumped
from skerry.agents.views import described
from skerry.agents.workplace import furnish
from skerry.control.actor import Caller, actor, caller, own_id
from skerry.control.inquiry import inquiry, wanted_for
from skerry.control.registry import Registry
from skerry.control.task_rows import TaskRow, TeamRow
from skerry.errors import SandboxNotFoundError, SkerryError, SnapshotNotFoundError, TeamNotFoundError
from skerry.models import CreateSandbox, CreateSnapshot, KeyScope, now, shown_id

log = structlog.get_logger(__name__)

_OWN = set(Work.model_fields)


class Teams:
    def __init__(self, registry: Registry, tasks: Tasks) -> None:
        self._registry = registry
        self._rows = registry.tasks
        self._tasks = tasks
        self._running: dict[str, asyncio.Task[None]] = {}

    async def open(self) -> None:
        """After ``Tasks.open``, which has taken up the agents: see to what they share."""
        for team in await self._rows.unfinished_teams(self._registry.node):
            found = await self._rows.team(team.id)
            mine = found is not None and all(row.runner in (None, self._tasks.runner) for row in found[1])
            if mine:
                self._begin(team, self._wind_up(team))

    async def close(self) -> None:
        """Before ``Tasks.close``."""
        for task in list(self._running.values()):
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    # -- asking --------------------------------------------------------------------------------------------------------

    async def create(self, request: CreateTeam) -> TeamInfo:
        wanted_for(request.user_id)
        team, rows, hidden = self.rows_of(request)
        if request.snapshot is not None:
            place = await self._registry.snapshots.place(request.snapshot, request.provider)
            for row in rows:
                row.provider = place
        await self.require(team, rows, hidden)
        await self._rows.insert(*rows, team=team)
        self.start(team, rows, hidden)
        return _described(team, rows)

    async def require(self, team: TeamRow, rows: Sequence[TaskRow], hidden: Hidden) -> None:
        """Raises if there could not be such sandboxes; they differ by nothing but the agent."""
        for row in {row.agent: row for row in rows}.values():
            await self._tasks.require(self._tasks.work(row, team.snapshot, hidden=hidden).sandbox_request())

    def rows_of(self, request: CreateTeam) -> tuple[TeamRow, list[TaskRow], Hidden]:
        """A team that whoever asks may have, checked, and not on record yet."""
        request, hidden = self._tasks.checked(request)
        provider = provider_for(self._registry, request.provider, request.use_case)
        id = nanoid()
        common = request.model_dump(mode="json", by_alias=True, exclude_unset=True, include=_OWN - {"secrets"})
        rows, kinds = list[TaskRow](), set[tuple[str, str | None]]()
        for place, member in enumerate(request.agents):
            agent = member.agent or request.agent
            own = {"message": member.message, "system": member.system, "agent": agent}
            task = CreateTask.model_validate(common | own | {"model": member.model or request.model})
            if (agent, task.model) not in kinds:  # what else there is to check they have in common
                kinds.add((agent, task.model))
                self._tasks.checked(task.model_copy(update={"config": hidden.config}))
            row = self._tasks.row(task, provider, hidden)
            row.team_id, row.place, row.role = id, place, member.role
            row.sandbox_id = own_id(f"team-{id}-agent-{place}")
            rows.append(row)
        team = TeamRow(
            id=id,
            node=self._registry.node,
            owner=caller.get().owner,
            request=dumped(request),
            snapshot=request.snapshot,
            shared=request.snapshot is not None or self._can_share(request),
            step="preparing" if request.snapshot is None else "running",
        )
        return team, rows, hidden

    def _can_share(self, request: CreateTeam) -> bool:
        if self._registry.provider.capabilities().snapshots == "none":
            return False
        worth_it = len(request.agents) > 1 and (request.git_url is not None or request.prepare is not None)
        return worth_it if request.shared is None else request.shared

    def start(self, team: TeamRow, rows: Sequence[TaskRow], hidden: Hidden) -> None:
        self._begin(team, self._run(team, rows, hidden))

    def _begin(self, team: TeamRow, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work, name=f"team-{team.id}")
        self._running[team.id] = task
        task.add_done_callback(lambda task: self._ended(team.id, task))

    def _ended(self, id: str, task: asyncio.Task[None]) -> None:
        self._running.pop(id, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a team could not be wound up; the next server does", team=id, exc_info=error)

    # -- working -------------------------------------------------------------------------------------------------------

    async def _run(self, team: TeamRow, rows: Sequence[TaskRow], hidden: Hidden) -> None:
        _act_for(team)
        try:
            await self._start_all(team, rows, hidden)
        except Exception as error:
            # Whatever it was, no agent of the team stays open for ever.
            if not isinstance(error, SkerryError):
                log.exception("a team broke", team=team.id)
            outcome = Outcome.of(error) if isinstance(error, SkerryError) else BROKEN
            for row in rows:
                await self._tasks.end_unless_begun(row.id, outcome)
        await self._see_through(team)

    async def _start_all(self, team: TeamRow, rows: Sequence[TaskRow], hidden: Hidden) -> None:
        snapshot = team.snapshot
        if team.shared and snapshot is None:
            what = "Preparing" if team.request.get("gitUrl") is None else f"Cloning {team.request['gitUrl']}"
            for row in rows:
                await self._tasks.note(row.id, "status", message=f"{what}, once for all of the team.")
            snapshot = await self._prepare(team, rows[0], hidden)
        if team.step != "running":
            await self._rows.update_team(team.id, step="running", snapshot=snapshot)
        at_once = snapshot is not None and len(rows) <= self._tasks.free
        left = await (self._rows.begin(rows, now()) if at_once else self._left(rows))
        muster = Muster(row.id for row in left)
        works: list[Run] = []
        for row in left:
            works.append(self._tasks.work(row, snapshot, muster, hidden, works[-1] if works else None))
        wanted = [work for work in works if not work.row.cancel]
        if at_once and snapshot is not None and wanted:
            await self._make_sandboxes(snapshot, wanted)
        for work in works:
            if work.row.cancel:
                work.cancel()
        begun = [self._tasks.start(work) for work in works]
        if begun:
            await asyncio.wait(begun)

    async def _left(self, rows: Sequence[TaskRow]) -> list[TaskRow]:
        found = [await self._rows.get(row.id) for row in rows]
        return [row for row in found if row is not None and not TaskStatus(row.status).ended]

    async def _make_sandboxes(self, snapshot: str, works: Sequence[Run]) -> None:
        """All at once, which costs little more than one. If that cannot be, each has its own made, or fails alone."""
        with suppress(SkerryError):
            await self._registry.create_from(snapshot, [work.sandbox_request() for work in works])
            for work in works:
                work.has_sandbox = True

    async def _prepare(self, team: TeamRow, first: TaskRow, hidden: Hidden) -> str:
        """A snapshot of what they all begin with."""
        registry, base = self._registry, own_id(f"team-{team.id}-base")
        work = CreateTask.model_validate(first.request)
        asked = self._tasks.work(first).sandbox_request()
        told = CreateSandbox.model_validate(
            {**{name: getattr(asked, name) for name in asked.model_fields_set}, "id": shown_id(base)}
        )
        await registry.create(told)
        try:
            async with registry.use(base) as runtime:
                directory = work.directory or DIRECTORY
                await furnish(runtime, directory, work, hidden, lambda _: None)
            made = await registry.snapshots.create(base, CreateSnapshot(labels={"team": team.id}))
        finally:
            with suppress(SandboxNotFoundError):
                await registry.destroy(base)
        return made.id

    async def _wind_up(self, team: TeamRow) -> None:
        """Of one that another process has begun: when all are through, what they began from is not needed any more."""
        _act_for(team)
        with suppress(SandboxNotFoundError):
            await self._registry.destroy(own_id(f"team-{team.id}-base"))
        await self._see_through(team)

    async def _see_through(self, team: TeamRow) -> None:
        found = await self._rows.team(team.id)
        if found is None:
            return
        for row in found[1]:
            await self._tasks.wait(row.id)
        asked = CreateTeam.model_validate(team.request).snapshot
        if asked is None:  # by what it was made of: a server may have ended before it knew the name
            for made in await self._registry.snapshots.list_(f"team-{team.id}-base"):
                with suppress(SnapshotNotFoundError):
                    await self._registry.snapshots.delete(made.id, force=True)
        await self._rows.update_team(team.id, step="done")

    # -- looking -------------------------------------------------------------------------------------------------------

    async def get(self, id: str) -> TeamInfo:
        found = await self._rows.team(id, caller.get().owner)
        if found is None:
            raise TeamNotFoundError(f"There is no team {id[:80]!r}.")
        return _described(*found)

    async def wait(self, id: str) -> TeamInfo:
        for agent in (await self.get(id)).agents:
            await self._tasks.wait(agent.id)
        return await self.get(id)

    async def cancel(self, id: str) -> TeamInfo:
        """All that have not ended."""
        await self.stop(id)
        return await self.wait(id)

    async def stop(self, id: str) -> None:
        """The same, without waiting for their end."""
        await asyncio.gather(*(self._tasks.stop(agent.id) for agent in (await self.get(id)).agents))
        found, running = await self._rows.team(id), self._running.get(id)
        if found is not None and found[0].step == "preparing" and running is not None:
            running.cancel()  # nobody is left whom it is prepared for
            await asyncio.gather(running, return_exceptions=True)
            self._begin(found[0], self._wind_up(found[0]))


def _act_for(team: TeamRow) -> None:
    logs.about(owner=team.owner, user_id=team.request.get("userId"))
    inquiry.set(None)
    actor.set("task")
    caller.set(Caller("task", owner=team.owner, scope=KeyScope.USE))


def _described(team: TeamRow, rows: Sequence[TaskRow]) -> TeamInfo:
    agents = [TeamAgent.model_validate(described(row).model_dump()) for row in rows]
    return TeamInfo(
        team_id=team.id,
        status=status_of({agent.status for agent in agents}),
        agents=agents,
        shared=team.shared,
        cost=round(sum(agent.cost for agent in agents), 6),
        tokens=sum((agent.tokens for agent in agents), Tokens()),
        created_at=team.created_at,
    )


def status_of(statuses: Set[TaskStatus]) -> TeamStatus:
    """Of a team, by those of its tasks."""
    if statuses == {TaskStatus.PENDING}:
        return "pending"
    if any(not status.ended for status in statuses):
        return "running"
    if len(statuses) == 1:
        return next(iter(statuses)).value
    return "partial" if TaskStatus.COMPLETED in statuses else "failed"
