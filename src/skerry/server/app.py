"""The ASGI app of the native API: one router per noun, one error shape, one guard in front."""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, FastAPI, Response

from skerry.control.registry import Registry
from skerry.models import Health
from skerry.server import auth, code, commands, errors, fetch, files, git, images, ports, processes, sandboxes, terminal
from skerry.server.answers import answer
from skerry.server.nouns import noun_router
from skerry.server.preview.front import Front, Previews
from skerry.settings import Settings

VERSION = version("skerry")


def _health(registry: Registry) -> APIRouter:
    router = noun_router("", "server")

    @router.get("/health", response_model=Health)
    async def health() -> Response:
        can = registry.provider.capabilities()
        flags = {"sessions": can.isolation, "uidRange": can.uid_range, "writableSystem": can.writable_system}
        bindings = {"sandbox": True, "projectData": False, "backupBucket": False}
        return answer(Health(version=VERSION, provider=can.name, isolation=flags, bindings=bindings))

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
    for noun in (commands, code, files, processes, ports, sandboxes, git, terminal, images):
        app.router.routes.extend(noun.routes(registry).routes)
    app.router.routes.extend(_health(registry).routes)
    app.state.previews = Previews(registry, settings, app.state.closing)
    app.router.routes.append(fetch.route(app.state.previews, settings))
    app.add_middleware(auth.Guard, settings=settings)
    app.add_middleware(Front, previews=app.state.previews)
    app.add_middleware(errors.Faults)
    return app
