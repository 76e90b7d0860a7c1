"""The routes, over real HTTP to a real server with real sandboxes."""

from __future__ import annotations

import asyncio
import io
import json
import tarfile
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.server.conftest import ServerProcess

Http = httpx.AsyncClient


async def ok(response: httpx.Response, status: int = 200) -> Any:
    assert response.status_code == status, response.text
    return response.json()


async def run(http: Http, box: str, command: str, **fields: Any) -> Any:
    return await ok(await http.post(f"{box}/exec", json={"command": command, **fields}))


async def until(http: Http, box: str, command: str) -> None:
    """Wait inside the sandbox, so that no clock of ours decides."""
    await run(http, box, f"until {command}; do sleep 0.05; done", session=None, timeout=60_000)


async def events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


# -- server and sandboxes ----------------------------------------------------------------------------------------------


async def test_health_says_what_serves(http: Http) -> None:
    health = await ok(await http.get("/health"))
    assert health["ok"] is True
    assert health["service"] == "skerry"
    assert health["bindings"] == {"sandbox": True, "projectData": True, "backupBucket": True}


async def test_the_life_of_a_sandbox(http: Http, box: str) -> None:
    id = box.rpartition("/")[2]
    made = await ok(await http.post("/v1/sandboxes", json={"id": id.upper(), "labels": {"team": id}}), 201)
    assert (made["id"], made["labels"]) == (id, {"team": id})
    again = await http.post("/v1/sandboxes", json={"id": id})
    assert again.json()["error"]["code"] == "sandbox_exists"
    listed = await ok(await http.get("/v1/sandboxes", params={"label": f"team={id}"}))
    assert [found["id"] for found in listed["sandboxes"]] == [id]
    assert (await ok(await http.put(f"{box}/env", json={"env": {"COLOUR": "red"}})))["env"] == {"COLOUR": "red"}
    assert (await ok(await http.post(f"{box}/start")))["state"] == "active"
    assert (await run(http, box, "echo $COLOUR"))["stdout"] == "red\n"
    assert (await http.put(f"{box}/env", json={"env": {}})).json()["error"]["code"] == "env_locked"
    assert (await ok(await http.post(f"{box}/stop")))["state"] == "hibernated"
    assert (await ok(await http.patch(box, json={"labels": {}})))["labels"] == {}
    kinds = [event["kind"] for event in (await ok(await http.get(f"{box}/events")))["events"]]
    assert kinds[0] == "created"
    assert await ok(await http.post(f"{box}/destroy")) == {"ok": True, "sandboxId": id, "destroyed": True}
    assert (await http.get(box)).json()["error"]["code"] == "sandbox_not_found"
    assert (await http.delete(box)).status_code == 404


async def test_an_impossible_id_is_refused(http: Http) -> None:
    for id in ("www", "-x", "x" * 64, "a.b", "%00"):
        refused = await http.post(f"/v1/sandboxes/{id}/exec", json={"command": "true"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_sandbox_id")


# -- commands ----------------------------------------------------------------------------------------------------------


async def test_exec_answers_flat_and_in_the_older_shape(http: Http, shared: str) -> None:
    done = await run(http, shared, "echo out; echo err >&2; exit 3", session=None)
    assert (done["stdout"], done["stderr"], done["exitCode"], done["success"]) == ("out\n", "err\n", 3, False)
    assert (done["ok"], done["sandboxId"]) == (True, "shared")
    assert done["result"] == {"stdout": "out\n", "stderr": "err\n", "exitCode": 3, "success": False}


async def test_exec_answers_only_the_result_when_asked(http: Http, shared: str) -> None:
    answer = await http.post(f"{shared}/exec", json={"command": "true"}, headers={"Prefer": "return=minimal"})
    assert not {"ok", "sandboxId", "result"} & set(await ok(answer))


async def test_exec_takes_the_older_names_and_honours_args(http: Http, shared: str) -> None:
    body = {"command": "bash", "args": ["-lc", "echo $0"], "cwd": "/", "timeoutMs": 60000, "sessionId": "default"}
    assert (await ok(await http.post(f"{shared}/exec", json=body)))["stdout"] == "bash\n"


async def test_an_unknown_session_is_told_what_there_is(http: Http, shared: str) -> None:
    missing = await http.post(f"{shared}/exec", json={"command": "true", "session": "nope"})
    assert missing.status_code == 404
    assert "default" in missing.json()["error"]["details"]["availableSessions"]


async def test_a_client_that_leaves_during_exec_ends_the_command(http: Http, box: str, server: ServerProcess) -> None:
    call = asyncio.ensure_future(http.post(f"{box}/exec", json={"command": "touch began; sleep 4321", "session": None}))
    await until(http, box, "test -e began")
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await until(http, box, "! pgrep -f 'sleep 432[1]'")


async def test_a_streamed_command_arrives_while_it_runs(http: Http, box: str) -> None:
    command = "echo one; until test -e go; do sleep 0.05; done; echo two"
    async with http.stream("POST", f"{box}/exec/stream", json={"command": command}) as live:
        feed = events(live)
        assert (await anext(feed))["type"] == "start"
        assert (await anext(feed))["data"] == "one\n"
        await ok(await http.put(f"{box}/files", params={"path": "go"}, content=b""))
        assert (await anext(feed))["data"] == "two\n"
        last = await anext(feed)
    assert (last["type"], last["exitCode"], last["result"]["success"]) == ("complete", 0, True)


async def test_a_client_that_leaves_a_stream_ends_the_command(http: Http, box: str) -> None:
    body = {"command": "echo on; sleep 4322", "session": None}
    async with http.stream("POST", f"{box}/exec/stream", json=body) as live:
        async for event in events(live):
            if event["type"] == "stdout":
                break
    await until(http, box, "! pgrep -f 'sleep 432[2]'")


async def test_a_stream_that_cannot_begin_is_an_http_error(http: Http, shared: str) -> None:
    refused = await http.post(f"{shared}/exec/stream", json={"command": "true", "session": "nope"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "session_not_found")
    refused = await http.get(f"{shared}/processes/nope/logs/stream")
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "process_not_found")
    refused = await http.get(f"{shared}/files/stream", params={"path": "nope"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "file_not_found")


async def test_sessions_come_and_go(http: Http, box: str) -> None:
    made = await ok(await http.post(f"{box}/sessions", json={"name": "one", "cwd": "/tmp", "isolation": False}), 201)
    assert (made["id"], made["cwd"]) == ("one", "/tmp")
    assert (await run(http, box, "pwd", session="one"))["stdout"] == "/tmp\n"
    assert (await http.post(f"{box}/sessions", json={"id": "one"})).json()["error"]["code"] == "session_exists"
    assert "one" in [session["id"] for session in (await ok(await http.get(f"{box}/sessions")))["sessions"]]
    assert (await ok(await http.get(f"{box}/sessions/one")))["commands"] == 1
    assert (await ok(await http.delete(f"{box}/sessions/one")))["ok"] is True
    assert (await http.get(f"{box}/sessions/one")).status_code == 404


# -- processes ---------------------------------------------------------------------------------------------------------


async def test_the_life_of_a_process(http: Http, box: str) -> None:
    started = await ok(await http.post(f"{box}/processes", json={"command": "cat", "processId": "echo"}), 201)
    assert (started["id"], started["status"]) == ("echo", "running")
    await ok(await http.post(f"{box}/processes/echo/stdin", content=b"hello\n"))
    seen = await ok(await http.post(f"{box}/processes/echo/wait", json={"until": "log", "pattern": "hello"}))
    assert seen["line"] == "hello"
    assert len((await ok(await http.get(f"{box}/processes", params={"status": "running"})))["processes"]) == 1
    await ok(await http.post(f"{box}/processes/echo/stdin", params={"eof": "true"}))
    assert (await ok(await http.post(f"{box}/processes/echo/wait")))["exitCode"] == 0
    assert (await ok(await http.get(f"{box}/processes/echo/logs")))["stdout"] == "hello\n"
    async with http.stream("GET", f"{box}/processes/echo/logs/stream") as live:
        assert [event["type"] async for event in events(live)] == ["stdout", "exit"]
    assert (await ok(await http.post(f"{box}/processes/cleanup")))["killed"] == 1
    assert (await http.get(f"{box}/processes/echo")).status_code == 404


async def test_processes_are_killed_in_each_way(http: Http, box: str) -> None:
    for id in ("a", "b", "c"):
        await ok(await http.post(f"{box}/processes", json={"command": "sleep 1000", "processId": id}), 201)
    assert (await ok(await http.post(f"{box}/processes/a/kill", json={"signal": "SIGKILL"})))["status"] == "killed"
    assert (await ok(await http.delete(f"{box}/processes/b", params={"signal": "9"})))["status"] == "killed"
    assert (await ok(await http.delete(f"{box}/processes")))["killed"] == 1


async def test_a_silent_process_has_a_stream_that_starts(http: Http, box: str) -> None:
    await ok(await http.post(f"{box}/processes", json={"command": "sleep 1000", "processId": "quiet"}), 201)
    async with http.stream("GET", f"{box}/processes/quiet/logs/stream") as live:
        assert live.status_code == 200
        await ok(await http.delete(f"{box}/processes/quiet"))
        assert [event["type"] async for event in events(live)] == ["exit"]


async def test_a_port_is_waited_for(http: Http, box: str) -> None:
    serve = "python3 -m http.server 8123 --bind 127.0.0.1"
    waiting = asyncio.ensure_future(http.post(f"{box}/ports/8123/wait", json={"mode": "http", "timeout": 60_000}))
    await ok(await http.post(f"{box}/processes", json={"command": serve}), 201)
    assert (await ok(await waiting))["statusCode"] == 200
    late = await http.post(f"{box}/ports/8124/wait", json={"timeout": 100})
    assert (late.status_code, late.json()["error"]["code"]) == (408, "wait_timeout")


# -- files -------------------------------------------------------------------------------------------------------------


async def test_a_file_is_written_and_read_in_each_way(http: Http, box: str) -> None:
    path = {"path": "deep/er/file.txt"}
    written = await ok(await http.put(f"{box}/files", params=path | {"mode": "640"}, content="häh\n".encode()))
    assert (written["bytes"], written["path"]) == (5, path["path"])
    assert (await ok(await http.get(f"{box}/files", params=path)))["file"]["content"] == "häh\n"
    stat = await ok(await http.get(f"{box}/files/stat", params=path))
    assert (stat["file"]["size"], stat["file"]["mode"]) == (5, "rw-r-----")
    assert (await ok(await http.get(f"{box}/files/exists", params=path)))["exists"] is True
    async with http.stream("GET", f"{box}/files/stream", params=path) as live:
        assert [event["type"] async for event in events(live)] == ["metadata", "chunk", "complete"]
    assert (await ok(await http.get(f"{box}/ls", params={"path": "deep/er"})))["count"] == 1
    await ok(await http.request("DELETE", f"{box}/files", params={"path": "deep", "recursive": "true"}))
    assert (await http.get(f"{box}/files", params=path)).json()["error"]["code"] == "file_not_found"


async def test_a_large_body_streams_in_and_out_unchanged(http: Http, box: str) -> None:
    block = bytes(range(256)) * 4096

    async def body() -> AsyncIterator[bytes]:
        for _ in range(8):
            yield block

    written = await ok(await http.put(f"{box}/files", params={"path": "big"}, content=body()))
    assert written["bytes"] == 8 * len(block)
    assert (await http.get(f"{box}/files/content", params={"path": "big"})).content == block * 8


@pytest.mark.parametrize(
    ("header", "status", "content", "place"),
    [
        (None, 200, b"0123456789", None),
        ("bytes=2-4", 206, b"234", "bytes 2-4/10"),
        ("bytes=-3", 206, b"789", "bytes 7-9/10"),
        ("bytes=8-", 206, b"89", "bytes 8-9/10"),
        ("bytes=0-1,4-5", 200, b"0123456789", None),
    ],
)
async def test_a_file_is_served_whole_or_in_part(
    http: Http, shared: str, header: str | None, status: int, content: bytes, place: str | None
) -> None:
    await ok(await http.put(f"{shared}/files", params={"path": "/tmp/ten.txt"}, content=b"0123456789"))
    headers = {"Range": header} if header else {}
    for method in ("GET", "HEAD"):
        part = await http.request(method, f"{shared}/files/content", params={"path": "/tmp/ten.txt"}, headers=headers)
        assert part.status_code == status
        assert part.headers["content-length"] == str(len(content))
        assert part.headers.get("content-range") == place
        assert 'filename="ten.txt"' in part.headers["content-disposition"]
        assert part.content == (content if method == "GET" else b"")


async def test_a_range_outside_of_the_file_is_a_416(http: Http, shared: str) -> None:
    await ok(await http.put(f"{shared}/files", params={"path": "/tmp/five"}, content=b"01234"))
    outside = await http.get(f"{shared}/files/content", params={"path": "/tmp/five"}, headers={"Range": "bytes=5-"})
    assert (outside.status_code, outside.headers["content-range"]) == (416, "bytes */5")
    assert outside.json()["error"]["code"] == "range_not_satisfiable"


async def test_a_file_that_does_not_know_its_size_is_served_to_its_end(http: Http, shared: str) -> None:
    got = await http.get(
        f"{shared}/files/content", params={"path": "/proc/self/status"}, headers={"Range": "bytes=0-1"}
    )
    assert got.status_code == 200
    assert b"Threads:" in got.content
    head = await http.head(f"{shared}/files/content", params={"path": "/proc/self/status"})
    assert (head.status_code, head.content) == (200, b"")
    await ok(await http.put(f"{shared}/files", params={"path": "/tmp/empty"}, content=b""))
    empty = await http.get(f"{shared}/files/content", params={"path": "/tmp/empty"})
    assert (empty.status_code, empty.headers["content-length"], empty.content) == (200, "0", b"")


async def test_a_body_that_breaks_off_changes_nothing(http: Http, box: str, server: ServerProcess) -> None:
    await ok(await http.put(f"{box}/files", params={"path": "kept"}, content=b"before"))
    for size in (100, 10_000_000):
        address = httpx.URL(server.url)
        reader, writer = await asyncio.open_connection(address.host, address.port)
        head = f"PUT {box}/files?path=kept HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n\r\n"
        writer.write(head.encode() + b"after")
        await writer.drain()
        await until(http, box, "true")
        writer.close()
        assert await reader.read() == b""
    assert (await ok(await http.get(f"{box}/files", params={"path": "kept"})))["file"]["content"] == "before"
    names = [file["name"] for file in (await ok(await http.get(f"{box}/ls", params={"hidden": "true"})))["files"]]
    assert names == ["kept"]


async def test_a_body_that_stalls_is_given_up(http: Http, box: str, server: ServerProcess) -> None:
    address = httpx.URL(server.url)
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(f"PUT {box}/files?path=x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nhalf".encode())
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"request_timeout" in answer


async def test_paths_are_made_renamed_copied_moved_and_changed(http: Http, box: str) -> None:
    await ok(await http.post(f"{box}/files/mkdir", json={"path": "a/b", "recursive": True}))
    await ok(await http.put(f"{box}/files", params={"path": "a/b/f"}, content=b"x"))
    renamed = await ok(await http.post(f"{box}/files/rename", json={"oldPath": "a/b/f", "newPath": "a/b/g"}))
    assert (renamed["path"], renamed["newPath"]) == ("a/b/f", "a/b/g")
    copy = {"sourcePath": "a", "destinationPath": "c", "recursive": True}
    await ok(await http.post(f"{box}/files/copy", json=copy))
    await ok(await http.post(f"{box}/files/move", json={"sourcePath": "c/b/g", "destinationPath": "h"}))
    await ok(await http.post(f"{box}/files/chmod", json={"path": "h", "mode": 0o600}))
    assert (await run(http, box, "stat -c %a h; ls c/b"))["stdout"] == "600\n"
    refused = await http.post(f"{box}/files/mkdir", json={"path": "/etc/x"})
    assert refused.json()["error"]["code"] == "dangerous_path"


async def test_a_directory_travels_as_a_tar(http: Http, box: str) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        entry = tarfile.TarInfo("d/one.txt")
        entry.size = 3
        tar.addfile(entry, io.BytesIO(b"one"))
    put = await ok(await http.put(f"{box}/archive", params={"path": "in"}, content=buffer.getvalue()))
    assert (put["files"], put["bytes"]) == (1, 3)
    got = await http.get(f"{box}/archive", params={"path": "in"})
    assert got.headers["content-type"] == "application/x-tar"
    with tarfile.open(fileobj=io.BytesIO(got.content)) as tar:
        assert any(name.endswith("d/one.txt") for name in tar.getnames())
    assert (await http.get(f"{box}/archive", params={"path": "nope"})).status_code == 404


async def test_changes_are_watched(http: Http, box: str) -> None:
    async with http.stream("POST", f"{box}/watch", json={}) as live:
        feed = events(live)
        assert (await anext(feed))["type"] == "watching"
        await ok(await http.put(f"{box}/files", params={"path": "seen"}, content=b"x"))
        async for event in feed:
            if event.get("path", "").endswith("seen"):
                break
    assert (await ok(await http.post(f"{box}/watch/check", json={})))["version"]


# -- git, images -------------------------------------------------------------------------------------------------------


async def test_a_repository_that_cannot_be_named_is_refused(http: Http, shared: str) -> None:
    for route in ("git/clone", "git/clone/stream"):
        refused = await http.post(f"{shared}/{route}", json={"repoUrl": "ext::sh -c id"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_git_url")


async def test_images_are_listed_imported_used_and_removed(http: Http, box: str, server: ServerProcess) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        entry = tarfile.TarInfo("bin/sh")
        entry.size, entry.mode = 2, 0o755
        tar.addfile(entry, io.BytesIO(b"#!"))
    made = await ok(await http.post("/v1/images/tiny", content=buffer.getvalue()), 201)
    assert made["name"] == "tiny"
    assert {"host", "tiny"} <= {image["name"] for image in (await ok(await http.get("/v1/images")))["images"]}
    await ok(await http.post("/v1/sandboxes", json={"id": box.rpartition("/")[2], "image": "tiny"}), 201)
    used = await http.delete("/v1/images/tiny")
    assert (used.status_code, used.json()["error"]["code"]) == (409, "image_in_use")
    await ok(await http.delete(box))
    assert (await ok(await http.delete("/v1/images/tiny")))["ok"] is True
    assert (await http.delete("/v1/images/tiny")).json()["error"]["code"] == "image_not_found"
    broken = await http.post("/v1/images/broken", content=b"not a tar")
    assert broken.status_code == 400
    assert not list(server.home.glob(".upload-*"))


async def test_a_command_whose_session_is_deleted_under_it_ends_like_any_that_is_killed(
    http: httpx.AsyncClient, box: str
) -> None:
    async def one(name: str) -> int:
        await http.post(f"{box}/sessions", json={"id": name, "isolation": False})
        begun = {"path": f"/tmp/{name}"}
        body = {"command": f"touch {begun['path']}; sleep 100 & sleep 100", "session": name}
        running = asyncio.create_task(http.post(f"{box}/exec", json=body))
        while not (await http.get(f"{box}/files/exists", params=begun)).json()["exists"]:
            await asyncio.sleep(0.05)
        assert (await http.delete(f"{box}/sessions/{name}")).status_code == 200
        return int((await running).json().get("exitCode", -1))

    for turn in range(4):
        codes = await asyncio.gather(*(one(f"under-{turn}-{number}") for number in range(8)))
        assert codes == [137] * 8
