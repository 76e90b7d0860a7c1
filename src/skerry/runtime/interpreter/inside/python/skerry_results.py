"""From a bundle of MIME types to a result on the wire."""

from __future__ import annotations

import base64
from typing import Any

from skerry_figures import add_chart
from skerry_formats import CHART, DATA, TooLarge
from skerry_replies import Replies

NAMES = {
    "text/plain": "text",
    "text/html": "html",
    "text/markdown": "markdown",
    "text/latex": "latex",
    "image/svg+xml": "svg",
    "image/png": "png",
    "image/jpeg": "jpeg",
    "application/pdf": "pdf",
    "application/json": "json",
    "application/javascript": "javascript",
    "text/javascript": "javascript",
    DATA: "data",
    CHART: "chart",
}
ANY = frozenset({"json", "data", "chart"})
"""Formats that are values; the others are text."""

BINARY = frozenset({"png", "jpeg", "pdf"})
"""Formats that travel as base64."""


class Results:
    """Sends what is shown as results of the run whose number is ``run``."""

    def __init__(self, replies: Replies) -> None:
        self.run = 0
        self._replies = replies

    def publish(self, bundle: dict[str, Any], main: bool) -> None:
        add_chart(bundle)
        formats: dict[str, Any] = {}
        extra: dict[str, Any] = {}
        truncated: dict[str, int] = {}
        for mime, value in bundle.items():
            name = NAMES.get(mime)
            if isinstance(value, TooLarge):
                truncated[name or mime] = value.size
                continue
            if isinstance(value, (bytes, bytearray, memoryview)):
                value = base64.b64encode(value).decode()
            if name is None:
                extra[str(mime)] = value
            elif name in BINARY and isinstance(value, str):
                # Releases of IPython before 8.13 break it into lines.
                formats[name] = value.replace("\n", "")
            elif name in ANY or isinstance(value, str):
                formats[name] = value
            elif value is not None:
                formats[name] = str(value)
        if extra:
            formats["extra"] = extra
        self._replies.result(self.run, main, formats, truncated)
