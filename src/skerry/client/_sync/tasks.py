# Generated from src/skerry/client/_async/tasks.py by scripts/generate_sync.py; change that file and run it again.
"""What agents of a server are asked to do: tasks, teams and schedules."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from datetime import date
from typing import Any
from urllib.parse import quote

from pydantic import TypeAdapter

from skerry.agents.task_models import (
    AgentUsage,
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
    TaskTemplate,
    TeamInfo,
)
from skerry.client._sync.connection import Connection, Stream
from skerry.client.reunion import Reunion
from skerry.client.sse import response_to_iterator
from skerry.client.values import given, valid
from skerry.errors import ServerUnreachableError

_AGENTS = "/api/v2/agents"
_PROVIDERS = TypeAdapter(dict[str, ProviderAvailability])
_TEMPLATES = TypeAdapter(list[TaskTemplate])


class Tasks:
    connection: Connection

    # -- tasks ---------------------------------------------------------------------------------------------------------

    def run_task(self, message: str, **options: Any) -> TaskInfo:
        """Ask an agent to do something, in a sandbox of its own, and wait until it is through.

        Options are the fields of a task (``docs/tasks.md``): ``git_url``, ``git_branch``, ``model``, ``agent``,
        ``sandbox_id``, ``config``, ``secrets``, ``timeout``, ``afterwards``, … A task that failed is a result, too:
        look at ``status`` and ``error``.
        """
        response = self.connection.request("POST", f"{_AGENTS}/task", json=_task(message, options))
        task = TaskInfo.model_validate_json(response.content)
        return task if options.get("detach") else self._ended(task)

    def start_task(self, message: str, **options: Any) -> TaskInfo:
        """The same, without waiting: it goes on when this program has ended, if the server is another."""
        body = _task(message, {**options, "detach": True})
        response = self.connection.request("POST", f"{_AGENTS}/task", json=body)
        return TaskInfo.model_validate_json(response.content)

    def stream_task(self, message: str, **options: Any) -> Stream[TaskEvent]:
        """The same, as events while it happens; the last has the whole ``task``.

        Leaving the stream leaves the task at work: ``follow_task`` joins it again, ``cancel_task`` ends it. A stream
        that breaks is taken up where it broke.
        """
        return Stream(self._begin(_task(message, options)))

    def follow_task(self, task: str, after: int = 0) -> Stream[TaskEvent]:
        """What has happened to a task since event ``after``, and then what happens, to its end."""
        return Stream(self._follow(task, after))

    def _begin(self, body: Any) -> Generator[TaskEvent, None]:
        seen: TaskEvent | None = None
        try:
            with closing(self._events("POST", f"{_AGENTS}/task/stream", json=body)) as events:
                for event in events:
                    seen = event
                    yield event
        except ServerUnreachableError:
            if seen is None:
                raise
        if seen is not None and seen.type not in ("done", "error"):
            with closing(self._follow(seen.task_id, seen.id, known=True)) as events:
                for event in events:
                    yield event

    def _follow(self, task: str, after: int, *, known: bool = False) -> Generator[TaskEvent, None]:
        """``known``: the server has been heard of, and is waited for if it is gone: another will take its place."""
        reunion = Reunion()
        while True:
            try:
                with closing(self._events("GET", f"{_path(task)}/stream", params={"after": after})) as events:
                    for event in events:
                        after, known, reunion = event.id, True, Reunion()
                        yield event
                        if event.type in ("done", "error"):
                            return
                reunion.wait(ServerUnreachableError("The server closed before the task had ended."))
            except ServerUnreachableError as error:
                if not known:
                    raise
                reunion.wait(error)

    def _ended(self, task: TaskInfo) -> TaskInfo:
        """The same when it has ended: a server that closes answers before that, and the next goes on with it."""
        if task.completed_at is None:
            with closing(self._follow(task.id, 0, known=True)) as events:
                for event in events:
                    if event.task is not None:
                        return event.task
        return task

    def _events(
        self, method: str, path: str, *, json: Any = None, params: dict[str, Any] | None = None
    ) -> Generator[TaskEvent, None]:
        with self.connection.stream(method, path, json=json, params=params) as response:
            events = response_to_iterator(response, TaskEvent)
            try:
                yield from events
            finally:
                events.close()

    def get_task(self, task: str) -> TaskInfo:
        response = self.connection.request("GET", _path(task))
        return TaskInfo.model_validate_json(response.content)

    def list_tasks(
        self,
        limit: int | None = None,
        offset: int | None = None,
        *,
        status: str | None = None,
        team: str | None = None,
        schedule: str | None = None,
        user_id: str | None = None,
    ) -> TaskList:
        """The latest first."""
        params = given(limit=limit, offset=offset, status=status, team=team, schedule=schedule, userId=user_id)
        response = self.connection.request("GET", f"{_AGENTS}/tasks", params=params)
        return TaskList.model_validate_json(response.content)

    def cancel_task(self, task: str) -> TaskInfo:
        """Stop the agent. What it has done so far is in the result."""
        response = self.connection.request("POST", f"{_path(task)}/cancel")
        return self._ended(TaskInfo.model_validate_json(response.content))

    def retry_task(self, task: str) -> TaskInfo:
        """Ask for the same once more, as another task."""
        response = self.connection.request("POST", f"{_path(task)}/retry")
        return TaskInfo.model_validate_json(response.content)

    def task_patch(self, task: str) -> bytes:
        """What the agent changed, byte for byte as ``git apply`` wants it."""
        return (self.connection.request("GET", f"{_path(task)}/diff")).content

    def task_artifact(self, task: str, path: str) -> bytes:
        """A file that the task has left."""
        return (self.connection.request("GET", f"{_path(task)}/artifact", params={"path": path})).content

    # -- teams ---------------------------------------------------------------------------------------------------------

    def run_team(self, agents: Sequence[Mapping[str, Any]], **options: Any) -> TeamInfo:
        """Several agents at once, each with a ``role`` and a ``message``; what they share are options."""
        body = valid(CreateTeam, {"agents": list(agents), **options})
        response = self.connection.request("POST", f"{_AGENTS}/team", json=_dumped(body))
        team = TeamInfo.model_validate_json(response.content)
        return team if body.detach else self._team_ended(team)

    def get_team(self, team: str) -> TeamInfo:
        response = self.connection.request("GET", f"{_AGENTS}/team/{quote(team, safe='')}")
        return TeamInfo.model_validate_json(response.content)

    def cancel_team(self, team: str) -> TeamInfo:
        """All of it that has not ended."""
        response = self.connection.request("POST", f"{_AGENTS}/team/{quote(team, safe='')}/cancel")
        return self._team_ended(TeamInfo.model_validate_json(response.content))

    def _team_ended(self, team: TeamInfo) -> TeamInfo:
        if team.status not in ("pending", "running"):
            return team
        for agent in team.agents:
            self._ended(agent)
        return self.get_team(team.team_id)

    # -- what there is -------------------------------------------------------------------------------------------------

    def task_providers(self) -> dict[str, ProviderAvailability]:
        """Where tasks can be run."""
        response = self.connection.request("GET", f"{_AGENTS}/providers")
        return _PROVIDERS.validate_json(response.content)

    def task_templates(self) -> list[TaskTemplate]:
        """Tasks with blanks to fill in, for ``template_id`` and ``values``."""
        response = self.connection.request("GET", f"{_AGENTS}/templates")
        return _TEMPLATES.validate_json(response.content)

    def agent_usage(
        self, since: date | None = None, until: date | None = None, *, user_id: str | None = None
    ) -> AgentUsage:
        """Tokens and cost of tasks, by day; of the last thirty days unless others are asked for.

        ``user_id``: only of tasks that were asked for with it.
        """
        days = {name: day.isoformat() for name, day in (("since", since), ("until", until)) if day is not None}
        params = days | given(userId=user_id)
        response = self.connection.request("GET", f"{_AGENTS}/usage", params=params)
        return AgentUsage.model_validate_json(response.content)

    # -- schedules -----------------------------------------------------------------------------------------------------

    def create_schedule(
        self,
        name: str,
        cron: str,
        message: str | None = None,
        *,
        timezone: str | None = None,
        missed: str | None = None,
        overlap: str | None = None,
        paused: bool | None = None,
        team: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> ScheduleInfo:
        """Have a task (``message`` and its options) or a ``team`` run at set times."""
        body = {"name": name, "cron": cron}
        body |= given(timezone=timezone, missed=missed, overlap=overlap, paused=paused)
        if team is not None:
            body["team"] = _dumped(valid(CreateTeam, {**team, **options}))
        else:
            body["task"] = _task(message or "", options)
        response = self.connection.request("POST", f"{_AGENTS}/schedules", json=body)
        return ScheduleInfo.model_validate_json(response.content)

    def list_schedules(self) -> list[ScheduleInfo]:
        response = self.connection.request("GET", f"{_AGENTS}/schedules")
        return ScheduleList.model_validate_json(response.content).schedules

    def get_schedule(self, schedule: str) -> ScheduleInfo:
        response = self.connection.request("GET", _schedule(schedule))
        return ScheduleInfo.model_validate_json(response.content)

    def update_schedule(self, schedule: str, **changes: Any) -> ScheduleInfo:
        """Change its ``name``, ``cron``, ``timezone``, ``missed``, ``overlap`` or whether it is ``paused``."""
        response = self.connection.request("PATCH", _schedule(schedule), json=changes)
        return ScheduleInfo.model_validate_json(response.content)

    def delete_schedule(self, schedule: str) -> None:
        """What it has begun goes on."""
        self.connection.request("DELETE", _schedule(schedule))

    def schedule_history(
        self, schedule: str, *, limit: int | None = None, cursor: int | None = None
    ) -> ScheduleHistory:
        """The times at which it was due, the latest first, and what became of each."""
        params = given(limit=limit, cursor=cursor)
        response = self.connection.request("GET", f"{_schedule(schedule)}/history", params=params)
        return ScheduleHistory.model_validate_json(response.content)

    def run_schedule(self, schedule: str) -> ScheduleRun:
        """Once now, out of its turn."""
        response = self.connection.request("POST", f"{_schedule(schedule)}/run")
        return ScheduleRun.model_validate_json(response.content)


def _task(message: str, options: Mapping[str, Any]) -> Any:
    # Validated here too: what is misspelt is said at once, and secrets are written out nowhere but on the wire.
    return _dumped(valid(CreateTask, {"message": message, **options}))


def _dumped(body: CreateTask | CreateTeam) -> Any:
    return body.model_dump(mode="json", by_alias=True, exclude_unset=True)


def _path(task: str) -> str:
    return f"{_AGENTS}/task/{quote(task, safe='')}"


def _schedule(schedule: str) -> str:
    return f"{_AGENTS}/schedules/{quote(schedule, safe='')}"
