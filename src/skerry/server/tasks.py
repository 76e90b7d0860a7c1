"""Tasks and teams of agents, and their schedules."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import nullcontext
from datetime import date
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Header, Path, Query, Request, Response

from skerry.agents.availability import providers
from skerry.agents.contract import DIRECTORY
from skerry.agents.task_models import (
    AgentUsage,
    CreateSchedule,
    CreateTask,
    CreateTeam,
    ProviderAvailability,
    ScheduleHistory,
    ScheduleInfo,
    ScheduleList,
    ScheduleRun,
    TaskEvent,
    TaskInfo,
    TaskList,
    TaskStatus,
    TaskTemplate,
    TeamInfo,
    UpdateSchedule,
)
from skerry.agents.templates import TEMPLATES
from skerry.agents.views import described
from skerry.agents.workforce import Workforce
from skerry.errors import SkerryError
from skerry.models import Done, SyncRequest, SyncResult, now
from skerry.server import page
from skerry.server.answers import answer, answer_all
from skerry.server.disconnect import until_disconnect
from skerry.server.nouns import noun_router
from skerry.server.paths import LARGEST, SandboxId
from skerry.server.sse import EventStream, documented, last_seen

T = TypeVar("T")

TaskId = Annotated[str, Path(max_length=80)]
After = Annotated[int, Query(ge=0, le=LARGEST, description="The last event that was seen.")]
UserId = Annotated[str | None, Query(alias="userId", max_length=200, description="Only what was asked for with it.")]
PATCH: dict[int | str, dict[str, Any]] = {
    200: {"description": "For `git apply`.", "content": {"text/x-diff": {"schema": {"type": "string"}}}}
}
FILE: dict[int | str, dict[str, Any]] = {
    200: {"description": "The file.", "content": {"application/octet-stream": {"schema": {"type": "string"}}}}
}
PAGE: dict[int | str, dict[str, Any]] = {
    200: {"description": "For a browser; it signs in and asks the routes below `/api`.", "content": {"text/html": {}}}
}


class TaskStream(EventStream[None]):
    keepalive = 5.0


def _failed(error: SkerryError) -> TaskEvent:
    return TaskEvent(id=0, type="error", task_id="", at=now(), message=error.message, code=error.code)


def routes(workforce: Workforce) -> APIRouter:
    router = noun_router("/api/v2/agents", "agents")

    def stream(id: str, after: int = 0) -> Response:
        return TaskStream(nullcontext(), lambda _: workforce.tasks.follow(id, after), _failed)

    # -- tasks ---------------------------------------------------------------------------------------------------------

    @router.post("/task", response_model=TaskInfo, responses={202: {"model": TaskInfo, "description": "Detached."}})
    async def create_task(body: CreateTask, request: Request) -> Response:
        row = await workforce.tasks.create(body)
        if body.detach:
            return answer(described(row), 202)
        return answer(await _patiently(request, workforce.tasks.wait(row.id)) or await workforce.tasks.get(row.id))

    @router.post("/task/stream", response_class=Response, responses=documented(TaskEvent))
    async def stream_task(body: CreateTask) -> Response:
        return stream((await workforce.tasks.create(body)).id)

    @router.get("/task/{task}", response_model=TaskInfo)
    async def get_task(task: TaskId) -> Response:
        return answer(await workforce.tasks.get(task))

    @router.get("/task/{task}/stream", response_class=Response, responses=documented(TaskEvent))
    async def follow_task(
        task: TaskId,
        after: After = 0,
        last_event_id: Annotated[str | None, Header(description="The same, as browsers say it.")] = None,
    ) -> Response:
        return stream((await workforce.tasks.get(task)).id, last_seen(last_event_id, after))

    @router.get("/task/{task}/diff", response_class=Response, responses=PATCH)
    async def get_task_diff(task: TaskId) -> Response:
        return Response(await workforce.tasks.patch(task), media_type="text/x-diff")

    @router.get("/task/{task}/artifact", response_class=Response, responses=FILE)
    async def get_task_artifact(task: TaskId, path: Annotated[str, Query(min_length=1, max_length=4096)]) -> Response:
        return Response(await workforce.tasks.artifact(task, path), media_type="application/octet-stream")

    @router.post("/task/{task}/cancel", response_model=TaskInfo)
    async def cancel_task(task: TaskId, request: Request) -> Response:
        await workforce.tasks.stop(task)
        return answer(await _patiently(request, workforce.tasks.wait(task)) or await workforce.tasks.get(task))

    @router.post("/task/{task}/retry", status_code=202, response_model=TaskInfo)
    async def retry_task(task: TaskId) -> Response:
        return answer(described(await workforce.tasks.retry(task)), 202)

    @router.get("/tasks", response_model=TaskList)
    async def list_tasks(
        limit: Annotated[int, Query(ge=1, le=200)] = 50,
        offset: Annotated[int, Query(ge=0, le=LARGEST)] = 0,
        status: TaskStatus | None = None,
        team: Annotated[str | None, Query(max_length=80)] = None,
        schedule: Annotated[str | None, Query(max_length=80)] = None,
        user: UserId = None,
    ) -> Response:
        wanted = {"status": status, "team": team, "schedule": schedule, "user": user}
        return answer(await workforce.tasks.list(limit, offset, **wanted))

    # -- teams ---------------------------------------------------------------------------------------------------------

    @router.post("/team", response_model=TeamInfo, responses={202: {"model": TeamInfo, "description": "Detached."}})
    async def create_team(body: CreateTeam, request: Request) -> Response:
        made = await workforce.teams.create(body)
        if body.detach:
            return answer(made, 202)
        id = made.team_id
        return answer(await _patiently(request, workforce.teams.wait(id)) or await workforce.teams.get(id))

    @router.get("/team/{team}", response_model=TeamInfo)
    async def get_team(team: TaskId) -> Response:
        return answer(await workforce.teams.get(team))

    @router.post("/team/{team}/cancel", response_model=TeamInfo)
    async def cancel_team(team: TaskId, request: Request) -> Response:
        await workforce.teams.stop(team)
        return answer(await _patiently(request, workforce.teams.wait(team)) or await workforce.teams.get(team))

    # -- what there is -------------------------------------------------------------------------------------------------

    @router.get("/providers", response_model=dict[str, ProviderAvailability])
    async def list_providers() -> Response:
        return answer_all(dict[str, ProviderAvailability], providers(workforce.registry))

    @router.get("/templates", response_model=list[TaskTemplate])
    async def list_templates() -> Response:
        return answer_all(list[TaskTemplate], list(TEMPLATES.values()))

    @router.get("/usage", response_model=AgentUsage)
    async def get_agent_usage(since: date | None = None, until: date | None = None, user: UserId = None) -> Response:
        return answer(await workforce.tasks.usage(since, until, user))

    @router.post("/sandbox/{id}/sync", response_model=SyncResult)
    async def sync_agent_sandbox(id: SandboxId, request: Request, body: SyncRequest | None = None) -> Response:
        registry = workforce.registry
        await registry.get(id)
        async with registry.use(id) as runtime:
            work = registry.workspaces.sync(runtime, id, body or SyncRequest(dir=DIRECTORY))
            return answer(await until_disconnect(request.receive, work))

    # -- schedules -----------------------------------------------------------------------------------------------------

    @router.post("/schedules", status_code=201, response_model=ScheduleInfo)
    async def create_schedule(body: CreateSchedule) -> Response:
        return answer(await workforce.schedules.create(body), 201)

    @router.get("/schedules", response_model=ScheduleList)
    async def list_schedules() -> Response:
        return answer(ScheduleList(schedules=await workforce.schedules.list()))

    @router.get("/schedules/{schedule}", response_model=ScheduleInfo)
    async def get_schedule(schedule: TaskId) -> Response:
        return answer(await workforce.schedules.get(schedule))

    @router.patch("/schedules/{schedule}", response_model=ScheduleInfo)
    async def update_schedule(schedule: TaskId, body: UpdateSchedule) -> Response:
        return answer(await workforce.schedules.update(schedule, body))

    @router.delete("/schedules/{schedule}", response_model=Done)
    async def delete_schedule(schedule: TaskId) -> Response:
        await workforce.schedules.delete(schedule)
        return answer(Done())

    @router.get("/schedules/{schedule}/history", response_model=ScheduleHistory)
    async def list_schedule_runs(
        schedule: TaskId,
        limit: Annotated[int, Query(ge=1, le=200)] = 50,
        cursor: Annotated[int | None, Query(ge=1, le=LARGEST)] = None,
    ) -> Response:
        return answer(await workforce.schedules.history(schedule, cursor, limit))

    @router.post("/schedules/{schedule}/run", status_code=202, response_model=ScheduleRun)
    async def run_schedule(schedule: TaskId) -> Response:
        return answer(await workforce.schedules.run_now(schedule), 202)

    return router


def page_routes(workforce: Workforce) -> APIRouter:
    router = noun_router("", "agents")

    @router.get("/tasks", response_class=Response, responses=PAGE)
    async def tasks_page() -> Response:
        return page.tasks(workforce.agents)

    return router


async def _patiently(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """What comes of it; None if the server closes before that. Whoever goes away leaves the task at work."""
    closing = asyncio.ensure_future(request.app.state.closing.wait())
    task = asyncio.ensure_future(work)

    async def either() -> T | None:
        await asyncio.wait((task, closing), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None

    try:
        return await until_disconnect(request.receive, either())
    finally:
        for each in (closing, task):
            each.cancel()
        await asyncio.gather(closing, task, return_exceptions=True)
