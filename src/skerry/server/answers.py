"""Results as they leave: serialised once, straight from the model."""

from __future__ import annotations

from fastapi import Response
from pydantic import BaseModel


def answer(model: BaseModel, status: int = 200, *, sparse: bool = False) -> Response:
    """``sparse`` leaves out what is null, for answers with thousands of parts."""
    # A Response is passed on as it is; FastAPI would validate and serialise a model a second time.
    return Response(model.model_dump_json(by_alias=True, exclude_none=sparse), status, media_type="application/json")
