from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from starlette.routing import Route, WebSocketRoute

from skerry.control.actor import Caller
from skerry.models import KeyScope
from skerry.server.app import create_app
from skerry.server.directory import Directory
from skerry.server.scopes import BEYOND_ONE_SANDBOX, TABLE, WITHIN_ONE_SANDBOX, Need, rule_of
from skerry.settings import Settings


def routes() -> Iterator[str]:
    for route in create_app(object(), Settings()).router.routes:  # type: ignore[arg-type]
        if isinstance(route, Directory):
            continue
        if isinstance(route, Route):
            for method in route.methods or {"*"}:
                if method != "HEAD":
                    yield f"{method} {route.path}"
        else:
            assert isinstance(route, WebSocketRoute) or hasattr(route, "path")
            yield f"WS {route.path}"  # type: ignore[attr-defined]


def test_every_route_says_what_it_asks_of_its_caller_and_the_table_has_no_other() -> None:
    assert set(routes()) == set(TABLE)


@pytest.mark.parametrize("route", TABLE)
def test_a_request_finds_the_line_of_its_own_route(route: str) -> None:
    method, path = route.split(" ", 1)
    filled = path.replace("{rest:path}", "/deep/er")
    filled = re.sub(r"\{\w+\}", "x-1", filled)
    assert rule_of("DELETE" if method == "*" else method, filled).route == route


@pytest.mark.parametrize("path", ["/v1", "/v1/sandboxes/", "/v1/sandboxes//exec", "/v1/nothing", "//v1/sandboxes", ""])
def test_what_no_route_takes_is_for_admins(path: str) -> None:
    assert rule_of("GET", path).need is Need.ADMIN


def allowed(scope: KeyScope) -> set[str]:
    who = Caller("somebody", scope=scope)
    return {route for route in TABLE if rule_of(*_asked(route)).allows(who, by_session=False)}


def _asked(route: str) -> tuple[str, str]:
    method, path = route.split(" ", 1)
    return ("GET" if method == "*" else method), path.replace("{rest:path}", "")


WITH_OTHER_TOKENS = {
    "POST /api/v2/cloudflare/webhook",
    "WS /sessions/{session}/ws",
    "POST /sandbox/{sandbox}/error",
    "POST /sandbox/{sandbox}/pr",
}
"""For which a key is no use."""
SIGNING_IN = {"POST /v1/auth/sign-in", "POST /api/auth/sign-in/email"}


def test_a_read_only_key_changes_nothing() -> None:
    reading = {"POST /v1/sandboxes/{id}/processes/{pid}/wait", "POST /v1/sandboxes/{id}/ports/{port}/wait"}
    reading |= {"POST /v1/sandbox/{id}/persist"}  # an archive of its files
    reading |= {"POST /v1/sandboxes/{id}/watch", "POST /v1/sandboxes/{id}/watch/check", *SIGNING_IN}
    reading |= WITH_OTHER_TOKENS
    assert {route for route in allowed(KeyScope.READ_ONLY) if not route.startswith("GET ")} == reading


def test_an_admin_may_do_everything_that_takes_no_session() -> None:
    beyond = set(TABLE) - allowed(KeyScope.ADMIN)
    both = {"POST /v1/auth/sign-out", "POST /api/auth/sign-out"}
    assert beyond == both | {"POST /v1/auth/password", "GET /api/auth/get-session"}


def test_a_key_for_use_makes_no_keys_users_owners_or_images() -> None:
    used = allowed(KeyScope.USE)
    for noun in ("keys", "users", "images/{name}"):
        assert not {route for route in used if f"/v1/{noun}" in route}
    assert "PUT /v1/owners/{owner}" not in used


def test_a_key_for_one_sandbox_stays_with_it() -> None:
    mine = allowed(KeyScope.SANDBOX)
    outside = {route for route in mine if "/v1/sandboxes/{id}" not in route}
    assert outside == WITHIN_ONE_SANDBOX | {"GET /health", "GET /tasks", *SIGNING_IN, *WITH_OTHER_TOKENS}
    assert not mine & BEYOND_ONE_SANDBOX
