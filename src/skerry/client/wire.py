"""What requests and answers look like on the wire, where a model would cost more than it gives."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from skerry.client.values import decoded
from skerry.errors import InternalError, InvalidRequestError, SkerryError, error_from_wire
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


def app_path(path: str) -> str:
    """The path of a request to a server inside. Dots lead no higher than its root, which is not the API's."""
    if not path.startswith("/"):
        raise InvalidRequestError(f"The path {path!r} does not begin with /.")
    bare, mark, query = path.partition("#")[0].partition("?")
    kept: list[str] = []
    *folders, last = bare.split("/")[1:]
    for part in folders:
        if (dots := _dots(part)) == "..":
            del kept[-1:]
        elif dots != ".":
            kept.append(part)
    if (dots := _dots(last)) in (".", ".."):
        del kept[len(kept) - (dots == "..") :]
        last = ""
    return "/" + "/".join([*kept, last]) + mark + query


def _dots(part: str) -> str:
    return part.lower().replace("%2e", ".")


def app_headers(headers: Mapping[str, str] | Sequence[tuple[str, str]] | None) -> list[tuple[str, str]]:
    """The headers of such a request."""
    pairs = list(headers.items()) if isinstance(headers, Mapping) else list(headers or ())
    if any(name.lower() == "host" for name, _ in pairs):
        raise InvalidRequestError(
            "The server inside sees itself as localhost, and no other Host can be sent.",
            hint="Expose the port to reach it by a host name.",
        )
    if any(mark in text for pair in pairs for text in pair for mark in "\r\n\0"):
        raise InvalidRequestError("A header's name or value cannot be sent.", hint="Leave line breaks out of it.")
    return pairs
