from __future__ import annotations

import pytest
from starlette.types import Receive, Scope, Send

from skerry.server.auth import Guard, is_loopback
from skerry.settings import Settings
from tests.server.exchange import Exchange


async def inner(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"inside"})


async def ask(target: str, headers: dict[str, str], *keys: str) -> Exchange:
    guard = Guard(inner, Settings(api_keys=keys))
    return await Exchange(guard, "GET", target, headers).body().start().end()


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer one"},
        {"Authorization": "bearer two"},
        {"X-API-Key": "two"},
        {"Authorization": "Bearer two", "Origin": "https://app.example", "Host": "skerry.example"},
    ],
)
async def test_a_key_opens_the_server_in_either_header(headers: dict[str, str]) -> None:
    assert (await ask("/v1/sandboxes", headers, "one", "two")).content == b"inside"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer on"},
        {"Authorization": "Bearer onee"},
        {"Authorization": "Basic one"},
        {"Authorization": "one"},
        {"Authorization": "Bearer "},
        {"X-API-Key": ""},
        {"X-API-Key": "ONE"},
    ],
)
async def test_anything_but_the_whole_key_is_refused(headers: dict[str, str]) -> None:
    refused = await ask("/v1/sandboxes", headers, "one")
    assert (refused.status, refused.error["code"]) == (401, "unauthorized")
    assert refused.headers["www-authenticate"] == "Bearer"


async def test_health_is_open_and_the_documents_are_not() -> None:
    assert (await ask("/health", {}, "one")).status == 200
    assert (await ask("/openapi.json", {}, "one")).status == 401
    assert (await ask("/docs", {}, "one")).status == 401
    assert (await ask("/health/../v1/sandboxes", {}, "one")).status == 401


async def test_without_keys_the_documents_are_open() -> None:
    assert (await ask("/docs", {})).status == 200


def test_loopback_is_what_cannot_leave_the_machine() -> None:
    assert all(map(is_loopback, ["localhost", "127.0.0.1", "127.1.2.3", "::1", "[::1]", "a.localhost", "LOCALHOST"]))
    assert not any(map(is_loopback, ["0.0.0.0", "::", "", "10.0.0.1", "example.com", "localhost.example.com"]))
