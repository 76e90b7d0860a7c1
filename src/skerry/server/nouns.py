"""What the routers of all nouns have in common."""

from __future__ import annotations

import warnings

from fastapi import APIRouter
from pydantic.warnings import UnsupportedFieldAttributeWarning

from skerry.server.bounds import BoundedRoute
from skerry.server.errors import DOCUMENTED

# FastAPI keeps quiet about an alias it gives to bodies, but models are built only when they are first used.
warnings.filterwarnings("ignore", category=UnsupportedFieldAttributeWarning)


def noun_router(prefix: str, tag: str) -> APIRouter:
    return APIRouter(prefix=prefix, tags=[tag], route_class=BoundedRoute, responses=DOCUMENTED)
