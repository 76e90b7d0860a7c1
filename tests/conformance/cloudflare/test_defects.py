"""What goes wrong in the container this API comes from, and does not here. Every wait has a bound: a hang fails."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection, connect

from tests.server.conftest import ServerProcess

LONG = 30.0
"""Seconds that nothing here should take by far."""


@pytest.fixture(scope="module")
def base(box: str) -> str:
    return f"/v1/sandboxes/{box}/container/api"


def events(http: httpx.Client, method: str, path: str, **body: Any) -> Iterator[dict[str, Any]]:
    request = {"json": body} if method == "POST" else {}
    with http.stream(method, path, timeout=LONG, **request) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: "):
                yield json.loads(line[6:])


@contextmanager
def quickly() -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < LONG


def test_a_streamed_command_that_exits_its_shell_is_complete(http: httpx.Client, base: str) -> None:
    with quickly():
        seen = list(events(http, "POST", f"{base}/execute/stream", command="echo a; exit 2", sessionId="s"))
    assert [(one["type"], one.get("exitCode")) for one in seen[1:]] == [("stdout", None), ("complete", 2)]
    again = http.post(f"{base}/execute", json={"command": "echo again", "sessionId": "s"}).json()
    assert again["stdout"] == "again"


def test_a_process_that_exits_its_shell_has_ended(http: httpx.Client, base: str) -> None:
    body = {"command": "echo hi; exit 4", "processId": "leaver", "sessionId": "s"}
    http.post(f"{base}/process/start", json=body).raise_for_status()
    with quickly():
        last = list(events(http, "GET", f"{base}/process/leaver/stream"))[-1]
    assert (last["type"], last["exitCode"]) == ("exit", 4)
    found = http.get(f"{base}/process/leaver").json()["process"]
    assert (found["status"], found["exitCode"]) == ("failed", 4)
    assert http.get(f"{base}/process/leaver/logs").json()["stdout"] == "hi\n"


def test_a_streamed_commands_time_is_limited(http: httpx.Client, base: str) -> None:
    body = {"command": "echo a; sleep 60; echo b", "sessionId": "s", "timeoutMs": 300}
    with quickly():
        seen = list(events(http, "POST", f"{base}/execute/stream", **body))
    assert (seen[-1]["type"], seen[-1]["exitCode"]) == ("complete", 124)
    assert [one["data"] for one in seen if one["type"] == "stdout"] == ["a\n"]


def test_a_command_that_ran_out_of_time_blocks_nobody(http: httpx.Client, base: str) -> None:
    with quickly():
        late = http.post(f"{base}/execute", json={"command": "sleep 61", "sessionId": "s", "timeoutMs": 300})
        next = http.post(f"{base}/execute", json={"command": "pgrep -fx 'sleep 61'; echo free", "sessionId": "s"})
    assert (late.status_code, late.json()["code"]) == (500, "COMMAND_EXECUTION_ERROR")
    assert next.json()["stdout"] == "free"


def test_no_output_is_lost(http: httpx.Client, base: str) -> None:
    command, size = "seq 1 400000; printf end", 2688895 + 3
    done = http.post(f"{base}/execute", json={"command": command, "sessionId": "s"}).json()
    assert (len(done["stdout"]), done["stdout"][-3:]) == (size, "end")
    streamed = events(http, "POST", f"{base}/execute/stream", command=command, sessionId="s")
    text = "".join(one["data"] for one in streamed if one["type"] == "stdout")
    assert (len(text), text[-3:]) == (size, "end")


def test_output_of_code_comes_while_it_runs(http: httpx.Client, base: str) -> None:
    context = http.post(f"{base}/contexts", json={"language": "python"}).json()["contextId"]
    code = "import os, time\nprint('begun')\nwhile not os.path.exists('/tmp/go'): time.sleep(0.01)\nprint('on')"
    seen = events(http, "POST", f"{base}/execute/code", context_id=context, code=code)
    with quickly():
        assert next(seen) == {"type": "stdout", "text": "begun\n"}
        http.post(f"{base}/write", json={"path": "/tmp/go", "content": ""}).raise_for_status()
        assert [one["type"] for one in seen] == ["stdout", "execution_complete"]


def test_the_time_of_code_is_limited(http: httpx.Client, base: str) -> None:
    context = http.post(f"{base}/contexts", json={"language": "python"}).json()["contextId"]
    code = "x = 7\nimport time; time.sleep(60)"
    with quickly():
        seen = list(events(http, "POST", f"{base}/execute/code", context_id=context, code=code, timeout_ms=300))
        assert seen[-1]["type"] == "error"
        # What was there before is there still.
        kept = list(events(http, "POST", f"{base}/execute/code", context_id=context, code="x"))
    assert kept[0]["text"] == "7"


def test_routes_that_were_dead_answer(http: httpx.Client, base: str) -> None:
    found = http.get(f"{base}/commands").json()
    assert found["count"] == len(found["availableCommands"])
    assert {"bash", "ls"} <= set(found["availableCommands"])
    assert http.get(f"{base}/ping").json()["message"] == "pong"


# -- terminals ---------------------------------------------------------------------------------------------------------


def until(socket: ClientConnection, wanted: bytes | str) -> str:
    seen = b""
    while True:
        frame = socket.recv(LONG)
        if isinstance(frame, str):
            if isinstance(wanted, str) and frame.startswith(wanted):
                return frame
            continue
        seen += frame
        if isinstance(wanted, bytes) and wanted in seen:
            return seen.decode()


def test_a_terminal_says_that_its_shell_has_ended(container_server: ServerProcess, box: str) -> None:
    address = f"{container_server.url.replace('http', 'ws')}/v1/sandboxes/{box}/container/ws/pty"
    with connect(f"{address}?sessionId=ended&cols=100&rows=30") as socket:
        until(socket, '{"type":"ready"')
        socket.send(b"stty size; exit 5\n")
        until(socket, b"30 100")
        assert json.loads(until(socket, '{"type":"exit"')) == {"type": "exit", "code": 5}
    with pytest.raises(InvalidStatus) as refused:
        connect(address)
    assert (refused.value.response.status_code, refused.value.response.body) == (
        400,
        b"sessionId query parameter required",
    )


def test_a_terminal_is_shared_and_outlives_those_who_watch(container_server: ServerProcess, box: str) -> None:
    address = f"{container_server.url.replace('http', 'ws')}/v1/sandboxes/{box}/container/ws/pty?sessionId=shared"
    with connect(address) as one, connect(address) as other:
        for socket in (one, other):
            until(socket, '{"type":"ready"')
        one.send(b"echo $((6 * 7))-seen\n")
        until(one, b"42-seen")
        until(other, b"42-seen")
        other.send(json.dumps({"type": "resize", "cols": 91, "rows": 17}))
        other.send(b"stty size; echo $TERM\n")
        until(one, b"17 91\r\nxterm-256color")
    with connect(address) as later:
        until(later, b"42-seen")


# -- what nobody waits for ---------------------------------------------------------------------------------------------


def idle(http: httpx.Client, box: str) -> bool:
    until = time.monotonic() + LONG
    while http.get(f"/v1/sandboxes/{box}").json()["activeOperations"]:
        if time.monotonic() > until:
            return False
    return True


@pytest.mark.parametrize("method", ["executeStream", "readFile"])
@pytest.mark.parametrize("leaves", [True, False])
def test_a_stream_that_nobody_asks_for_holds_nothing(
    container_server: ServerProcess, http: httpx.Client, box: str, base: str, method: str, leaves: bool
) -> None:
    http.post(f"{base}/write", json={"path": "/tmp/unread", "content": "x"}).raise_for_status()
    arguments = ["true", "s"] if method == "executeStream" else ["/tmp/unread", "s", {"encoding": "none"}]
    noun = "commands" if method == "executeStream" else "files"
    address = f"{container_server.url.replace('http', 'ws')}/v1/sandboxes/{box}/container/rpc"
    with connect(address) as socket:
        socket.send(json.dumps(["push", ["pipeline", 0, [noun, method], arguments]]))
        socket.send(json.dumps(["push", ["pipeline", 0, ["utils", "ping"], []]]))
        socket.send(json.dumps(["pull", 2]))
        assert json.loads(socket.recv(LONG)) == ["resolve", 2, "healthy"]
        if not leaves:
            socket.send(json.dumps(["release", 1, 1]))
            assert idle(http, box)
    assert idle(http, box)


def test_a_download_that_is_broken_off_holds_nothing(http: httpx.Client, box: str, base: str) -> None:
    body = {"command": "truncate -s 200M /workspace/large", "sessionId": "s"}
    http.post(f"{base}/execute", json=body).raise_for_status()
    id = "".join(letter for letter in box if letter in "abcdefghijklmnopqrstuvwxyz234567")
    http.put(f"/v1/sandbox/{id}/file/workspace/f", content=b"x").raise_for_status()
    more = {"argv": ["truncate", "-s", "200M", "/workspace/large"]}
    assert http.post(f"/v1/sandbox/{id}/exec", json=more).status_code == 200
    for method, path in (("GET", "file/workspace/large"), ("POST", "persist")):
        with http.stream(method, f"/v1/sandbox/{id}/{path}") as answer:
            assert answer.status_code == 200
        assert idle(http, id)
    http.delete(f"/v1/sandbox/{id}")
