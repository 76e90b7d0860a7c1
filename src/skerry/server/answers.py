"""Results as they leave: serialised once, straight from the model."""

from __future__ import annotations

from typing import Any

from fastapi import Response
from pydantic import BaseModel, TypeAdapter


def answer(model: BaseModel, status: int = 200) -> Response:
    # A Response is passed on as it is; FastAPI would validate and serialise a model a second time.
    return Response(model.model_dump_json(by_alias=True), status, media_type="application/json")


def answer_all(kind: Any, value: Any, status: int = 200) -> Response:
    """The same, of lists and dictionaries of models."""
    return Response(TypeAdapter(kind).dump_json(value, by_alias=True), status, media_type="application/json")
