"""Messages on the pipes of an executor: four bytes of length, then JSON."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from typing import Any

from pydantic_core import from_json

LIMIT = 64 << 20


class Nonsense(Exception):
    """What arrived is no message an executor sends."""


def encode(message: Mapping[str, Any]) -> bytes:
    data = json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode()
    return struct.pack(">I", len(data)) + data


class Frames:
    """Puts messages together from the bytes of a pipe. They come from untrusted code: bounded, and checked."""

    def __init__(self, on_message: Callable[[dict[str, Any], int], None]) -> None:
        self._on_message = on_message
        self._buffer = bytearray()
        self._size = -1

    def feed(self, data: bytes) -> None:
        self._buffer += data
        while True:
            if self._size < 0:
                if len(self._buffer) < 4:
                    return
                self._size = int.from_bytes(self._buffer[:4], "big")
                if self._size > LIMIT:
                    raise Nonsense("a message of more than 64 MB")
            if len(self._buffer) < 4 + self._size:
                return
            frame = bytes(memoryview(self._buffer)[4 : 4 + self._size])
            del self._buffer[: 4 + self._size]
            self._size = -1
            self._on_message(_message(frame), len(frame))


def _message(frame: bytes) -> dict[str, Any]:
    try:
        message = from_json(frame, allow_inf_nan=False)
    except ValueError as error:
        raise Nonsense("a message that is not JSON") from error
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise Nonsense("a message without a type")
    return message
