"""The ASGI app of the native API: one router per noun, one error shape, one guard in front."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, FastAPI, Response

from skerry.agents.sessions.sessions import Sessions
from skerry.agents.worker import Worker
from skerry.agents.workforce import Workforce
from skerry.control.audit import Audit
from skerry.control.metrics import CONTENT_TYPE
from skerry.control.reception import Reception
from skerry.control.registry import Registry
from skerry.models import Health
from skerry.server import (
    accounts,
    auth,
    backups,
    bootstrap,
    code,
    commands,
    errors,
    fetch,
    files,
    git,
    hosts,
    images,
    mounts,
    ports,
    processes,
    reports,
    sandboxes,
    sessions,
    sign_in,
    snapshots,
    tasks,
    terminal,
    webhooks,
    worker,
    workspaces,
)
from skerry.server import audit as audit_log
from skerry.server.answers import answer
from skerry.server.closing import Closing
from skerry.server.cloudflare.address import ContainerAddresses
from skerry.server.cloudflare.bridge import bridge_routes
from skerry.server.cloudflare.container import container_routes
from skerry.server.cloudflare.dialect import Dialects
from skerry.server.directory import Directory
from skerry.server.inward import Inward
from skerry.server.nouns import noun_router
from skerry.server.preview.front import Front, Previews
from skerry.server.witness import Witness
from skerry.settings import Settings

VERSION = version("skerry")
MEASURED: dict[int | str, dict[str, Any]] = {
    200: {"description": "As Prometheus reads it.", "content": {"text/plain": {"schema": {"type": "string"}}}}
}


def _health(registry: Registry) -> APIRouter:
    router = noun_router("", "server")

    @router.get("/health", response_model=Health)
    async def health() -> Response:
        can = registry.provider.capabilities()
        flags = {
            "sessions": can.isolation,
            "uidRange": can.uid_range,
            "writableSystem": can.writable_system,
            "freeze": can.freeze,
            "diskFull": can.full,
        }
        bindings = {"sandbox": True, "projectData": can.mounts, "backupBucket": True}
        return answer(
            Health(version=VERSION, provider=can.name, isolation=flags, bindings=bindings, snapshots=can.snapshots)
        )

    @router.get("/metrics", response_class=Response, responses=MEASURED)
    async def metrics() -> Response:
        return Response(await registry.measurements(), headers={"Content-Type": CONTENT_TYPE})

    return router


class _App(FastAPI):
    """FastAPI whose OpenAPI document says whether a key is needed."""

    reception: Reception

    def openapi(self) -> dict[str, Any]:
        document = super().openapi()
        if self.reception.closed:
            schemes = document.setdefault("components", {}).setdefault("securitySchemes", {})
            schemes["bearer"] = {"type": "http", "scheme": "bearer"}
            document["security"] = [{"bearer": []}]
            for path in ("/health", "/tasks"):
                document["paths"][path]["get"]["security"] = []
            for path in ("/v1/auth/sign-in", "/api/auth/sign-in/email"):
                document["paths"][path]["post"]["security"] = []
            document["paths"]["/api/v2/cloudflare/webhook"]["post"]["security"] = [{"worker": []}]
            schemes["worker"] = {"type": "http", "scheme": "bearer", "description": "SKERRY_WORKER_TOKEN"}
        return document


def create_app(
    registry: Registry,
    settings: Settings,
    audit: Audit | None = None,
    *,
    access_log: bool = False,
    workforce: Workforce | None = None,
    work: Sessions | None = None,
) -> FastAPI:
    """The app over an open registry, which stays the caller's to close.

    What is asked for is put on record in ``audit``, the registry's own. With ``access_log`` each request is a log line.
    ``workforce`` is the caller's to open and close, too.
    ``app.state.sessions`` is the caller's to open and to close as well; ``work`` stands in for it.
    Setting ``app.state.closing`` ends event streams and terminals, which would otherwise last as long as their clients.
    """
    app = _App(title="Skerry", version=VERSION, redirect_slashes=False, redoc_url=None)
    # To describe the API takes no registry.
    reception: Reception = getattr(registry, "reception", None) or Reception(settings)
    app.reception = reception
    app.state.settings = settings
    app.state.closing = Closing()
    errors.install(app)
    # An included router would be matched twice.
    nouns = (commands, code, files, processes, ports, sandboxes, git, mounts, bootstrap, terminal, images)
    for noun in (*nouns, snapshots, backups, workspaces, accounts, sign_in, audit_log, webhooks, reports):
        app.router.routes.extend(noun.routes(registry).routes)
    app.router.routes.extend(sign_in.session_routes(registry).routes)
    workforce = workforce or Workforce(registry)
    app.router.routes.extend([*tasks.routes(workforce).routes, *tasks.page_routes(workforce).routes])
    app.state.sessions = Sessions(registry, settings) if work is None else work
    app.state.sessions.spawner.inward = Inward(app.state.sessions, settings, app.state.closing, audit)
    app.router.routes.extend(sessions.routes(app.state.sessions).routes)
    app.router.routes.extend(_health(registry).routes)
    app.state.previews = Previews(registry, settings, app.state.closing, reception, audit)
    inside = fetch.Fetch(app.state.previews)
    agents = Worker(registry)
    app.router.routes.extend(worker.routes(registry, agents).routes)
    app.router.routes.extend(worker.proxy_routes(registry, agents, app.state.previews, settings))
    app.router.routes.append(fetch.route(inside))
    app.router.routes.extend([*container_routes(registry, inside, audit), *bridge_routes(registry)])
    app.state.directory = Directory(app.router.routes)
    app.router.routes.insert(0, app.state.directory)
    app.add_middleware(auth.Guard, settings=settings, reception=reception)
    app.add_middleware(hosts.Hosts, settings=settings, reception=reception)
    app.add_middleware(Front, previews=app.state.previews)
    app.add_middleware(errors.Faults)
    app.add_middleware(Dialects)
    app.add_middleware(Witness, audit=audit, access_log=access_log)
    app.add_middleware(ContainerAddresses, settings=settings)
    app.add_middleware(worker.WorkerAddresses)
    return app
