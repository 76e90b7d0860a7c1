"""What the executor says to the server: frames of JSON on a descriptor of its own."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import threading
from typing import Any

from skerry_interrupts import Interrupts
from skerry_streams import Flusher

LIMIT = 16 * 1024 * 1024
"""The largest format of a result, serialised; what is larger is left out and noted."""
FRAME = 48 * 1024 * 1024
TEXT = 1_000_000


_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def encode(value: Any) -> bytes:
    """JSON that every parser takes: null for what it has no number for, no half characters."""
    try:
        text = _json.encode(value)
    except ValueError:
        text = _json.encode(finite(value))
    return text.encode("utf-8", "replace")


def finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {
            ("null" if isinstance(key, float) and not math.isfinite(key) else key): finite(each)
            for key, each in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [finite(each) for each in value]
    return value


class Replies:
    """Sends messages, each after what was printed before it. A process the user forked sends nothing."""

    def __init__(self, fd: int, flusher: Flusher, interrupts: Interrupts) -> None:
        self._fd = fd
        self._flusher = flusher
        self._interrupts = interrupts
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def send(self, kind: str, **fields: Any) -> None:
        self._write(encode({"type": kind, **fields}))

    def result(self, run: int, main: bool, formats: dict[str, Any], truncated: dict[str, int]) -> None:
        """Send a result; formats that are too large are left out of it and noted in ``truncated``."""
        parts = []
        total = 0
        for name, value in formats.items():
            if name == "text" and len(value) > TEXT:
                truncated["text"] = len(value)
                value = value[:TEXT]
            elif isinstance(value, str) and len(value) > LIMIT:
                truncated[name] = len(value)
                continue
            try:
                part = encode(value)
            except (TypeError, ValueError, RecursionError) as error:
                # An object's own idea of its JSON form.
                print(f"The {name} of this result could not be sent: {error}", file=sys.stderr)
                continue
            if len(part) > LIMIT or total + len(part) > FRAME:
                truncated[name] = len(part)
                continue
            total += len(part)
            parts.append(b'"%s":%s' % (name.encode(), part))
        if truncated:
            parts.append(b'"truncated":' + encode(truncated))
        flag = b"true" if main else b"false"
        body = b'{"type":"result","run":%d,"main":%s,"at":%s,"result":{%s}}'
        self._write(body % (run, flag, encode(self.written()), b",".join(parts)))

    def written(self) -> list[int]:
        """How many bytes have gone to stdout and stderr, for their place among messages."""
        self._flusher.now()
        return [stream.descriptor.count for stream in self._flusher.streams]

    def _write(self, data: bytes) -> None:
        if os.getpid() != self._pid:
            return
        with self._interrupts.held(), self._lock:
            self._flusher.now()
            frame = memoryview(len(data).to_bytes(4, "big") + data)
            try:
                while frame:
                    frame = frame[os.write(self._fd, frame) :]
            except BrokenPipeError:
                # Nobody is left to run code for.
                os._exit(0)

    def close(self) -> None:
        """In a process the user forked."""
        with contextlib.suppress(OSError):
            os.close(self._fd)
