"""Code and its contexts."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import AliasChoices, Field, computed_field

from skerry.errors import CodeExecutionError
from skerry.limits import Limit
from skerry.models.base import Done, EnvVars, Request, Result, now

Language = Literal["python", "javascript", "typescript"]


class CreateContext(Request):
    id: str | None = None
    language: str = Field("python", description="python, javascript or typescript; python3, js, node and ts will do.")
    cwd: str = "/workspace"
    env: EnvVars = Field(default_factory=dict, validation_alias=AliasChoices("env", "envVars", "env_vars"))
    timeout: float | None = Field(
        None,
        gt=0,
        description="Milliseconds each run may take that has no timeout of its own.",
        validation_alias=AliasChoices("timeout", "timeoutMs", "timeout_ms"),
    )


class CodeContext(Result):
    """An interpreter that keeps its variables from one run to the next."""

    id: str
    language: Language
    cwd: str
    status: Literal["idle", "running", "ended"] = Field(
        "idle", description="`ended`: its process died; the next run gets a fresh one and says so."
    )
    execution_count: int = 0
    timeout: float | None = None
    default: bool = Field(False, description="Whether it is the one for code that names no context.")
    pid: int | None = Field(None, description="Its process, as the sandbox numbers it.")
    created_at: datetime = Field(default_factory=now)
    last_used: datetime = Field(default_factory=now)


class ContextList(Result):
    contexts: list[CodeContext]


class Interrupted(Done):
    interrupted: bool = Field(description="Whether anything was running.")


class WarmInterpreters(Request):
    language: str = "python"
    count: int = Field(1, ge=1, le=64, description="How many contexts to have ready.")
    preload: bool = Field(True, description="Whether they have pandas, numpy and matplotlib imported (Python only).")


class RunCode(Request):
    code: str
    context: str | None = Field(
        None,
        description="The context to run in; without one, the default context of the language.",
        validation_alias=AliasChoices("context", "contextId", "context_id"),
    )
    language: str | None = Field(None, description="python unless said otherwise, or what the context speaks.")
    env: dict[str, str | None] = Field(
        default_factory=dict,
        description="Variables for this run alone; null unsets one.",
        validation_alias=AliasChoices("env", "envVars", "env_vars"),
    )
    timeout: float | None = Field(
        None, gt=0, description="Milliseconds.", validation_alias=AliasChoices("timeout", "timeoutMs", "timeout_ms")
    )


class CodeResult(Result):
    """One value or picture, in every format it can be shown in; png, jpeg and pdf are base64."""

    text: str | None = None
    html: str | None = None
    markdown: str | None = None
    latex: str | None = None
    svg: str | None = None
    png: str | None = None
    jpeg: str | None = None
    pdf: str | None = None
    json_: Any = Field(None, alias="json")
    javascript: str | None = None
    data: dict[str, Any] | None = Field(None, description="A table: `schema.fields`, `records`, `rows`.")
    chart: dict[str, Any] | None = Field(None, description="What a figure shows: type, title, axes, series.")
    extra: dict[str, Any] = Field(default_factory=dict, description="Formats without a name here, by MIME type.")
    is_main_result: bool = Field(False, description="The value of the last expression, not something displayed.")
    truncated: dict[str, int] = Field(
        default_factory=dict, description="Formats that were too large, with their full size; only text is cut."
    )

    def formats(self) -> list[str]:
        """The names of the formats this result has."""
        named = {field.alias or name: getattr(self, name) for name, field in type(self).model_fields.items()}
        return [name for name in FORMATS if named[name] is not None] + list(self.extra)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        """How a notebook shows it: as it would have looked in a cell of its own."""
        bundle = {mime: getattr(self, "json_" if name == "json" else name) for name, mime in FORMATS.items()}
        return {**{mime: value for mime, value in bundle.items() if mime and value is not None}, **self.extra}, {}


FORMATS: dict[str, str | None] = {
    "text": "text/plain",
    "html": "text/html",
    "markdown": "text/markdown",
    "latex": "text/latex",
    "svg": "image/svg+xml",
    "png": "image/png",
    "jpeg": "image/jpeg",
    "pdf": "application/pdf",
    "json": "application/json",
    "javascript": "application/javascript",
    "data": None,
    "chart": None,
}
"""Every named format of a result and its MIME type; what has none is ours."""


class CodeError(Result):
    """Why the code failed: an exception it raised, or the end of its context."""

    name: str
    message: str
    traceback: list[str] = Field(default_factory=list)
    line_number: int | None = None
    limit: Limit | None = Field(None, description="The limit of the sandbox that it ran into.")

    @computed_field  # type: ignore[prop-decorator]
    @property
    def value(self) -> str:
        """The message, as older clients call it."""
        return self.message


class CodeLogs(Result):
    stdout: list[str] = Field(default_factory=list)
    stderr: list[str] = Field(default_factory=list)
    stdout_truncated: int = Field(0, description="Bytes that were left out because there were too many.")
    stderr_truncated: int = 0


class Execution(Result):
    """What running a piece of code came to."""

    code: str = ""
    context_id: str
    language: Language
    logs: CodeLogs = Field(default_factory=CodeLogs)
    results: list[CodeResult] = Field(default_factory=list)
    error: CodeError | None = None
    execution_count: int | None = None
    notices: list[str] = Field(
        default_factory=list, description="What a caller should know: that earlier state is gone, that output was cut."
    )
    timed_out: bool = False
    duration: float = Field(0, description="Milliseconds.")

    @property
    def success(self) -> bool:
        return self.error is None

    @property
    def stdout(self) -> str:
        return "".join(self.logs.stdout)

    @property
    def stderr(self) -> str:
        return "".join(self.logs.stderr)

    @property
    def text(self) -> str | None:
        """The last expression as text."""
        return next((result.text for result in self.results if result.is_main_result), None)

    def raise_for_error(self) -> Execution:
        """Itself, or ``CodeExecutionError`` if the code failed."""
        if self.error is not None:
            raise CodeExecutionError(
                f"{self.error.name}: {self.error.message}",
                details={"contextId": self.context_id, **self.error.model_dump(by_alias=True)},
            )
        return self


class CodeEvent(Result):
    """One event of running code: start, then stdout, stderr, result, notice and error as they come, then complete."""

    type: Literal["start", "stdout", "stderr", "result", "notice", "error", "complete"]
    timestamp: datetime = Field(default_factory=now)
    text: str | None = None
    result: CodeResult | None = None
    error: CodeError | None = None
    context_id: str | None = None
    language: Language | None = None
    execution_count: int | None = None
    timed_out: bool | None = None
    duration: float | None = None
