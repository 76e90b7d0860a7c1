"""The events of one execution, put together: what those get who do not want them one by one."""

from __future__ import annotations

from skerry.errors import InternalError
from skerry.models import CodeError, CodeEvent, CodeLogs, CodeResult, Execution

OUTPUT_LIMIT = 32 << 20
RESULTS_LIMIT = 64 << 20


class Record:
    """Keeps so much output and so many results, and says what it left out."""

    def __init__(self, code: str) -> None:
        self._code = code
        self._pieces: dict[str, list[str]] = {"stdout": [], "stderr": []}
        self._left = {"stdout": OUTPUT_LIMIT, "stderr": OUTPUT_LIMIT}
        self._dropped = {"stdout": 0, "stderr": 0}
        self._room = RESULTS_LIMIT
        self._results: list[CodeResult] = []
        self._omitted = 0
        self._notices: list[str] = []
        self._error: CodeError | None = None
        self._end: CodeEvent | None = None

    def add(self, event: CodeEvent, size: int = 0) -> None:
        """``size`` is that of a result, in bytes, where it should be bounded."""
        if event.type in ("stdout", "stderr"):
            self._write(event.type, event.text or "")
        elif event.type == "result" and event.result is not None:
            self._room -= size
            if self._room >= 0:
                self._results.append(event.result)
            else:
                self._omitted += 1
        elif event.type == "notice" and event.text is not None:
            self._notices.append(event.text)
        elif event.type == "error":
            self._error = event.error
        elif event.type == "complete":
            self._end = event

    def _write(self, name: str, text: str) -> None:
        data = text.encode(errors="replace")
        kept = data[: self._left[name]]
        if kept:
            self._pieces[name].append(text if len(kept) == len(data) else kept.decode(errors="ignore"))
        self._left[name] -= len(kept)
        self._dropped[name] += len(data) - len(kept)

    def execution(self) -> Execution:
        """All of it, once it is complete."""
        end = self._end
        if end is None or end.context_id is None or end.language is None:
            raise InternalError("Nothing was said about how the code ended.")
        for name, dropped in self._dropped.items():
            if dropped:
                self._notices.append(f"{dropped} bytes at the end of {name} were left out: there were too many.")
        if self._omitted:
            self._notices.append(f"{self._omitted} results were left out: together they were too large.")
        return Execution(
            code=self._code,
            context_id=end.context_id,
            language=end.language,
            logs=CodeLogs(
                stdout=self._pieces["stdout"],
                stderr=self._pieces["stderr"],
                stdout_truncated=self._dropped["stdout"],
                stderr_truncated=self._dropped["stderr"],
            ),
            results=self._results,
            error=self._error,
            execution_count=end.execution_count,
            notices=self._notices,
            timed_out=bool(end.timed_out),
            duration=end.duration or 0,
        )
