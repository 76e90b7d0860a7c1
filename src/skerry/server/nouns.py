"""What the routers of all nouns have in common."""

from __future__ import annotations

from fastapi import APIRouter

from skerry.server.bounds import BoundedRoute
from skerry.server.errors import DOCUMENTED


def noun_router(prefix: str, tag: str) -> APIRouter:
    return APIRouter(prefix=prefix, tags=[tag], route_class=BoundedRoute, responses=DOCUMENTED)
