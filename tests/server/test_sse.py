from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fastapi import FastAPI, Response

from skerry.errors import NotFoundError, SandboxLostError
from skerry.models import ExecEvent
from skerry.server import errors, sse
from skerry.server.closing import Closing
from skerry.server.witness import Witness
from tests.server.exchange import Exchange

Source = Callable[[Any], AsyncIterator[ExecEvent]]


class Stage:
    """An app with one stream, and a record of what was entered and left."""

    def __init__(self, source: Source) -> None:
        self.log: list[str] = []
        self.closed = asyncio.Event()
        self.app = FastAPI()
        self.app.state.closing = Closing()
        errors.install(self.app)
        self.app.add_middleware(Witness, audit=None, access_log=False)

        @self.app.get("/events")
        async def events() -> Response:
            return sse.EventStream(self.use(), source, lambda e: ExecEvent(type="error", error=str(e)))

    @asynccontextmanager
    async def use(self) -> AsyncIterator[Any]:
        self.log.append("entered")
        try:
            yield self
        finally:
            self.log.append("left")

    def open(self) -> Exchange:
        return Exchange(self.app, "GET", "/events").body().start()


def events(exchange: Exchange) -> list[dict[str, Any]]:
    blocks = exchange.content.decode().split("\n\n")
    return [json.loads(block.removeprefix("data: ")) for block in blocks if block.startswith("data: ")]


async def test_events_are_json_blocks_and_nothing_buffers_them() -> None:
    async def source(stage: Stage) -> AsyncIterator[ExecEvent]:
        assert stage.log == ["entered"]
        yield ExecEvent(type="stdout", data="a\nb")
        yield ExecEvent(type="complete", exit_code=0)

    stage = Stage(source)
    done = await stage.open().end()
    assert done.headers["content-type"].startswith("text/event-stream")
    assert (done.headers["cache-control"], done.headers["x-accel-buffering"]) == ("no-cache", "no")
    assert [(e["type"], e.get("data"), e.get("exitCode")) for e in events(done)] == [
        ("stdout", "a\nb", None),
        ("complete", None, 0),
    ]
    assert done.complete
    assert stage.log == ["entered", "left"]


async def test_each_silence_that_is_long_enough_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "OPENING", 0.02)
    monkeypatch.setattr(sse.EventStream, "keepalive", 0.08)

    async def source(stage: Stage) -> AsyncIterator[ExecEvent]:
        for _ in range(6):
            yield ExecEvent(type="stdout", data="x")
            await asyncio.sleep(0.12)

    done = await Stage(source).open().end()
    spoken = [block for block in done.content.decode().split("data: ")[1:] if ": keepalive" in block]
    assert len(spoken) == 6


async def test_an_error_before_the_first_event_is_an_http_error() -> None:
    async def source(stage: Stage) -> AsyncIterator[ExecEvent]:
        raise NotFoundError("nothing here")
        yield ExecEvent(type="start")

    stage = Stage(source)
    failed = await stage.open().end()
    assert (failed.status, failed.error["message"]) == (404, "nothing here")
    assert stage.log == ["entered", "left"]


async def test_an_error_after_the_first_event_is_an_event_with_its_code() -> None:
    async def source(stage: Stage) -> AsyncIterator[ExecEvent]:
        yield ExecEvent(type="start")
        raise SandboxLostError("it went away")

    done = await Stage(source).open().end()
    last = events(done)[-1]
    assert (last["type"], last["error"], last["code"]) == ("error", "it went away", "sandbox_lost")
    assert done.complete


async def test_an_unexpected_error_in_a_stream_tells_nothing_of_the_inside() -> None:
    async def source(stage: Stage) -> AsyncIterator[ExecEvent]:
        yield ExecEvent(type="start")
        raise RuntimeError("password=hunter2")

    done = await Stage(source).open().end()
    assert events(done)[-1]["code"] == "internal_error"
    assert b"hunter2" not in done.content


async def test_a_silent_source_gets_its_headers_and_then_keepalives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "OPENING", 0.01)
    monkeypatch.setattr(sse, "KEEPALIVE", 0.01)

    async def source(stage: Stage) -> AsyncIterator[ExecEvent]:
        await asyncio.Event().wait()
        yield ExecEvent(type="start")

    stage = Stage(source)
    exchange = stage.open()
    assert await exchange.started() == 200
    await exchange.until(b": keepalive\n\n" * 3)
    exchange.leave()
    await exchange.end()
    assert stage.log == ["entered", "left"]


@pytest.mark.parametrize("said", [True, False])
async def test_a_client_that_leaves_closes_the_source_though_nothing_is_being_sent(said: bool) -> None:
    waiting = asyncio.Event()

    async def source(stage: Stage) -> AsyncIterator[ExecEvent]:
        try:
            if said:
                yield ExecEvent(type="start")
            waiting.set()
            await asyncio.Event().wait()
        finally:
            stage.log.append("closed")

    stage = Stage(source)
    exchange = stage.open()
    await waiting.wait()
    exchange.leave()
    await exchange.end()
    assert stage.log == ["entered", "closed", "left"]


async def test_a_source_may_hold_a_timeout_open_across_its_events() -> None:
    async def source(stage: Stage) -> AsyncIterator[ExecEvent]:
        async with asyncio.timeout(60):
            yield ExecEvent(type="start")
            yield ExecEvent(type="complete")

    assert len(events(await Stage(source).open().end())) == 2


async def test_a_slow_reader_slows_only_its_own_source() -> None:
    produced = {"slow": 0, "fast": 0}

    def count(name: str) -> Source:
        async def source(stage: Stage) -> AsyncIterator[ExecEvent]:
            for _ in range(50):
                produced[name] += 1
                yield ExecEvent(type="stdout", data=name)

        return source

    slow = Stage(count("slow")).open()
    slow.stop_reading()
    fast = await Stage(count("fast")).open().end()
    assert len(events(fast)) == 50
    assert produced["slow"] <= 1
    slow.read_on()
    assert len(events(await slow.end())) == 50


async def test_streams_end_in_good_order_when_the_server_closes() -> None:
    async def source(stage: Stage) -> AsyncIterator[ExecEvent]:
        yield ExecEvent(type="start")
        await asyncio.Event().wait()

    stage = Stage(source)
    exchange = stage.open()
    await exchange.until(b"start")
    stage.app.state.closing.set()
    assert (await exchange.end()).complete
    assert stage.log == ["entered", "left"]


async def test_cancelling_the_request_cancels_the_stream() -> None:
    async def source(stage: Stage) -> AsyncIterator[ExecEvent]:
        yield ExecEvent(type="start")
        await asyncio.Event().wait()

    stage = Stage(source)
    exchange = stage.open()
    await exchange.until(b"start")
    assert exchange.task is not None
    exchange.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await exchange.end()
    assert stage.log == ["entered", "left"]
