"""Word from workers in the cloud of what has happened to their sandboxes."""

from __future__ import annotations

import hmac
from typing import Any

import structlog
from fastapi import APIRouter, Request, Response

from skerry.agents.task_models import Received, WorkerReport, WorkerSandboxes, WorkerSandboxInfo
from skerry.control.actor import caller, own_id
from skerry.control.registry import Registry
from skerry.errors import InvalidRequestError, SandboxNotFoundError, SkerryError, UnauthorizedError
from skerry.models import KeyScope
from skerry.server import security
from skerry.server.answers import answer
from skerry.server.nouns import noun_router

log = structlog.get_logger(__name__)

_STATUS = {
    "sandbox.created": "running",
    "sandbox.started": "running",
    "sandbox.woken": "running",
    "sandbox.stopped": "stopped",
    "sandbox.hibernated": "sleeping",
    "sandbox.error": "error",
}
_ACTIVE = ("sandbox.created", "sandbox.started", "sandbox.woken", "session.created", "session.message")
_KNOWN = {*_STATUS, *_ACTIVE, "sandbox.deleted", "workspace.synced"}
_LONGEST = 300


def routes(registry: Registry) -> APIRouter:
    router = noun_router("/api/v2/cloudflare", "reports")

    @router.post("/webhook", response_model=Received)
    async def receive_report(body: WorkerReport, request: Request) -> Response:
        _require_token(registry.settings.worker_token, request)
        await _take(registry, body)
        return answer(Received())

    @router.get("/sandboxes", response_model=WorkerSandboxes)
    async def list_reported_sandboxes() -> Response:
        who = caller.get()
        rows = await registry.workers.list(None if who.scope is KeyScope.ADMIN else [who.owner])
        names = WorkerSandboxInfo.model_fields
        found = [WorkerSandboxInfo(**{name: getattr(row, name) for name in names}) for row in rows]
        return answer(WorkerSandboxes(sandboxes=found))

    return router


def _require_token(token: str | None, request: Request) -> None:
    """Its own: a worker needs no key for all the rest, and without a token nobody is believed."""
    given = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
    if token is None or not hmac.compare_digest(given.encode(), token.encode()):
        client = request.client
        security.report("api_key_wrong" if given else "api_key_missing", client.host if client else "", sandbox=None)
        raise UnauthorizedError(
            "A worker's report wants the worker's token.",
            hint="Set SKERRY_WORKER_TOKEN here, and send it as `Authorization: Bearer TOKEN` there.",
        )


async def _take(registry: Registry, report: WorkerReport) -> None:
    if report.event.startswith("workflow."):
        log.info("a worker told of a workflow", event_name=report.event)
        return
    id = report.data.get("sandboxId")
    if report.event not in _KNOWN or not isinstance(id, str) or not 1 <= len(id) <= _LONGEST:
        raise InvalidRequestError(
            "This is no report of a sandbox.",
            hint=f"The events are {', '.join(sorted(_KNOWN))}; data.sandboxId says of which sandbox.",
        )
    log.info("a worker told of a sandbox", event_name=report.event, sandbox=id)
    if report.event == "sandbox.deleted":
        await registry.workers.delete(id, report.timestamp)
    else:
        await registry.workers.put(id, report.timestamp, _changes(report))
    await _record(registry, id, report)


def _changes(report: WorkerReport) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    if report.event in _STATUS:
        changes["status"] = _STATUS[report.event]
        changes["error"] = _text(report.data.get("error")) if report.event == "sandbox.error" else None
    if report.event in _ACTIVE:
        changes["last_active_at"] = report.timestamp
    if report.event == "workspace.synced":
        changes["workspace_synced_at"] = report.timestamp
    for name, column in (("userId", "user_id"), ("workerUrl", "worker_url")):
        if isinstance(report.data.get(name), str):
            changes[column] = _text(report.data[name])
    return changes


def _text(value: object) -> str | None:
    return value.replace("\0", "\ufffd")[:2000] if isinstance(value, str) else None


async def _record(registry: Registry, id: str, report: WorkerReport) -> None:
    """In the history of the sandbox, if it is one of this server's."""
    try:
        known = own_id(id)
        await registry.get(known)
    except SandboxNotFoundError:
        return
    except SkerryError:
        return  # a name that no sandbox here can have
    details = {"event": report.event, "at": report.timestamp.isoformat()}
    registry.history.record(known, "reported", f"Its worker says: {report.event}.", by="worker", details=details)
