"""How answers and events are written."""

from __future__ import annotations

import json

from pydantic_core import PydanticSerializationError, to_json

from skerry.server.cloudflare.box import Json


def as_json(value: Json) -> bytes:
    try:
        return to_json(value)
    except PydanticSerializationError:  # text that cannot be written as UTF-8
        return json.dumps(value, ensure_ascii=False, default=str).encode("utf-8", "replace")


def as_event(event: Json) -> bytes:
    return b"data: " + as_json(event) + b"\n\n"
