from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi import FastAPI
from structlog.testing import capture_logs

from skerry.errors import SandboxStartError
from skerry.server.app import create_app
from skerry.server.errors import error_response
from skerry.settings import Settings
from tests.server.exchange import Exchange

JSON = {"Content-Type": "application/json"}


class Broken:
    """A registry whose every method fails as a fault of ours would."""

    reception = None

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("postgres://user:hunter2@db")


@pytest.fixture
def app() -> FastAPI:
    return create_app(Broken(), Settings())  # type: ignore[arg-type]


async def ask(app: FastAPI, method: str, target: str, body: Any = None) -> Exchange:
    content = b"" if body is None else json.dumps(body).encode()
    return await Exchange(app, method, target, JSON).body(content).start().end()


async def test_an_unknown_route_is_not_found(app: FastAPI) -> None:
    for target in ("/nowhere", "/v1/sandboxes/", "/v1/sandboxes/demo/nothing"):
        missing = await ask(app, "GET", target)
        assert (missing.status, missing.error["code"]) == (404, "not_found")


async def test_a_wrong_method_is_refused_with_the_right_ones(app: FastAPI) -> None:
    refused = await ask(app, "POST", "/v1/sandboxes/demo")
    assert (refused.status, refused.error["code"]) == (405, "method_not_allowed")
    assert refused.headers["allow"] == "GET, PATCH, DELETE"


@pytest.mark.parametrize(
    ("method", "target", "body", "code"),
    [
        ("POST", "exec", {}, "missing_command"),
        ("POST", "exec", {"command": " "}, "missing_command"),
        ("POST", "exec/stream", {"args": ["x"]}, "missing_command"),
        ("POST", "processes", {"command": ""}, "missing_command"),
        ("POST", "exec", None, "invalid_request"),
        ("POST", "exec", {"command": "x", "timeout": -1}, "invalid_request"),
        ("POST", "exec", {"command": "x", "comand": "y"}, "invalid_request"),
        ("POST", "exec", {"command": 7}, "invalid_request"),
        ("POST", "exec", [], "invalid_request"),
        ("GET", "files", None, "missing_path"),
        ("GET", "files?path=", None, "missing_path"),
        ("PUT", "files", None, "missing_path"),
        ("GET", "files/content", None, "missing_path"),
        ("POST", "files/mkdir", {}, "missing_path"),
        ("POST", "files/rename", {"newPath": "x"}, "missing_path"),
        ("GET", "files?path=x&offset=-1", None, "invalid_request"),
        ("PUT", "files?path=x&mode=rwx", None, "invalid_request"),
        ("GET", "events?limit=0", None, "invalid_request"),
        ("POST", "ports/0/wait", None, "invalid_request"),
    ],
)
async def test_what_is_wrong_with_a_request_is_a_400(
    app: FastAPI, method: str, target: str, body: Any, code: str
) -> None:
    refused = await ask(app, method, f"/v1/sandboxes/demo/{target}", body)
    assert (refused.status, refused.error["code"]) == (400, code)


async def test_an_invalid_field_is_named_and_its_value_is_not_repeated(app: FastAPI) -> None:
    refused = await ask(app, "POST", "/v1/sandboxes/demo/exec", {"command": "x", "env": {"TOKEN": ["hunter2"]}})
    assert [field["field"] for field in refused.error["details"]["fields"]] == ["env.TOKEN"]
    assert b"hunter2" not in refused.content


async def test_an_unforeseen_fault_is_a_500_that_tells_nothing_and_is_found_in_the_log(app: FastAPI) -> None:
    with capture_logs() as logged:
        failed = await ask(app, "GET", "/v1/sandboxes/demo")
    assert (failed.status, failed.error["code"]) == (500, "internal_error")
    assert b"hunter2" not in failed.content
    (entry,) = [entry for entry in logged if entry["event"] == "unexpected_error"]
    assert entry["error_id"] == failed.error["details"]["errorId"]
    assert entry["error"] == "RuntimeError"
    assert any("get_sandbox" in frame for frame in entry["frames"])
    assert "hunter2" not in repr(logged)


def test_an_error_about_a_name_that_is_not_utf8_is_still_json() -> None:
    error = SandboxStartError("'\udcff' is odd.", details={"path": "\udcff", "at": object()})
    assert json.loads(bytes(error_response(error).body))["error"]["code"] == "sandbox_start_failed"
