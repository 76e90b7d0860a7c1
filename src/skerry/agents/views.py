"""Tasks as those who asked for them see them: rows of the store, in the models of the wire."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

from skerry.agents.models import Tokens
from skerry.agents.task_models import (
    AgentUsage,
    AgentUsageDay,
    ArtifactInfo,
    TaskDiff,
    TaskEvent,
    TaskInfo,
    TaskStatus,
    TaskSummary,
)
from skerry.control.task_rows import TaskEventRow, TaskRow
from skerry.models import now


def summary(row: TaskRow) -> TaskSummary:
    return TaskSummary(**_facts(row))


def described(row: TaskRow) -> TaskInfo:
    diff = None
    if row.diff is not None:
        diff = TaskDiff.model_validate(row.diff)
        if row.patch is not None:
            diff.patch = row.patch.decode(errors="replace")
    return TaskInfo(**_facts(row), diff=diff, artifacts=[ArtifactInfo.model_validate(each) for each in row.artifacts])


def _facts(row: TaskRow) -> dict[str, Any]:
    names = set(TaskSummary.model_fields) - {"task_id", "changed_files"}
    files = [] if row.diff is None else row.diff["files"]
    return {name: getattr(row, name) for name in names} | {"task_id": row.id, "changed_files": len(files)}


def told(row: TaskEventRow, task: TaskInfo | None) -> TaskEvent:
    return TaskEvent.model_validate(
        {**row.data, "id": row.id, "type": row.type, "taskId": row.task_id, "at": row.at, "task": task}
    )


def last_of(row: TaskRow, after: int) -> TaskEvent:
    """The event that a task ended with, told from the task itself."""
    done = row.status == TaskStatus.COMPLETED
    return TaskEvent(
        id=after,
        type="done" if done else "error",
        task_id=row.id,
        at=row.completed_at or now(),
        message=row.error,
        code=row.error_code,
        status=TaskStatus(row.status),
        task=described(row),
    )


def summed(owner: str, rows: Iterable[Any]) -> AgentUsage:
    """What tasks have cost, by day."""
    days, total, cost = dict[str, AgentUsageDay](), Tokens(), 0.0
    for row in rows:
        day = days.setdefault(f"{row.completed_at:%Y-%m-%d}", _nothing_on(row.completed_at))
        day.tasks += 1
        day.completed += row.status == TaskStatus.COMPLETED
        day.failed += row.status == TaskStatus.FAILED
        day.cost, cost = round(day.cost + row.cost, 6), cost + row.cost
        used = Tokens.model_validate(row.tokens)
        day.tokens, total = day.tokens + used, total + used
    listed = [days[day] for day in sorted(days)]
    count = sum(day.tasks for day in listed)
    return AgentUsage(owner=owner, days=listed, tasks=count, cost=round(cost, 6), tokens=total)


def _nothing_on(day: datetime) -> AgentUsageDay:
    return AgentUsageDay(day=f"{day:%Y-%m-%d}", tasks=0, completed=0, failed=0, cost=0.0, tokens=Tokens())
