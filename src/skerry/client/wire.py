"""What requests and answers look like on the wire, where a model would cost more than it gives."""

from __future__ import annotations

import base64
import json
from typing import Any

import httpx

from skerry.client.values import decoded
from skerry.errors import InternalError, SkerryError, error_from_wire
from skerry.models import Encoding


def dump(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def failure(response: httpx.Response) -> SkerryError:
    try:
        content = response.json()
    except ValueError:
        content = None
    return error_from_wire(response.status_code, content)


class Written:
    """The output of a streamed command, kept for its result: as much as a result that is not streamed would hold."""

    LIMIT = 32 << 20

    def __init__(self, encoding: str) -> None:
        self._encoding = encoding
        self._pieces: list[bytes] = []
        self._left = self.LIMIT
        self.dropped = 0

    def add(self, data: str) -> None:
        piece = decoded(data, self._encoding)
        kept = piece[: self._left]
        self._pieces.append(kept)
        self._left -= len(kept)
        self.dropped += len(piece) - len(kept)

    def text(self) -> str:
        whole = b"".join(self._pieces)
        return base64.b64encode(whole).decode() if self._encoding == "base64" else whole.decode(errors="replace")


def stream_error(error: dict[str, Any] | None) -> SkerryError:
    """The exception that an ``error`` event stands for."""
    if error is None or not error.get("message"):
        return InternalError("The server broke the stream off without saying why.")
    return error_from_wire(500, {"error": error})


def stdin_text(data: bytes, encoding: Encoding) -> tuple[str, Encoding]:
    """Bytes as JSON can hold them: plain where they are text, else in base64, as the output will then be too."""
    if encoding == "utf-8":
        try:
            return data.decode(), "utf-8"
        except UnicodeDecodeError:
            encoding = "base64"
    return base64.b64encode(data).decode(), encoding


def octal(mode: int | None) -> str | None:
    return None if mode is None else f"{mode:03o}"


def flag(value: bool) -> str:
    return "true" if value else "false"
