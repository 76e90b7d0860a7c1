"""Log lines: for people, or as JSON for programs. To stderr, because stdout belongs to the program's own output.

Every line says which request it belongs to, who asked and which sandbox it is about, where that is known. Secrets are
taken out last.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import MutableMapping
from typing import Any, Literal

import structlog
from structlog.typing import Processor

from skerry.control.actor import SERVER, actor
from skerry.control.inquiry import inquiry
from skerry.redaction import redact

Format = Literal["console", "json"]
Line = MutableMapping[str, Any]
FRAMES = 12
"""Of a traceback, the last so many places."""


def configure(level: int = logging.INFO, format: Format = "console") -> None:
    """Once, and only where the program that uses Skerry has not decided already."""
    if not structlog.is_configured():
        structlog.configure(
            processors=[*_STEPS, _renderer(format), redacted],
            wrapper_class=structlog.make_filtering_bound_logger(level),
            logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        )


def take_over(format: Format = "console") -> None:
    """Have what libraries log (Uvicorn, asyncio) written the same way. For programs that are Skerry's own."""
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[_named, structlog.stdlib.PositionalArgumentsFormatter(), *_STEPS],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, _plain, _renderer(format), redacted],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)


def whose(_logger: Any, _method: str, line: Line) -> Line:
    """Which request a line belongs to, who asked, and for which sandbox."""
    found = inquiry.get()
    if found is not None:
        line.setdefault("request_id", found.request_id)
        line.setdefault("client", found.client)
        for name in ("sandbox", "owner", "user", "user_id"):
            if (value := getattr(found, name)) is not None:
                line.setdefault(name, value)
        line.setdefault("actor", actor.get())
    elif (by := actor.get()) != SERVER:
        line.setdefault("actor", by)
    return line


def redacted(_logger: Any, _method: str, line: Any) -> str:
    """The line as it is written, without secrets: in one go, which costs a third of looking at each value."""
    return redact(str(line))


def about(**fields: str | None) -> None:
    """What every line says from now on of what this task of asyncio's does, and of what it begins."""
    structlog.contextvars.bind_contextvars(**{name: value for name, value in fields.items() if value is not None})


def place_of(error: BaseException) -> list[str]:
    """Where it was raised."""
    return [f"{f.filename}:{f.lineno} in {f.name}" for f in traceback.extract_tb(error.__traceback__)][-FRAMES:]


def broken(_logger: Any, _method: str, line: Line) -> Line:
    """An exception as its type and place: its message, and what is in the variables there, may be anything."""
    failure = line.pop("exc_info", None)
    error = sys.exc_info()[1] if failure is True else failure[1] if isinstance(failure, tuple) else failure
    if isinstance(error, BaseException):
        line["error"], line["frames"] = type(error).__qualname__, place_of(error)
    return line


def _named(logger: Any, _method: str, line: Line) -> Line:
    record = line.get("_record")
    line["logger"] = logger.name if logger is not None else getattr(record, "name", "")
    return line


def _plain(_logger: Any, _method: str, line: Line) -> Line:
    line.pop("stack_info", None)
    return line


def _renderer(format: Format) -> Processor:
    if format == "json":
        return structlog.processors.JSONRenderer(sort_keys=False, ensure_ascii=False)
    return structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())


_STEPS: list[Processor] = [
    structlog.contextvars.merge_contextvars,
    whose,
    broken,
    structlog.processors.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
]
