"""Server-sent events: read them as dictionaries or models, write them from either.

An event that is not valid JSON, or does not fit the model, is skipped; ``[DONE]`` ends the stream. Closing the iterator
closes what it reads from, which is how a stream is cancelled.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterable, Generator, Iterable
from typing import Any, TypeVar, overload

import httpx
from pydantic import BaseModel, ValidationError

M = TypeVar("M", bound=BaseModel)

DONE = b"[DONE]"
_SKIP = object()


class SSEDecoder:
    """Bytes in, the data of whole events out, however the bytes were cut."""

    def __init__(self) -> None:
        self._rest = b""
        self._waiting: list[bytes] = []
        self._data: list[bytes] = []
        self._started = False

    def feed(self, chunk: bytes | str) -> list[bytes]:
        if isinstance(chunk, str):
            chunk = chunk.encode()
        if self._started and b"\n" not in chunk and b"\r" not in chunk and not self._rest.endswith(b"\r"):
            self._waiting.append(chunk)  # a long line: joined once, when its end has come
            return []
        buffer = b"".join([self._rest, *self._waiting, chunk])
        self._waiting.clear()
        if not self._started and buffer:
            if len(buffer) < 3 and b"\xef\xbb\xbf".startswith(buffer):
                self._rest = buffer
                return []
            buffer = buffer.removeprefix(b"\xef\xbb\xbf")
            self._started = True
        if b"\r" in buffer:
            # A CR at the very end may be half of a CRLF, so it waits for the next chunk.
            tail = b"\r" if buffer.endswith(b"\r") else b""
            buffer = buffer[: len(buffer) - len(tail)].replace(b"\r\n", b"\n").replace(b"\r", b"\n") + tail
        *lines, self._rest = buffer.split(b"\n")
        return [event for line in lines if (event := self._line(line)) is not None]

    def end(self) -> list[bytes]:
        """What an unterminated stream still holds; a last event without its blank line is delivered."""
        events = self.feed(b"\n\n") if self._rest or self._waiting else []
        if (event := self._line(b"")) is not None:
            events.append(event)
        return events

    def _line(self, line: bytes) -> bytes | None:
        if not line:
            event, self._data = b"\n".join(self._data), []
            return event or None
        if line.startswith(b"data:"):
            value = line[5:]
            self._data.append(value[1:] if value.startswith(b" ") else value)
        return None


def _parse(data: bytes, model: type[BaseModel] | None) -> Any:
    try:
        if model is not None:
            return model.model_validate_json(data)
        value = json.loads(data)
    except (ValueError, ValidationError):
        return _SKIP
    return value if isinstance(value, dict) else _SKIP


@overload
def parse_sse_stream(chunks: Iterable[bytes | str]) -> Generator[dict[str, Any], None, None]: ...
@overload
def parse_sse_stream(chunks: Iterable[bytes | str], model: type[M]) -> Generator[M, None, None]: ...
def parse_sse_stream(chunks: Iterable[bytes | str], model: type[BaseModel] | None = None) -> Generator[Any, None, None]:
    """The events in a stream of bytes, as dictionaries or as ``model``."""
    decoder = SSEDecoder()
    try:
        for chunk in chunks:
            for data in decoder.feed(chunk):
                if data == DONE:
                    return
                if (event := _parse(data, model)) is not _SKIP:
                    yield event
        for data in decoder.end():
            if data == DONE:
                return
            if (event := _parse(data, model)) is not _SKIP:
                yield event
    finally:
        close = getattr(chunks, "close", None)
        if close is not None:
            close()


@overload
def parse_sse_stream_async(chunks: AsyncIterable[bytes | str]) -> AsyncGenerator[dict[str, Any], None]: ...
@overload
def parse_sse_stream_async(chunks: AsyncIterable[bytes | str], model: type[M]) -> AsyncGenerator[M, None]: ...
async def parse_sse_stream_async(
    chunks: AsyncIterable[bytes | str], model: type[BaseModel] | None = None
) -> AsyncGenerator[Any, None]:
    """The events in an asynchronous stream of bytes, as dictionaries or as ``model``."""
    decoder = SSEDecoder()
    try:
        async for chunk in chunks:
            for data in decoder.feed(chunk):
                if data == DONE:
                    return
                if (event := _parse(data, model)) is not _SKIP:
                    yield event
        for data in decoder.end():
            if data == DONE:
                return
            if (event := _parse(data, model)) is not _SKIP:
                yield event
    finally:
        close = getattr(chunks, "aclose", None)
        if close is not None:
            await close()


@overload
def response_to_iterator(response: httpx.Response) -> Generator[dict[str, Any], None, None]: ...
@overload
def response_to_iterator(response: httpx.Response, model: type[M]) -> Generator[M, None, None]: ...
def response_to_iterator(response: httpx.Response, model: Any = None) -> Generator[Any, None, None]:
    """The events of an ``httpx`` response opened with ``stream=True``; closing the iterator closes the response."""
    try:
        yield from parse_sse_stream(response.iter_bytes(), model)
    finally:
        response.close()


@overload
def response_to_iterator_async(response: httpx.Response) -> AsyncGenerator[dict[str, Any], None]: ...
@overload
def response_to_iterator_async(response: httpx.Response, model: type[M]) -> AsyncGenerator[M, None]: ...
async def response_to_iterator_async(response: httpx.Response, model: Any = None) -> AsyncGenerator[Any, None]:
    """The events of an ``httpx`` response of an ``AsyncClient``; closing the iterator closes the response."""
    events = parse_sse_stream_async(response.aiter_bytes(), model)
    try:
        async for event in events:
            yield event
    finally:
        await events.aclose()
        await response.aclose()


def _encode(event: BaseModel | dict[str, Any]) -> bytes:
    if isinstance(event, BaseModel):
        text = event.model_dump_json(by_alias=True, exclude_none=True)
    else:
        text = json.dumps(event, ensure_ascii=False, separators=(",", ":"), default=str)
    return b"data: " + text.encode() + b"\n\n"


def iterator_to_sse(events: Iterable[BaseModel | dict[str, Any]]) -> Generator[bytes, None, None]:
    """Write events as a stream of bytes that ends with ``[DONE]``."""
    for event in events:
        yield _encode(event)
    yield b"data: [DONE]\n\n"


async def iterator_to_sse_async(events: AsyncIterable[BaseModel | dict[str, Any]]) -> AsyncGenerator[bytes, None]:
    """Write asynchronous events as a stream of bytes that ends with ``[DONE]``."""
    async for event in events:
        yield _encode(event)
    yield b"data: [DONE]\n\n"
