"""A container is found below the API, at the root by a header, and at a host name of its own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from websockets.sync.client import connect

from tests.server.conftest import ServerProcess

ECHO = {"command": "echo $SKERRY_SANDBOX_ID hi", "sessionId": "s"}


def test_the_root_with_a_header_is_the_same_container(http: httpx.Client, box: str) -> None:
    below = f"/v1/sandboxes/{box}/container"
    named = {"X-Sandbox-Id": box}
    http.post("/api/write", json={"path": "/workspace/f", "content": "here"}, headers=named).raise_for_status()
    assert http.post(f"{below}/api/read", json={"path": "/workspace/f"}).json()["content"] == "here"
    assert http.get("/api/ping", headers=named).json()["status"] == "healthy"
    assert http.get("/proxy/8080/", headers=named).json()["code"] == "PORT_NOT_EXPOSED"


def test_a_host_name_is_a_container_of_its_own(http: httpx.Client, box: str) -> None:
    named = {"Host": f"{box}.container.localhost:8787"}
    http.post("/api/write", json={"path": "/workspace/g", "content": "there"}, headers=named).raise_for_status()
    found = http.post(f"/v1/sandboxes/{box}/container/api/read", json={"path": "/workspace/g"})
    assert found.json()["content"] == "there"
    assert "Skerry" in http.get("/", headers=named).text
    # Nothing else of the server is at this name.
    for path in ("/nope", "/v1/sandboxes", "/health"):
        answer = http.get(path, headers=named)
        assert (answer.status_code, answer.json()["code"]) == (404, "UNKNOWN_ERROR")


def test_sockets_are_found_the_same_ways(container_server: ServerProcess, box: str) -> None:
    root = container_server.url.replace("http", "ws")
    request = '{"type": "request", "id": "1", "method": "GET", "path": "/api/ping"}'
    for path in ("/ws", "/api/ws"):
        with connect(root + path, additional_headers={"X-Sandbox-Id": box}) as socket:
            socket.send(request)
            assert '"status":200' in str(socket.recv(10)).replace(" ", "")


def test_a_durable_objects_id_is_a_name(http: httpx.Client) -> None:
    named = {"X-Sandbox-Id": "3f" * 32}
    assert http.post("/api/execute", json=ECHO, headers=named).json()["exitCode"] == 0
    assert http.delete(f"/v1/sandboxes/{('3f' * 32)[:63]}").status_code == 200


@pytest.mark.parametrize("name", ["", "-x", "a/b", "x" * 65, "../health"])
def test_what_names_no_sandbox_is_told_how_to(http: httpx.Client, name: str) -> None:
    answer = http.get("/api/ping", headers={"X-Sandbox-Id": name})
    assert answer.status_code == 400
    assert "X-Sandbox-Id" in answer.json()["suggestion"]


@pytest.mark.parametrize("host", ["x.container.example.com", "x.container.localhost.example.com"])
def test_a_strange_host_name_is_refused_without_keys(http: httpx.Client, host: str) -> None:
    assert http.get("/api/ping", headers={"Host": host}).status_code == 403


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    home: Path = tmp_path_factory.mktemp("keyed-home")
    home.chmod(0o711)
    process = ServerProcess(home, api_keys=["a-key-of-some-length"], preview_domain="preview.example.com")
    yield process
    assert process.stop() == 0
    shutil.rmtree(home)


def test_without_the_key_each_client_is_refused_in_its_own_words(keyed: ServerProcess) -> None:
    with httpx.Client(base_url=keyed.url, timeout=60) as http:
        for path, headers in (
            ("/v1/sandboxes/x/container/api/ping", {}),
            ("/api/ping", {"X-Sandbox-Id": "x"}),
            ("/api/ping", {"Host": "x.container.preview.example.com"}),
        ):
            answer = http.get(path, headers=headers)
            assert answer.status_code == 401
            said = answer.json()
            assert (said["code"], said["httpStatus"]) == ("INTERNAL_ERROR", 401)
            assert said["message"]
            assert said["timestamp"]
            assert said["suggestion"]
            assert said["context"] == {}
            assert http.get(path, headers={**headers, "Authorization": "Bearer a-key-of-some-length"}).is_success
        refused = http.post("/v1/sandbox")
        assert (refused.status_code, refused.json()["code"]) == (401, "unauthorized")
        assert set(refused.json()) == {"error", "code"}


def test_a_sandbox_says_where_it_runs_and_keeps_its_settings(http: httpx.Client) -> None:
    """What the Sandbox class sets for its container is set with the API, and seen from the container."""
    settings = {"id": "placed", "env": {"CLOUDFLARE_PLACEMENT_ID": "here-1", "COMMAND_TIMEOUT_MS": "300"}}
    http.post("/v1/sandboxes", json={**settings, "labels": {"team": "a"}, "sleepAfter": "5m"}).raise_for_status()
    base = "/v1/sandboxes/placed"
    try:
        made = http.post(f"{base}/container/api/session/create", json={"id": "s"})
        assert made.json()["containerPlacementId"] == "here-1"
        again = http.post(f"{base}/container/api/session/create", json={"id": "s"}).json()
        assert again["context"] == {"sessionId": "s", "containerPlacementId": "here-1"}
        late = http.post(f"{base}/container/api/execute", json={"command": "sleep 60", "sessionId": "s"})
        assert (late.status_code, late.json()["code"]) == (500, "COMMAND_EXECUTION_ERROR")
        http.patch(base, json={"labels": {"team": "b"}, "keepAlive": True}).raise_for_status()
        found = http.get(base).json()
        assert (found["state"], found["labels"], found["keepAlive"]) == ("active", {"team": "b"}, True)
    finally:
        http.delete(base)


def test_answers_and_streams_may_be_read_by_pages_of_others(http: httpx.Client, box: str) -> None:
    base = f"/v1/sandboxes/{box}/container/api"
    body = {"command": "true", "sessionId": "s"}
    for path in ("/execute", "/execute/stream"):
        assert http.post(base + path, json=body).headers["access-control-allow-origin"] == "*"
    asked = http.options(f"{base}/execute")
    assert asked.status_code == 204
    assert "X-Sandbox-Id" in asked.headers["access-control-allow-headers"]


def test_what_goes_wrong_with_code_has_a_shape_of_its_own(http: httpx.Client, box: str) -> None:
    base = f"/v1/sandboxes/{box}/container"
    for body in ({}, {"context_id": "nope", "code": "1"}):
        answer = http.post(f"{base}/api/execute/code", json=body)
        assert set(answer.json()) == {"error", "code", "details"}
    early = http.post(f"{base}-0.3/api/execute/code", json={"context_id": "nope", "code": "1"})
    assert (early.status_code, early.json()["error"]) == (404, "Context nope not found")
