"""What a run says, made into events; and the way they take to someone who listens."""

from __future__ import annotations

import codecs
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

from skerry.models import CodeError, CodeEvent, CodeResult, now
from skerry.runtime.backlog import Backlog
from skerry.runtime.interpreter.executor import STREAMS, Executor, Stream

OVERFLOW = 8 << 20

Emit = Callable[[CodeEvent, int], None]
"""Takes an event, and how many bytes it stands for."""


class Transcript:
    """Hears an executor. An error is kept back: only at the end is it known whether it is the one to report."""

    def __init__(self, emit: Emit) -> None:
        self.error: CodeError | None = None
        self._emit = emit
        self._decoders = {name: codecs.getincrementaldecoder("utf-8")("replace") for name in STREAMS}

    def output(self, stream: Stream, data: bytes) -> None:
        text = self._decoders[stream].decode(data)
        if text:
            self._emit(CodeEvent.model_construct(type=stream, timestamp=now(), text=text), len(data))

    def message(self, message: dict[str, Any], size: int) -> None:
        try:
            if message["type"] == "error":
                self.error = CodeError.model_validate({**message, "lineNumber": message.get("line")})
            else:
                result = CodeResult.model_validate(message.get("result"))
                result.is_main_result = message.get("main") is True
                self._emit(CodeEvent.model_construct(type="result", timestamp=now(), result=result), size)
        except ValidationError:
            self.notice("Something was displayed in a way that could not be understood; it was left out.")

    def notice(self, text: str) -> None:
        self._emit(CodeEvent(type="notice", text=text), len(text))

    def close(self) -> None:
        for stream, decoder in self._decoders.items():
            rest = decoder.decode(b"", final=True)
            if rest:
                self._emit(CodeEvent(type=stream, text=rest), len(rest))


class Live(Backlog[CodeEvent]):
    """Events to one reader; the executor waits for it, until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self._executor: Executor | None = None

    def attach(self, executor: Executor) -> None:
        self._executor = executor

    def release(self) -> None:
        """It is being stopped, or has ended: it need not wait any more."""
        self.resume()
        self._executor = None

    def emit(self, event: CodeEvent, size: int) -> None:
        if self.size > OVERFLOW and event.type in STREAMS:
            return  # nobody holds it back any more, and nobody has asked for so much of its end
        self.add(event, size)

    def pause(self) -> None:
        if self._executor is not None:
            self._executor.pause()

    def resume(self) -> None:
        if self._executor is not None:
            self._executor.resume()
