"""Teams: several agents at once, each in a sandbox of its own, each failing alone.

Where the provider has snapshots, what they all begin with is made once: one sandbox clones and prepares, a snapshot is
taken of it, and each agent's sandbox is made from that. The snapshot goes when the team is through.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal

import structlog

from skerry.agents.contract import DIRECTORY
from skerry.agents.ids import nanoid
from skerry.agents.muster import Muster
from skerry.agents.run import Outcome, added
from skerry.agents.task_models import CreateTask, CreateTeam, TaskStatus, TeamAgent, TeamInfo, Work
from skerry.agents.tasks import Tasks, described, dumped
from skerry.agents.workplace import Hidden, furnish
from skerry.control.actor import Caller, actor, caller, own_id
from skerry.control.inquiry import inquiry
from skerry.control.registry import Registry
from skerry.control.task_rows import TaskRow, TeamRow
from skerry.errors import SandboxNotFoundError, SkerryError, SnapshotNotFoundError, TeamNotFoundError
from skerry.models import CreateSandbox, CreateSnapshot, KeyScope, shown_id

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

    async def create(self, request: CreateTeam) -> TeamRow:
        team, rows, hidden = self.rows_of(request)
        await self._rows.insert(*rows, team=team)
        self.start(team, rows, hidden)
        return team

    def rows_of(self, request: CreateTeam) -> tuple[TeamRow, list[TaskRow], Hidden]:
        """A team that whoever asks may have, checked, and not on record yet."""
        request, hidden = self._tasks.checked(request)
        id = nanoid()
        common = request.model_dump(mode="json", by_alias=True, exclude_unset=True, include=_OWN - {"secrets"})
        rows = []
        for place, member in enumerate(request.agents):
            own = {"message": member.message, "model": member.model, "system": member.system}
            given = common | own | {"agent": member.agent or request.agent, "secrets": hidden.secrets}
            given["config"] = hidden.config
            row, _ = self._tasks.row_of(CreateTask.model_validate(given))
            row.team_id, row.place, row.role = id, place, member.role
            row.sandbox_id = own_id(f"team-{id}-agent-{place}")
            row.secrets = self._tasks.sealed(row.id, hidden)
            rows.append(row)
        team = TeamRow(
            id=id,
            node=self._registry.node,
            owner=caller.get().owner,
            request=dumped(request),
            snapshot=request.snapshot,
            shared=request.snapshot is not None or self._can_share(request),
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
        task.add_done_callback(lambda _: self._running.pop(team.id, None))

    # -- working -------------------------------------------------------------------------------------------------------

    async def _run(self, team: TeamRow, rows: Sequence[TaskRow], hidden: Hidden) -> None:
        _act_for(team)
        snapshot = team.snapshot
        if team.shared and snapshot is None:
            try:
                snapshot = await self._prepare(team, rows[0], hidden)
            except SkerryError as error:
                for row in rows:
                    await self._tasks.end(row.id, Outcome.of(error))
                return await self._rows.update_team(team.id, step="done")
        await self._rows.update_team(team.id, step="running", snapshot=snapshot)
        current = [await self._rows.get(row.id) for row in rows]
        left = [row for row in current if row is not None and not TaskStatus(row.status).ended]
        muster = Muster(row.id for row in left)
        for row in left:
            work = self._tasks.work(row, snapshot, muster)
            if row.cancel:
                work.cancel()
            self._tasks.start(work)
        await self._wind_up(team)

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
        """When all are through, what they began from is not needed any more."""
        _act_for(team)
        with suppress(SandboxNotFoundError):
            await self._registry.destroy(own_id(f"team-{team.id}-base"))
        found = await self._rows.team(team.id)
        if found is None:
            return
        for row in found[1]:
            await self._tasks.wait(row.id)
        asked = CreateTeam.model_validate(team.request).snapshot
        if found[0].snapshot is not None and asked is None:
            with suppress(SnapshotNotFoundError):
                await self._registry.snapshots.delete(found[0].snapshot, force=True)
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
        await asyncio.gather(*(self._tasks.cancel(agent.id) for agent in (await self.get(id)).agents))
        return await self.get(id)


def _act_for(team: TeamRow) -> None:
    inquiry.set(None)
    actor.set("task")
    caller.set(Caller("task", owner=team.owner, scope=KeyScope.USE))


def _described(team: TeamRow, rows: Sequence[TaskRow]) -> TeamInfo:
    agents = [TeamAgent.model_validate(described(row).model_dump()) for row in rows]
    tokens = added(None, {})
    for agent in agents:
        tokens = added(tokens, agent.tokens.model_dump())
    return TeamInfo(
        team_id=team.id,
        status=_status({agent.status for agent in agents}),
        agents=agents,
        shared=team.shared,
        cost=round(sum(agent.cost for agent in agents), 6),
        tokens=tokens,
        created_at=team.created_at,
    )


def _status(
    statuses: set[TaskStatus],
) -> Literal["pending", "running", "completed", "partial", "failed", "cancelled"]:
    if statuses == {TaskStatus.PENDING}:
        return "pending"
    if any(not status.ended for status in statuses):
        return "running"
    if len(statuses) == 1:
        return next(iter(statuses)).value
    return "partial" if TaskStatus.COMPLETED in statuses else "failed"
