from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator

import httpx
import pytest

from skerry.client.asgi import ASGITransport, AsyncASGITransport
from skerry.client.frames import AsyncLocalFrames, LocalFrames
from tests.client.applications import Echo
from tests.client.conftest import HostedApp


async def eventually(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def test_a_whole_body_comes_back() -> None:
    with HostedApp(Echo()) as host, httpx.Client(transport=ASGITransport(host), base_url="http://localhost") as client:
        response = client.post("/a%20b", content=b"hello")
        assert (response.content, response.headers["x-path"]) == (b"hello", "/a%20b")


def test_a_body_is_streamed_in_while_the_answer_is_not_read() -> None:
    echo = Echo()
    with HostedApp(echo) as host, httpx.Client(transport=ASGITransport(host), base_url="http://localhost") as client:

        def pieces() -> Iterator[bytes]:
            yield b"one"
            while not echo.seen:
                time.sleep(0.001)
            yield b"two"

        assert client.post("/", content=pieces()).content == b"onetwo"
        assert echo.seen[:2] == [b"one", b"two"]


async def test_an_async_body_is_streamed_in_while_the_answer_is_not_read() -> None:
    echo = Echo()

    async def pieces() -> AsyncIterator[bytes]:
        yield b"one"
        await eventually(lambda: bool(echo.seen))
        yield b"two"

    with HostedApp(echo) as host:
        async with httpx.AsyncClient(transport=AsyncASGITransport(host), base_url="http://localhost") as client:
            assert (await client.post("/", content=pieces())).content == b"onetwo"


def test_an_application_that_answers_early_ends_the_upload() -> None:
    def endless() -> Iterator[bytes]:
        while True:
            yield b"x" * 1000

    with (
        HostedApp(Echo()) as host,
        httpx.Client(transport=ASGITransport(host), base_url="http://localhost") as client,
    ):
        assert client.post("/refuse", content=endless()).status_code == 413


def test_an_answer_is_held_back_by_a_slow_reader_and_closing_it_is_a_disconnect() -> None:
    echo = Echo()
    with HostedApp(echo) as host, httpx.Client(transport=ASGITransport(host), base_url="http://localhost") as client:
        with client.stream("GET", "/endless") as response:
            assert len(next(response.iter_bytes())) >= 65536
            time.sleep(0.1)
            assert echo.sent < 2 * 2**20
        host.submit(asyncio.wait_for(echo.left.wait(), 30)).result()


async def test_an_async_answer_is_held_back_by_a_slow_reader_and_closing_it_is_a_disconnect() -> None:
    echo = Echo()
    with HostedApp(echo) as host:
        async with httpx.AsyncClient(transport=AsyncASGITransport(host), base_url="http://localhost") as client:
            async with client.stream("GET", "/endless") as response:
                async for _ in response.aiter_bytes():
                    break
                await asyncio.sleep(0.1)
                assert echo.sent < 2 * 2**20
            await asyncio.wrap_future(host.submit(asyncio.wait_for(echo.left.wait(), 30)))


async def test_cancelling_a_request_is_a_disconnect() -> None:
    echo = Echo()
    with HostedApp(echo) as host:
        async with httpx.AsyncClient(transport=AsyncASGITransport(host), base_url="http://localhost") as client:
            task = asyncio.create_task(client.get("/endless"))
            await eventually(lambda: echo.sent > 0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.wrap_future(host.submit(asyncio.wait_for(echo.left.wait(), 30)))


def test_an_application_that_fails_is_a_transport_error() -> None:
    with (
        HostedApp(Echo()) as host,
        httpx.Client(transport=ASGITransport(host), base_url="http://localhost") as client,
        pytest.raises(httpx.RemoteProtocolError, match="it broke"),
    ):
        client.get("/broken")


def test_frames_go_both_ways_and_end() -> None:
    with HostedApp(Echo()) as host:
        frames = LocalFrames.connect(host, "ws://localhost/terminal?cols=80", {})
        frames.send(b"\x00\xff")
        frames.send("text")
        assert [frames.recv(), frames.recv()] == [b"\x00\xff", "text"]
        frames.send("bye")
        assert frames.recv() is None


async def test_closing_async_frames_is_a_disconnect() -> None:
    echo = Echo()
    with HostedApp(echo) as host:
        frames = await AsyncLocalFrames.connect(host, "ws://localhost/terminal", {})
        await frames.send("hello")
        assert await frames.recv() == "hello"
        await frames.close()
        await asyncio.wrap_future(host.submit(asyncio.wait_for(echo.left.wait(), 30)))
