from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from skerry import (
    ExecEvent,
    LogEvent,
    iterator_to_sse,
    iterator_to_sse_async,
    parse_sse_stream,
    parse_sse_stream_async,
    response_to_iterator,
)

STREAM = (
    b': a comment\n\ndata: {"type":"start","command":"x"}\r\n\r\nevent: named\nid: 7\ndata: {"type":"stdout",\n'
    b'data: "data":"\xc3\xa9"}\n\ndata: {not json}\n\ndata: {"type":"unheard"}\n\n'
    b'data: {"type":"complete","exitCode":3}\n\n'
    b'data: [DONE]\n\ndata: {"type":"start"}\n\n'
)


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_events_are_the_same_however_the_bytes_are_cut(size: int) -> None:
    chunks = [STREAM[at : at + size] for at in range(0, len(STREAM), size)]
    events = list(parse_sse_stream(chunks, ExecEvent))
    assert [(event.type, event.data, event.exit_code) for event in events] == [
        ("start", None, None),
        ("stdout", "é", None),
        ("complete", None, 3),
    ]


def test_without_a_model_events_are_dictionaries() -> None:
    assert [event["type"] for event in parse_sse_stream([STREAM])] == ["start", "stdout", "unheard", "complete"]


def test_a_last_event_without_its_blank_line_is_delivered() -> None:
    assert list(parse_sse_stream(['data: {"a": 1}'])) == [{"a": 1}]


async def test_closing_the_iterator_closes_what_it_reads() -> None:
    closed = []

    def chunks() -> Iterator[bytes]:
        try:
            while True:
                yield b'data: {"a": 1}\n\n'
        finally:
            closed.append("sync")

    async def later() -> AsyncIterator[bytes]:
        try:
            while True:
                yield b'data: {"a": 1}\n\n'
        finally:
            closed.append("async")

    events = parse_sse_stream(chunks())
    next(events)
    events.close()
    async_events = parse_sse_stream_async(later())
    await anext(async_events)
    await async_events.aclose()
    assert closed == ["sync", "async"]


async def test_what_is_written_can_be_read_again() -> None:
    events = [LogEvent(type="stdout", process_id="p", data="a\nb"), LogEvent(type="exit", process_id="p", exit_code=0)]
    written = b"".join(iterator_to_sse(events))
    assert written.endswith(b"data: [DONE]\n\n")
    assert list(parse_sse_stream([written], LogEvent)) == events

    async def source() -> AsyncIterator[LogEvent]:
        for event in events:
            yield event

    assert b"".join([piece async for piece in iterator_to_sse_async(source())]) == written


def test_a_response_is_an_iterator_and_is_closed_with_it() -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=iter([STREAM])))
    with httpx.Client(transport=transport) as client:
        response = client.send(client.build_request("GET", "http://x"), stream=True)
        events = response_to_iterator(response, ExecEvent)
        assert next(events).type == "start"
        events.close()
        assert response.is_closed
