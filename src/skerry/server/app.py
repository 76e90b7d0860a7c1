"""The ASGI app of the native API: one router per noun, one error shape, one guard in front."""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, FastAPI, Response

from skerry.control.metrics import CONTENT_TYPE
from skerry.control.registry import Registry
from skerry.models import Health
from skerry.server import (
    auth,
    backups,
    bootstrap,
    code,
    commands,
    errors,
    fetch,
    files,
    git,
    images,
    mounts,
    ports,
    processes,
    sandboxes,
    snapshots,
    terminal,
    workspaces,
)
from skerry.server.answers import answer
from skerry.server.nouns import noun_router
from skerry.server.preview.front import Front, Previews
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

    keyed = False

    def openapi(self) -> dict[str, Any]:
        document = super().openapi()
        if self.keyed:
            schemes = document.setdefault("components", {}).setdefault("securitySchemes", {})
            schemes["bearer"] = {"type": "http", "scheme": "bearer"}
            document["security"] = [{"bearer": []}]
            document["paths"]["/health"]["get"]["security"] = []
        return document


def create_app(registry: Registry, settings: Settings) -> FastAPI:
    """The app over an open registry, which stays the caller's to close.

    Setting ``app.state.closing`` ends event streams and terminals, which would otherwise last as long as their clients.
    """
    app = _App(title="Skerry", version=VERSION, redirect_slashes=False, redoc_url=None)
    app.keyed = bool(settings.api_keys)
    app.state.settings = settings
    app.state.closing = asyncio.Event()
    errors.install(app)
    # Routes are tried in turn, so the busiest come first; an included router would be matched twice.
    nouns = (commands, code, files, processes, ports, sandboxes, git, mounts, bootstrap, terminal, images)
    for noun in (*nouns, snapshots, backups, workspaces):
        app.router.routes.extend(noun.routes(registry).routes)
    app.router.routes.extend(_health(registry).routes)
    app.state.previews = Previews(registry, settings, app.state.closing)
    app.router.routes.append(fetch.route(app.state.previews, settings))
    app.add_middleware(auth.Guard, settings=settings)
    app.add_middleware(Front, previews=app.state.previews)
    app.add_middleware(errors.Faults)
    return app
