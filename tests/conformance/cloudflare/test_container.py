"""What the container's API does that neither its genuine client nor the transcript asks for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import httpx
import pytest
from websockets.sync.client import ClientConnection, connect

from tests.server.conftest import ServerProcess

LONG = 30


@pytest.fixture(scope="module")
def api(http: httpx.Client, box: str) -> str:
    return f"/v1/sandboxes/{box}/container/api"


@pytest.fixture
def socket(container_server: ServerProcess, box: str) -> Iterator[ClientConnection]:
    address = f"{container_server.url.replace('http', 'ws')}/v1/sandboxes/{box}/container/api/ws"
    with connect(address) as connection:
        yield connection


def events(answer: httpx.Response) -> list[dict]:
    assert answer.headers["content-type"].startswith("text/event-stream")
    return [json.loads(frame[6:]) for frame in answer.text.split("\n\n") if frame.startswith("data: ")]


# -- sessions ----------------------------------------------------------------------------------------------------------


def test_a_session_may_be_named_in_a_header_or_in_the_address(http: httpx.Client, api: str) -> None:
    ask = {"command": "echo $SESSION_ID"}
    for address, headers in (
        ("execute", {"X-Session-Id": "one"}),
        ("execute?session=one", {}),
        ("execute?sessionId=one", {}),
    ):
        done = http.post(f"{api}/{address}", json=ask, headers=headers).json()
        assert (done["stdout"], done["exitCode"]) == ("one", 0)
    both = http.post(f"{api}/execute", json={**ask, "sessionId": "two"}, headers={"X-Session-Id": "one"}).json()
    assert both["stdout"] == "two"


def test_a_session_without_an_id_is_given_one_whatever_it_is_called(http: httpx.Client, api: str) -> None:
    made = http.post(f"{api}/session/create", json={"name": "low tide"}).json()
    assert re.fullmatch(r"session_\d{13}_[0-9a-f]+", made["data"]["id"])
    assert made["containerPlacementId"] is None


def test_the_time_of_a_sessions_commands_may_be_limited(http: httpx.Client, api: str) -> None:
    http.post(f"{api}/session/create", json={"id": "hasty", "commandTimeoutMs": 200}).raise_for_status()
    late = http.post(f"{api}/execute", json={"command": "sleep 60", "sessionId": "hasty"})
    assert (late.status_code, late.json()["code"]) == (500, "COMMAND_EXECUTION_ERROR")


def test_variables_of_a_command_are_set_and_unset(http: httpx.Client, api: str) -> None:
    body = {"command": "echo ${HOME-gone} $E", "sessionId": "vars", "env": {"HOME": None, "E": "x"}}
    assert http.post(f"{api}/execute", json=body).json()["stdout"] == "gone x"


# -- commands and processes --------------------------------------------------------------------------------------------


def test_a_command_in_the_background_is_a_process(http: httpx.Client, api: str) -> None:
    started = http.post(f"{api}/execute", json={"command": "echo there", "background": True}).json()
    assert re.fullmatch(r"proc_\d{13}_\w{6}", started["processId"])
    assert set(started) == {"success", "processId", "pid", "command", "timestamp"}
    seen = events(http.get(f"{api}/process/{started['processId']}/stream"))
    assert [one["type"] for one in seen] == ["process_info", "stdout", "exit"]
    assert seen[-1]["data"] == "Process completed with exit code 0"


def test_a_process_that_will_not_end_is_ended(http: httpx.Client, api: str) -> None:
    command = "trap '' TERM; echo ready; sleep 600 & wait; sleep 600"
    http.post(f"{api}/process/start", json={"command": command, "processId": "stubborn"}).raise_for_status()
    with http.stream("GET", f"{api}/process/stubborn/stream") as stream:
        next(line for line in stream.iter_lines() if "ready" in line)
    assert http.delete(f"{api}/process/stubborn").json()["processId"] == "stubborn"
    assert http.get(f"{api}/process/stubborn").json()["process"]["status"] == "killed"
    watch = {"command": "pgrep -fx 'sleep 600'", "sessionId": "__DISABLE_SESSION__"}
    assert http.post(f"{api}/execute", json=watch).json()["exitCode"] == 1


def test_processes_are_listed_by_their_status(http: httpx.Client, api: str) -> None:
    http.post(f"{api}/process/start", json={"command": "sleep 600", "processId": "goes-on"}).raise_for_status()
    http.post(f"{api}/process/start", json={"command": "sleep 600", "processId": "hasty", "timeoutMs": 100})
    assert events(http.get(f"{api}/process/hasty/stream"))[-1]["data"] == "Process was killed"
    running = http.get(f"{api}/process/list", params={"status": "running"}).json()["processes"]
    assert [one["id"] for one in running] == ["goes-on"]
    assert http.get(f"{api}/process/list", params={"status": "what"}).status_code == 400
    assert http.delete(f"{api}/process/kill-all").json()["cleanedCount"] == 1


# -- files and repositories --------------------------------------------------------------------------------------------


def test_what_a_file_is_shows_in_how_it_is_read(http: httpx.Client, api: str) -> None:
    kinds = {
        "a.json": ("eyJhIjoxfQ==", "application/json", "utf-8"),
        "a.png": ("iVBORw0KGgoAAA==", "image/png", "base64"),
        "a.bin": ("AAECA/8=", "application/octet-stream", "base64"),
        "empty": ("", "text/plain", "utf-8"),
    }
    for name, (content, kind, encoding) in kinds.items():
        path = f"/workspace/kinds/{name}"
        body = {"path": path, "content": content, "encoding": "base64"}
        http.post(f"{api}/write", json=body).raise_for_status()
        found = http.post(f"{api}/read", json={"path": path}).json()
        assert (found["mimeType"], found["encoding"], found["isBinary"]) == (kind, encoding, encoding == "base64")
    make = {"command": "cd /workspace/kinds; ln -s empty link; mkfifo pipe; mkdir d; chmod 750 a.bin"}
    http.post(f"{api}/execute", json=make).raise_for_status()
    listed = http.post(f"{api}/list-files", json={"path": "/workspace/kinds"}).json()["files"]
    types = {one["name"]: one["type"] for one in listed}
    assert types == dict.fromkeys(kinds, "file") | {"link": "symlink", "pipe": "other", "d": "directory"}
    assert next(one["mode"] for one in listed if one["name"] == "a.bin") == "rwxr-x---"


SERVER = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        wants = "private" in self.path
        self.send_response(401 if wants else 404)
        self.send_header("WWW-Authenticate" if wants else "Content-Type", "Basic realm=x" if wants else "text/plain")
        self.end_headers()
        if "slow" in self.path: __import__("time").sleep(60)
        self.wfile.write(b"Repository not found.")
http.server.ThreadingHTTPServer(("127.0.0.1", 8977), Handler).serve_forever()
"""


def test_a_repository_that_cannot_be_cloned_is_told_by_the_reason(http: httpx.Client, api: str) -> None:
    http.post(f"{api}/write", json={"path": "/tmp/git.py", "content": SERVER}).raise_for_status()
    body = {"command": "python3 /tmp/git.py", "processId": "git"}
    http.post(f"{api}/process/start", json=body).raise_for_status()
    assert events(http.post(f"{api}/port-watch", json={"port": 8977, "mode": "tcp"}))[-1]["type"] == "ready"
    for path, more, status, code in (
        ("none", {}, 404, "GIT_REPOSITORY_NOT_FOUND"),
        ("private", {}, 401, "GIT_AUTH_FAILED"),
        ("slow", {"timeoutMs": 500}, 502, "GIT_NETWORK_ERROR"),
    ):
        answer = http.post(f"{api}/git/checkout", json={"repoUrl": f"http://127.0.0.1:8977/{path}.git", **more})
        assert (answer.status_code, answer.json()["code"]) == (status, code)
        assert answer.json()["context"]["targetDir"] == f"/workspace/{path}"
    http.delete(f"{api}/process/git").raise_for_status()


def test_what_is_left_of_a_port_says_when_it_was_exposed(http: httpx.Client, api: str) -> None:
    made = http.post(f"{api}/expose-port", json={"port": 8300, "name": "site"}).json()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", made["exposedAt"])
    assert http.post(f"{api}/expose-port", json={"port": 8300}).json()["code"] == "PORT_ALREADY_EXPOSED"
    assert http.get(f"{api}/exposed-ports", params={"session": "x"}).json()["count"] == 1
    assert http.delete(f"{api}/exposed-ports/8300").json()["port"] == 8300
    assert http.delete(f"{api}/exposed-ports/8300").json()["code"] == "PORT_NOT_EXPOSED"


def test_a_container_says_its_version_as_its_environment_does(http: httpx.Client) -> None:
    http.post("/v1/sandboxes", json={"id": "versioned", "env": {"SANDBOX_VERSION": "0.11.0"}}).raise_for_status()
    assert http.get("/v1/sandboxes/versioned/container/api/version").json()["version"] == "0.11.0"
    http.delete("/v1/sandboxes/versioned")


# -- terminals ---------------------------------------------------------------------------------------------------------


def test_a_terminal_has_the_shell_that_is_asked_for(container_server: ServerProcess, box: str) -> None:
    address = f"{container_server.url.replace('http', 'ws')}/v1/sandboxes/{box}/container/ws/pty?sessionId="
    with connect(f"{address}sh&shell=/bin/sh&cols=70&rows=20") as terminal:
        seen = b""
        while terminal.recv(LONG) != '{"type":"ready"}':
            pass
        terminal.send(b"echo $0-$TERM; stty size\n")
        while b"/bin/sh-xterm-256color\r\n20 70" not in seen:
            frame = terminal.recv(LONG)
            seen += frame if isinstance(frame, bytes) else b""
    with connect(f"{address}none&shell=/no/shell") as terminal:
        said = json.loads(terminal.recv(LONG))
    assert (said["type"], "/no/shell" in said["message"]) == ("error", True)


# -- many requests over one connection ---------------------------------------------------------------------------------


def ask(socket: ClientConnection, **message: object) -> dict:
    socket.send(json.dumps(message))
    return dict(json.loads(socket.recv(LONG)))


def test_messages_have_ids_headers_and_errors(socket: ClientConnection) -> None:
    echo = {"method": "POST", "path": "/api/execute", "body": {"command": "echo $SESSION_ID"}}
    named = ask(socket, type="request", id="1", headers={"X-Session-Id": "wired"}, **echo)
    assert (named["type"], named["id"], named["status"], named["done"]) == ("response", "1", 200, True)
    assert named["body"]["stdout"] == "wired"
    unknown = ask(socket, type="request", id="2", method="GET", path="/nope")
    assert (unknown["status"], unknown["body"]["code"]) == (404, "UNKNOWN_ERROR")
    for message in (
        {"type": "what"},
        {"type": "request", "id": "3"},
        {"type": "request", **echo, "id": "4", "headers": 1},
    ):
        refused = ask(socket, **message)
        assert (refused["type"], refused["status"], refused["code"]) == ("error", 400, "VALIDATION_FAILED")
    socket.send("no JSON")
    assert json.loads(socket.recv(LONG))["type"] == "error"


def test_a_stream_is_broken_off_and_the_connection_goes_on(socket: ClientConnection) -> None:
    body = {"command": "echo begun; sleep 601", "sessionId": "broken"}
    first = ask(socket, type="request", id="s", method="POST", path="/api/execute/stream", body=body)
    assert (first["type"], first["event"], json.loads(first["data"])["type"]) == ("stream", "start", "start")
    assert json.loads(json.loads(socket.recv(LONG))["data"])["data"] == "begun\n"
    socket.send(json.dumps({"type": "cancel", "id": "s"}))
    look = {"command": "pgrep -fx 'sleep 601'", "sessionId": "broken"}
    after = ask(socket, type="request", id="t", method="POST", path="/api/execute", body=look)
    assert (after["id"], after["body"]["exitCode"]) == ("t", 1)
