"""Sleep, events and metrics as clients of the HTTP API see them."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from skerry.control.registry import Registry
from skerry.server.app import create_app
from tests.disks import opened
from tests.server.conftest import ServerProcess


async def events(http: httpx.AsyncClient, box: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await http.get(f"{box}/events")).json()["events"]
    return found


async def test_freeze_wake_and_hibernate(http: httpx.AsyncClient, box: str) -> None:
    await http.post(f"{box}/exec", json={"command": "X=kept; sleep 600 &"})
    frozen = (await http.post(f"{box}/sleep", json={"stage": "freeze"})).json()
    assert (frozen["state"], frozen["sleepsIn"]) == ("frozen", None)
    assert (await http.get(box)).json()["state"] == "frozen"
    assert (await http.post(f"{box}/exec", json={"command": "echo $X"})).json()["stdout"] == "kept\n"
    await http.post(f"{box}/sleep", json={"stage": "freeze"})
    assert (await http.post(f"{box}/wake")).json()["state"] == "active"
    assert (await http.post(f"{box}/sleep", json={"grace": "1s"})).json()["state"] == "hibernated"
    assert (await http.post(f"{box}/exec", json={"command": "echo [$X]"})).json()["stdout"] == "[]\n"
    found = await events(http, box)
    assert [event["kind"] for event in found] == [
        *("created", "started", "frozen", "thawed", "frozen", "thawed", "hibernated", "woken")
    ]
    assert {event["by"] for event in found} == {"local client"}
    assert all(event["took"] > 0 for event in found[1:])
    assert (found[2]["fromState"], found[2]["toState"]) == ("active", "frozen")


async def test_how_it_sleeps_can_be_said_and_changed(http: httpx.AsyncClient, box: str) -> None:
    id = box.rpartition("/")[2]
    made = {"id": id, "sleepAfter": "30m", "keepAlive": True, "onIdle": "freeze", "hibernateAfter": "1h"}
    info = (await http.post("/v1/sandboxes", json=made)).json()
    assert [info[key] for key in ("sleepAfter", "keepAlive", "onIdle", "hibernateAfter")] == [
        1800,
        True,
        "freeze",
        3600,
    ]
    await http.post(f"{box}/start")
    assert (await http.get(box)).json()["sleepsIn"] is None
    info = (await http.patch(box, json={"keepAlive": False, "hibernateAfter": None})).json()
    assert [info[key] for key in ("sleepAfter", "keepAlive", "onIdle", "hibernateAfter")] == [
        1800,
        False,
        "freeze",
        None,
    ]
    assert 1790 < info["sleepsIn"] <= 1800
    assert info["sleepsAt"] > info["lastActiveAt"]
    touched = (await http.post(f"{box}/touch")).json()
    assert touched["sleepsIn"] >= info["sleepsIn"]


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("sleep", {"stage": "nap"}),
        ("sleep", {"grace": "soon"}),
        ("sleep", {"grace": -1}),
        ("sleep", {"depth": 1}),
        ("start", {"fresh": "perhaps"}),
    ],
)
async def test_nonsense_is_refused_and_changes_nothing(
    http: httpx.AsyncClient, box: str, route: str, body: dict[str, Any]
) -> None:
    await http.post(f"{box}/exec", json={"command": "true"})
    answer = await http.post(f"{box}/{route}", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")
    assert (await http.get(box)).json()["state"] == "active"


@pytest.mark.parametrize("route", ["sleep", "wake", "touch"])
async def test_what_is_not_there_is_not_made(http: httpx.AsyncClient, box: str, route: str) -> None:
    assert (await http.post(f"{box}/{route}")).status_code == 404
    assert (await http.get(box)).status_code == 404


async def test_a_sandbox_without_its_files_refuses_work_until_told_what_to_do(registry: Registry) -> None:
    transport = httpx.ASGITransport(create_app(registry, registry.settings))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        box = "/v1/sandboxes/lost"
        await http.post(f"{box}/exec", json={"command": "echo x >f"})
        taken = (await http.post(f"{box}/snapshots")).json()
        await http.post(f"{box}/stop")
        await registry.provider.forget("lost")
        refused: dict[str, Any] = {"exec": {"command": "true"}, "start": {}, "wake": None, "snapshots": {}, "fork": {}}
        for route, body in refused.items():
            answer = await http.post(f"{box}/{route}", json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (409, "files_missing"), route
        assert (await http.get(f"{box}/diff")).json()["error"]["code"] == "files_missing"
        assert (await http.get("/v1/snapshots")).json() == {"snapshots": [taken]}
        assert (await http.get(box)).json()["state"] == "failed"
        await http.post(f"{box}/rollback", json={"snapshot": taken["id"]})
        assert (await http.post(f"{box}/exec", json={"command": "cat f"})).json()["stdout"] == "x\n"
        await http.post(f"{box}/stop")
        await registry.provider.forget("lost")
        assert (await http.post(f"{box}/start", json={"fresh": True})).json()["state"] == "active"
        assert (await http.post(f"{box}/exec", json={"command": "ls"})).json()["stdout"] == ""


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_sandbox_without_its_files_takes_a_backup_and_nothing_else(registry: Registry, streamed: bool) -> None:
    transport = httpx.ASGITransport(create_app(registry, registry.settings))
    headers = {"Accept": "text/event-stream"} if streamed else {}
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        box = "/v1/sandboxes/lost"
        await http.post(f"{box}/exec", json={"command": "echo kept >f"})
        good, bad = [(await http.post(f"{box}/backup")).json()["backup"]["id"] for _ in range(2)]
        (part,) = (registry.settings.home / "buckets/default/backups" / bad).glob("*.tar")
        part.write_bytes(bytes(part.stat().st_size))
        await http.post(f"{box}/stop")
        await registry.provider.forget("lost")
        for backup in ("none", bad):
            refused = await http.post(f"{box}/restore", json={"backup": backup}, headers=headers)
            assert "backup_" in refused.text
            again = await http.post(f"{box}/exec", json={"command": "true"})
            assert (again.status_code, again.json()["error"]["code"]) == (409, "files_missing")
            assert (await http.get(box)).json()["state"] == "failed"
        # Who comes in the middle waits, and sees the files or none of the machine.
        restoring = asyncio.create_task(http.post(f"{box}/restore", json={"backup": good}, headers=headers))
        while not registry._owners["lost"].filling:
            await asyncio.sleep(0.001)
        assert (await http.post(f"{box}/exec", json={"command": "cat f"})).json()["stdout"] == "kept\n"
        assert (await restoring).status_code == 200
        assert (await http.get(box)).json()["state"] == "active"


async def test_a_server_killed_while_it_refills_a_sandbox_leaves_its_files_missing(tmp_path: Path) -> None:
    home = tmp_path / "home"
    server = ServerProcess(home)
    box = "/v1/sandboxes/lost"
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        await http.post(f"{box}/exec", json={"command": "head -c 80000000 /dev/urandom >f; sha256sum f"})
        backup = (await http.post(f"{box}/backup")).json()["backup"]["id"]
        await http.post(f"{box}/stop")
    assert server.stop() == 0
    with opened(home) as disk:
        assert (
            subprocess.run(["btrfs", "subvolume", "delete", disk / "sandboxes/lost"], capture_output=True).returncode
            == 0
        )
    server = ServerProcess(home)
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        assert (await http.post(f"{box}/exec", json={"command": "true"})).status_code == 409
        restoring = asyncio.create_task(http.post(f"{box}/restore", json={"backup": backup}))
        while not list(home.glob("restores/lost.*.json")):
            await asyncio.sleep(0.001)
        server.stop(signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            await restoring
    server = ServerProcess(home)
    try:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            refused = await http.post(f"{box}/exec", json={"command": "ls"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "files_missing")
            assert (await http.post(f"{box}/restore", json={"backup": backup})).status_code == 200
            assert (await http.post(f"{box}/exec", json={"command": "wc -c <f"})).json()["stdout"] == "80000000\n"
            assert list(home.glob("refills/*")) == []
    finally:
        assert server.stop() == 0


async def test_changes_of_what_a_sandbox_is_are_on_record_without_secrets(http: httpx.AsyncClient, box: str) -> None:
    id = box.rpartition("/")[2]
    await http.post("/v1/sandboxes", json={"id": id})
    await http.patch(box, json={"sleepAfter": "1h", "labels": {"a": "b"}})
    await http.put(f"{box}/env", json={"env": {"TOKEN": "neap-tide"}})
    await http.post(f"{box}/exec", json={"command": "echo x >f"})
    backup = (await http.post(f"{box}/backup", json={"name": "nightly"})).json()["backup"]["id"]
    await http.post(f"{box}/sync")
    assert (await http.delete(f"/v1/backups/{backup}")).status_code == 200
    assert (await http.delete(f"/v1/workspaces/{id}")).status_code == 200
    found = (await http.get(f"{box}/events")).json()["events"]
    told = [(event["kind"], event["message"]) for event in found if event["kind"].endswith(("updated", "_deleted"))]
    assert told == [
        ("updated", "Changed: labels, sleep_after."),
        ("updated", "Environment changed: TOKEN."),
        ("backup_deleted", "Backup 'nightly' in bucket 'default' was deleted."),
        ("workspace_deleted", "What was stored of its workspace in bucket 'default' was deleted."),
    ]
    assert {event["by"] for event in found} == {"local client"}
    assert "neap-tide" not in str(found)


# -- what stays connected ----------------------------------------------------------------------------------------------

SERVER = """python3 -c '
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "5"); self.end_headers(); self.wfile.write(b"hello")
http.server.ThreadingHTTPServer(("127.0.0.1", 3000), Handler).serve_forever()'"""


@pytest.mark.parametrize("wakes", [True, False])
async def test_a_preview_of_a_frozen_sandbox_wakes_it_or_says_that_it_sleeps(
    http: httpx.AsyncClient, box: str, wakes: bool
) -> None:
    await http.post(f"{box}/processes", json={"command": SERVER})
    await http.post(f"{box}/ports/3000/wait", json={})
    exposed = (await http.post(f"{box}/ports", json={"port": 3000, "wakeOnRequest": wakes})).json()
    async with httpx.AsyncClient(follow_redirects=True, timeout=30) as visitor:
        for _ in range(2):  # the second time over a connection that was kept
            assert (await visitor.get(exposed["pathUrl"])).text == "hello"
        await http.post(f"{box}/sleep", json={"stage": "freeze"})
        answer = await visitor.get(exposed["pathUrl"])
    assert (answer.status_code, answer.text == "hello") == ((200, True) if wakes else (410, False))
    assert (await http.get(box)).json()["state"] == ("active" if wakes else "frozen")
    if wakes:
        assert (await events(http, box))[-1]["by"] == "preview"


async def test_what_is_typed_into_an_open_terminal_thaws_its_sandbox(
    http: httpx.AsyncClient, server: ServerProcess, box: str
) -> None:
    from websockets.asyncio.client import connect

    async with connect(f"ws{server.url.removeprefix('http')}{box}/terminal") as socket:
        ready = json.loads(await socket.recv())
        await socket.send(b"echo be''fore\n")
        while b"before" not in (await socket.recv() or b""):  # type: ignore[operator]
            pass
        await http.post(f"{box}/sleep", json={"stage": "freeze"})
        assert (await http.get(f"{box}/terminals")).json()["terminals"][0]["id"] == ready["terminal"]
        assert (await http.get(box)).json()["state"] == "frozen"
        await socket.send(b"echo af''ter\n")
        async with asyncio.timeout(20):
            while b"after" not in (await socket.recv() or b""):  # type: ignore[operator]
                pass
    info = (await http.get(box)).json()
    assert (info["state"], info["activeTerminals"], info["starts"]) == ("active", 1, 1)


async def test_a_forwarded_connection_thaws_its_sandbox(
    http: httpx.AsyncClient, server: ServerProcess, box: str
) -> None:
    from websockets.asyncio.client import connect

    await http.post(f"{box}/processes", json={"command": SERVER})
    await http.post(f"{box}/ports/3000/wait", json={})
    async with connect(f"ws{server.url.removeprefix('http')}{box}/ports/3000/tcp") as socket:
        assert json.loads(await socket.recv()) == {"type": "ready"}
        assert (await http.get(box)).json()["activeConnections"] == 1
        await http.post(f"{box}/sleep", json={"stage": "freeze"})
        await asyncio.sleep(0.2)
        assert (await http.get(box)).json()["state"] == "frozen"
        await socket.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        data = b""
        async with asyncio.timeout(20):
            while not data.endswith(b"hello"):
                data += await socket.recv()  # type: ignore[operator]
    assert (await http.get(box)).json()["state"] == "active"


# -- events ------------------------------------------------------------------------------------------------------------


async def test_events_page_by_cursor_and_outlive_their_sandbox(http: httpx.AsyncClient, box: str) -> None:
    await http.post(f"{box}/exec", json={"command": "true"})
    await http.post(f"{box}/stop")
    first = (await http.get(f"{box}/events", params={"limit": 2})).json()
    assert [event["kind"] for event in first["events"]] == ["created", "started"]
    rest = (await http.get(f"{box}/events", params={"after": first["nextCursor"]})).json()
    assert [event["kind"] for event in rest["events"]] == ["hibernated"]
    await http.delete(box)
    assert (await http.get(box)).status_code == 404
    assert [event["kind"] for event in await events(http, box)] == ["created", "started", "hibernated", "destroyed"]
    after_all = (await http.get(f"{box}/events", params={"after": 2**62})).json()
    assert after_all == {"events": [], "nextCursor": None}


async def test_events_of_what_never_was_are_not_found(http: httpx.AsyncClient, box: str) -> None:
    for route in ("events", "events/stream"):
        answer = await http.get(f"{box}/{route}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "sandbox_not_found")


async def test_events_are_followed_as_they_happen_until_the_sandbox_is_destroyed(
    http: httpx.AsyncClient, box: str
) -> None:
    await http.post(f"{box}/exec", json={"command": "true"})
    seen: list[str] = []
    ids: list[str] = []
    async with http.stream("GET", f"{box}/events/stream") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        async for line in response.aiter_lines():
            if line.startswith("id: "):
                ids.append(line[4:])
            if line.startswith("data: "):
                seen.append(json.loads(line[6:])["kind"])
                if seen == ["created", "started"]:
                    await http.post(f"{box}/sleep", json={"stage": "freeze"})
                elif seen[-1] == "frozen":
                    assert (await http.get(box)).json()["state"] == "frozen"  # looking wakes nothing
                    await http.delete(box)
    assert seen == ["created", "started", "frozen", "destroyed"]
    headers = {"Last-Event-ID": ids[1]}
    async with http.stream("GET", f"{box}/events/stream", headers=headers) as response:
        again = [json.loads(line[6:])["kind"] async for line in response.aiter_lines() if line.startswith("data: ")]
    assert again == ["frozen", "destroyed"]
    answer = await http.get(f"{box}/events/stream", headers={"Last-Event-ID": "yesterday"})
    assert answer.status_code == 400


# -- metrics -----------------------------------------------------------------------------------------------------------


def value(text: str, series: str) -> float:
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.rpartition(" ")[0] == series)


async def test_metrics_count_what_happened(http: httpx.AsyncClient, box: str) -> None:
    before = (await http.get("/metrics")).text
    await http.post(f"{box}/exec", json={"command": "true"})
    await http.post(f"{box}/exec", json={"command": "false"})
    await http.post(f"{box}/exec", json={"command": "sleep 9", "timeout": 100})
    await http.post(f"{box}/code", json={"code": "1"})
    await http.post(f"{box}/sleep", json={"stage": "freeze"})
    frozen = await http.get("/metrics")
    assert frozen.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert (
        value(frozen.text, 'skerry_sandboxes{state="frozen"}') == value(before, 'skerry_sandboxes{state="frozen"}') + 1
    )
    await http.post(f"{box}/exec", json={"command": "true"})
    await http.post(f"{box}/stop")
    await http.post(f"{box}/exec", json={"command": "true"})
    after = (await http.get("/metrics")).text
    for series, grew in {
        "skerry_sandbox_created_total": 1,
        'skerry_sandbox_wake_latency_seconds_count{stage="freeze"}': 1,
        'skerry_sandbox_wake_latency_seconds_count{stage="hibernate"}': 1,
        "skerry_sandbox_message_latency_seconds_count": 6,
        'skerry_code_runs_total{language="python"}': 1,
        'skerry_commands_total{result="ok"}': 3,
        'skerry_commands_total{result="failed"}': 1,
        'skerry_commands_total{result="timed_out"}': 1,
        "skerry_exec_duration_seconds_count": 5,
        'skerry_operation_duration_seconds_count{operation="start"}': 2,
        'skerry_operation_duration_seconds_count{operation="freeze"}': 1,
        'skerry_operation_duration_seconds_count{operation="hibernate"}': 1,
    }.items():
        assert value(after, series) - value(before, series) == grew, series
    assert "_created{" not in after


@pytest.mark.parametrize("opened", [False, True])
async def test_metrics_want_a_key_unless_they_are_opened(tmp_path: Path, opened: bool) -> None:
    server = ServerProcess(tmp_path / "home", api_keys=("first", "second"), metrics_open=opened)
    try:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            assert (await http.get("/metrics")).status_code == (200 if opened else 401)
            assert (await http.get("/v1/sandboxes")).status_code == 401
            key = {"Authorization": "Bearer second"}
            assert (await http.get("/metrics", headers=key)).status_code == 200
            await http.post("/v1/sandboxes", json={"id": "mine"}, headers=key)
            found = (await http.get("/v1/sandboxes/mine/events", headers=key)).json()["events"]
            assert [event["by"] for event in found] == ["API key 2"]
    finally:
        assert server.stop() == 0
