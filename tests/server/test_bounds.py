from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

import pytest
from fastapi import APIRouter, FastAPI, Query, Request, Response

from skerry.models import ExecRequest
from skerry.server import errors
from skerry.server.bounds import BoundedRequest, BoundedRoute
from skerry.settings import Settings
from tests.server.exchange import Exchange

JSON = {"Content-Type": "application/json"}
router = APIRouter(route_class=BoundedRoute)


@router.post("/json")
async def take_json(body: ExecRequest, flag: Annotated[bool, Query()] = False) -> str:
    return body.command


@router.put("/raw")
async def take_raw(request: Request) -> Response:
    assert isinstance(request, BoundedRequest)
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
    return Response(str(size))


@pytest.fixture
def app() -> FastAPI:
    app = FastAPI()
    app.state.settings = Settings(max_json_bytes=1000, receive_timeout=0.2)
    errors.install(app)
    app.router.routes.extend(router.routes)
    return app


async def test_json_within_the_bounds_is_read(app: FastAPI) -> None:
    done = await Exchange(app, "POST", "/json", JSON).body(b'{"comm', more=True).body(b'and": "ls"}').start().end()
    assert done.content == b'"ls"'


async def test_a_route_is_made_when_it_is_first_asked_for(app: FastAPI) -> None:
    made: list[str] = []

    class Seen(BoundedRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            made.append(self.path)
            return super().get_route_handler()

    seen = APIRouter(route_class=Seen)
    for path in ("/one", "/other"):
        seen.post(path)(take_json)
    app.router.routes.extend(seen.routes)
    assert made == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            done = await Exchange(app, "POST", "/other", JSON).body(b'{"command": "ls"}').start().end()
            assert done.content == b'"ls"'
    assert made == ["/other"]
    with pytest.raises(AttributeError, match="'Seen' object has no attribute 'nothing'"):
        _ = seen.routes[1].nothing  # type: ignore[attr-defined]


@pytest.mark.parametrize("announced", [True, False])
async def test_json_that_is_too_large_is_refused(app: FastAPI, announced: bool) -> None:
    body = b'{"command": "' + b"x" * 1000 + b'"}'
    headers = {**JSON, "Content-Length": str(len(body))} if announced else JSON
    refused = await Exchange(app, "POST", "/json", headers).body(body).start().end()
    assert (refused.status, refused.error["code"]) == (413, "too_large")
    assert refused.headers["connection"] == "close"


async def test_a_raw_body_has_no_limit(app: FastAPI) -> None:
    exchange = Exchange(app, "PUT", "/raw").start()
    for _ in range(5):
        exchange.body(b"x" * 1000, more=True)
    assert (await exchange.body().end()).content == b"5000"


@pytest.mark.parametrize(("method", "path"), [("POST", "/json"), ("PUT", "/raw")])
async def test_a_body_that_stops_coming_is_given_up(app: FastAPI, method: str, path: str) -> None:
    refused = await Exchange(app, method, path, JSON).body(b"{", more=True).start().end()
    assert (refused.status, refused.error["code"]) == (408, "request_timeout")


async def test_json_that_trickles_is_given_up_and_a_raw_body_that_trickles_is_not(app: FastAPI) -> None:
    async def trickle(exchange: Exchange) -> Exchange:
        for _ in range(5):
            exchange.body(b" ", more=True)
            await asyncio.sleep(0.1)
        return await exchange.body(b"{}").end()

    json = trickle(Exchange(app, "POST", "/json", JSON).start())
    raw = trickle(Exchange(app, "PUT", "/raw").start())
    refused, done = await asyncio.gather(json, raw)
    assert (refused.status, done.content) == (408, b"7")


@pytest.mark.parametrize(("method", "path"), [("POST", "/json"), ("PUT", "/raw")])
async def test_a_body_that_is_not_as_long_as_announced_is_refused(app: FastAPI, method: str, path: str) -> None:
    headers = {**JSON, "Content-Length": "20"}
    refused = await Exchange(app, method, path, headers).body(b'{"command": "ls"}').start().end()
    assert (refused.status, refused.error["code"]) == (400, "invalid_request")


async def test_a_client_that_leaves_while_sending_is_no_fault(app: FastAPI) -> None:
    exchange = Exchange(app, "PUT", "/raw").body(b"half", more=True).start()
    exchange.leave()
    assert (await exchange.end()).status == 499


@pytest.mark.parametrize(
    "body", [b"{", b"\xff", b"[" * 10_000, b'{"command": NaN}', b'{"command": "\\ud800"}', b"nope"]
)
async def test_what_is_not_json_is_refused(app: FastAPI, body: bytes) -> None:
    app.state.settings = Settings()
    refused = await Exchange(app, "POST", "/json", JSON).body(body).start().end()
    assert (refused.status, refused.error["code"]) == (400, "invalid_request")


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_json_must_be_declared_as_json(app: FastAPI, kind: str) -> None:
    refused = await Exchange(app, "POST", "/json", {"Content-Type": kind}).body(b'{"command": "x"}').start().end()
    assert refused.status == 400
    assert "Content-Type: application/json" in refused.error["hint"]


async def test_an_unknown_query_parameter_is_refused_by_name(app: FastAPI) -> None:
    body = b'{"command": "x"}'
    assert (await Exchange(app, "POST", "/json?flag=true", JSON).body(body).start().end()).status == 200
    refused = await Exchange(app, "POST", "/json?flag=true&flog=1", JSON).body(body).start().end()
    assert refused.status == 400
    assert refused.error["details"]["fields"][0]["field"] == "flog"
