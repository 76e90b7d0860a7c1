"""The directory of routes finds what asking each route in turn would find."""

from __future__ import annotations

import re
from itertools import product

import pytest
from starlette.routing import BaseRoute, Match, Route, WebSocketRoute

from skerry.server.app import create_app
from skerry.server.directory import FOUND, Directory
from skerry.settings import Settings

ROUTES = [r for r in create_app(object(), Settings()).router.routes if not isinstance(r, Directory)]  # type: ignore[arg-type]
METHODS = ("GET", "POST", "DELETE")
FILLINGS = ("one", "sandboxes", "")


def scopes(path: str) -> list[dict[str, object]]:
    asked = [{"type": "http", "method": method, "path": path, "headers": []} for method in METHODS]
    return [*asked, {"type": "websocket", "path": path, "headers": []}]


def in_turn(scope: dict[str, object]) -> BaseRoute | None:
    return next((route for route in ROUTES if route.matches(dict(scope))[0] is Match.FULL), None)


def paths() -> list[str]:
    filled = set()
    for route, word in product(ROUTES, FILLINGS):
        path = re.sub(r"\{[^}:]*\}", word, route.path)  # type: ignore[attr-defined]
        for rest in ("", "/", "/x/y"):
            filled.add(re.sub(r"\{[^}]*:path\}", rest, path))
            filled.add(path.split("{")[0] + rest)
    return sorted(filled)


def test_each_address_and_method_finds_the_same_route_as_asking_each_in_turn() -> None:
    directory = Directory(ROUTES)
    found = 0
    for path in paths():
        for scope in scopes(path):
            wanted, got = in_turn(scope), directory.find(dict(scope))
            assert (got[0] if got else None) is wanted, (scope["type"], scope.get("method"), path)
            found += wanted is not None
    assert found > len(ROUTES)


def test_of_two_routes_that_take_the_same_request_the_earlier_one_gets_it() -> None:
    async def nothing(_: object) -> None: ...

    named = [Route("/things/{rest:path}", nothing), Route("/things/{id}", nothing), Route("/things/first", nothing)]
    for order in (named, named[::-1]):
        found = Directory(order).find({"type": "http", "method": "GET", "path": "/things/first", "headers": []})
        assert found is not None
        assert found[0] is order[0]


@pytest.mark.parametrize("path", ["", "/", "//", "/v1", "/v1//exec", "no-slash"])
def test_what_is_nobodys_address_is_left_to_the_others(path: str) -> None:
    async def nothing(_: object) -> None: ...

    directory = Directory([Route("/v1/{id}/exec", nothing), WebSocketRoute("/v1/{id}/ws", nothing)])
    for scope in scopes(path):
        assert directory.matches(scope) == (Match.NONE, {})
        assert FOUND not in scope
