"""The bridge over HTTP: every route, when it works and when it does not."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from skerry.server.cloudflare import bridge, openapi
from tests.server.conftest import ServerProcess

KEY = "a-key-of-some-length"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    home: Path = tmp_path_factory.mktemp("bridge-home")
    home.chmod(0o711)
    process = ServerProcess(home, api_keys=[KEY], warm_pool=1)
    yield process
    assert process.stop() == 0
    shutil.rmtree(home)


@pytest.fixture(scope="module")
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60, headers={"Authorization": f"Bearer {KEY}"}) as client:
        yield client


@pytest.fixture(scope="module")
def place(http: httpx.Client) -> str:
    return f"/v1/sandbox/{http.post('/v1/sandbox').json()['id']}"


def run(http: httpx.Client, place: str, *argv: str, headers: dict[str, str] | None = None, **options: object) -> dict:
    answer = http.post(f"{place}/exec", json={"argv": argv, **options}, headers=headers or {})
    assert answer.status_code == 200, answer.text
    found: dict = {"stdout": b"", "stderr": b""}
    for frame in answer.text.split("\n\n"):
        if not frame.startswith("event: "):
            continue
        kind, data = frame.removeprefix("event: ").split("\ndata: ")
        if kind in ("stdout", "stderr"):
            found[kind] += base64.b64decode(data)
        else:
            found[kind] = json.loads(data)
    return found


def refusal(answer: httpx.Response) -> tuple[int, str]:
    assert set(answer.json()) == {"error", "code"}, answer.text
    return answer.status_code, answer.json()["code"]


def test_an_id_is_given_and_nothing_runs_until_it_is_used(http: httpx.Client) -> None:
    id = http.post("/v1/sandbox").json()["id"]
    assert len(id) == 26
    assert set(id) <= set("abcdefghijklmnopqrstuvwxyz234567")
    assert http.get(f"/v1/sandbox/{id}/running").json() == {"running": False}
    assert run(http, f"/v1/sandbox/{id}", "true")["exit"] == {"exit_code": 0}
    assert http.get(f"/v1/sandbox/{id}/running").json() == {"running": True}
    assert http.delete(f"/v1/sandbox/{id}").status_code == 204
    assert http.get(f"/v1/sandbox/{id}/running").json() == {"running": False}
    assert http.delete(f"/v1/sandbox/{id}").status_code == 204


def test_a_programs_words_arrive_as_they_are(http: httpx.Client, place: str) -> None:
    words = ["a b", "line\nbreak", "'quo\"tes'", "$HOME", "*", "", "ünï"]
    done = run(http, place, "printf", "%s|", *words)
    assert done["stdout"].decode() == "".join(f"{word}|" for word in words)
    script = "cat <<'END'\nheredoc $x\nEND\necho bad >&2; exit 3"
    done = run(http, place, "sh", "-c", script)
    assert (done["stdout"], done["stderr"], done["exit"]) == (b"heredoc $x\n", b"bad\n", {"exit_code": 3})
    binary = run(http, place, "head", "-c", "1000", "/dev/urandom")
    assert len(binary["stdout"]) == 1000


def test_a_timeout_ends_what_runs(http: httpx.Client, place: str) -> None:
    began = time.monotonic()
    done = run(http, place, "sh", "-c", "echo begun; sleep 60; echo ended", timeout_ms=300)
    assert (done["stdout"], done["exit"]) == (b"begun\n", {"exit_code": 124})
    assert time.monotonic() - began < 30
    assert run(http, place, "pgrep", "-fx", "sleep 60")["exit"] == {"exit_code": 1}


def test_without_a_session_calls_stand_for_themselves(http: httpx.Client, place: str) -> None:
    run(http, place, "sh", "-c", "cd /tmp; export A=1")
    assert run(http, place, "sh", "-c", "pwd; echo $A")["stdout"] == b"/workspace\n\n"
    made = http.post(f"{place}/session", json={"id": "s.1", "env": {"A": "2"}, "cwd": "/workspace"})
    assert made.json() == {"id": "s.1"}
    inside = {"Session-Id": "s.1"}
    assert run(http, place, "printenv", "A", headers=inside)["stdout"] == b"2\n"
    assert refusal(http.post(f"{place}/session", json={"id": "s.1"})) == (409, "session_error")
    ended = http.delete(f"{place}/session/s.1").json()
    assert (ended["success"], ended["sessionId"]) == (True, "s.1")
    assert refusal(http.delete(f"{place}/session/s.1")) == (404, "session_error")
    assert http.post(f"{place}/session").json()["id"]


def test_a_session_is_one_shell(http: httpx.Client, place: str) -> None:
    here = {"Session-Id": "shell.1"}

    def words(*argv: str, **options: object) -> dict:
        return run(http, place, *argv, headers=here, **options)

    assert words("mkdir", "-p", "low tide")["exit"] == {"exit_code": 0}
    assert words("cd", "low tide")["exit"] == {"exit_code": 0}
    assert words("pwd")["stdout"] == b"/workspace/low tide\n"
    assert words("export", "TIDE=$HOME 'and' \n\"so on\"")["exit"] == {"exit_code": 0}
    assert words("printenv", "TIDE")["stdout"] == b"$HOME 'and' \n\"so on\"\n"
    assert words("printf", "%s|", "*", "$TIDE", "`id`", "if", "a\nb", "")["stdout"] == b"*|$TIDE|`id`|if|a\nb||"
    assert words("eval", 'greet() { echo "hello $1"; }')["exit"] == {"exit_code": 0}
    assert words("greet", "you there")["stdout"] == b"hello you there\n"
    missing = words("no-such-program")
    assert (missing["stderr"], missing["exit"]) == (b"no-such-program: command not found\n", {"exit_code": 127})
    for word, said in (
        ("cd", rb"bash: line \d+: cd: nowhere: No such file"),
        ("if", rb"bash: line \d+: if: command not"),
    ):
        assert re.match(said, words(word, "nowhere")["stderr"])
    # Elsewhere for one command, and a command that takes too long; the session is as it was.
    assert words("pwd", cwd="/workspace")["stdout"] == b"/workspace\n"
    assert words("sleep", "60", timeout_ms=200)["exit"] == {"exit_code": 124}
    assert words("pwd")["stdout"] == b"/workspace/low tide\n"
    # Exit ends the shell, and is told; the next command has another.
    assert words("exit", "3")["exit"] == {"exit_code": 3}
    assert words("pwd")["stdout"] == b"/workspace\n"
    assert run(http, place, "pwd", headers={"Session-Id": "shell.2"})["stdout"] == b"/workspace\n"


def test_a_session_begins_where_it_is_told_to(http: httpx.Client, place: str) -> None:
    for cwd, there in (("/tmp", b"/tmp\n"), ("/not-there", b"/root\n"), ("new", b"/workspace/new\n")):
        run(http, place, "mkdir", "-p", "new")
        id = http.post(f"{place}/session", json={"cwd": cwd}).raise_for_status().json()["id"]
        assert run(http, place, "pwd", headers={"Session-Id": id})["stdout"] == there
    for id in ("a..b", "a b", "x" * 129):
        assert refusal(http.post(f"{place}/session", json={"id": id})) == (400, "invalid_request")


def test_words_that_only_a_shell_knows_have_one(http: httpx.Client, place: str) -> None:
    assert run(http, place, "command", "-v", "sh")["stdout"].endswith(b"/sh\n")
    assert run(http, place, "exit", "4")["exit"] == {"exit_code": 4}
    assert run(http, place, "cd", "/nowhere")["exit"] == {"exit_code": 1}
    assert run(http, place, "umask")["stdout"] == b"0022\n"


def test_files_are_read_and_written(http: httpx.Client, place: str) -> None:
    content = bytes(range(256)) * 5000
    assert http.put(f"{place}/file/workspace/new/dir/b.bin", content=content).json() == {"ok": True}
    found = http.get(f"{place}/file/workspace/new/dir/b.bin")
    assert (found.content, found.headers["content-type"]) == (content, "application/octet-stream")
    assert refusal(http.get(f"{place}/file/workspace/none")) == (404, "workspace_read_not_found")
    assert refusal(http.get(f"{place}/file/workspace/new")) == (404, "workspace_read_not_found")
    assert refusal(http.get(f"{place}/file/etc/passwd")) == (403, "invalid_request")
    assert refusal(http.get(f"{place}/file/workspace/%2e%2e/etc/passwd")) == (403, "invalid_request")
    assert refusal(http.put(f"{place}/file/etc/x", content=b"x")) == (403, "invalid_request")
    assert refusal(http.get(f"{place}/file/")) == (400, "invalid_request")
    too_large = bytes(bridge.LARGEST + 1)
    assert refusal(http.put(f"{place}/file/workspace/large", content=too_large)) == (413, "payload_too_large")
    assert refusal(http.put(f"{place}/file/workspace/new", content=b"x")) == (502, "workspace_archive_write_error")


def test_the_workspace_is_kept_and_brought_back(http: httpx.Client, place: str) -> None:
    run(http, place, "sh", "-c", "mkdir -p keep skip/deep; echo 1 >keep/f; echo 2 >skip/deep/g; ln -s f keep/l")
    kept = http.post(f"{place}/persist", params={"excludes": "./skip,new"})
    assert kept.headers["content-type"] == "application/octet-stream"
    with tarfile.open(fileobj=io.BytesIO(kept.content)) as archive:
        names = {name.removeprefix("./") for name in archive.getnames()}
    assert {"keep/f", "keep/l"} <= names
    assert not any(name.startswith(("skip", "new")) for name in names)
    other = f"/v1/sandbox/{http.post('/v1/sandbox').json()['id']}"
    assert http.post(f"{other}/hydrate", content=kept.content).json() == {"ok": True}
    assert run(http, other, "cat", "keep/l")["stdout"] == b"1\n"
    http.delete(other)
    assert refusal(http.post(f"{place}/persist", params={"excludes": "a/../b"})) == (400, "invalid_request")
    assert refusal(http.post(f"{place}/hydrate", content=b"")) == (400, "invalid_request")
    assert refusal(http.post(f"{place}/hydrate", content=bytes(bridge.LARGEST + 1))) == (400, "invalid_request")
    bad = refusal(http.post(f"{place}/hydrate", content=b"no archive" * 100))
    assert bad == (502, "workspace_archive_write_error")


def test_a_tunnel_is_a_preview(http: httpx.Client, place: str) -> None:
    run(http, place, "sh", "-c", "(python3 -m http.server 8080 >/dev/null 2>&1 &)")
    opened = http.post(f"{place}/tunnel/8080", json={"name": "site"}).json()
    assert (opened["port"], opened["name"]) == (8080, "site")
    assert opened["hostname"] in opened["url"]
    assert http.post(f"{place}/tunnel/8080").json()["url"] == opened["url"]
    deadline = time.monotonic() + 30
    with httpx.Client(base_url=http.base_url) as visitor:
        while time.monotonic() < deadline:
            page = visitor.get("/", headers={"Host": opened["hostname"]})
            if page.status_code == 200:
                break
        assert "Directory listing" in page.text
        assert http.delete(f"{place}/tunnel/8080").status_code == 204
        assert http.delete(f"{place}/tunnel/8080").status_code == 204
        gone = visitor.get("/", headers={"Host": opened["hostname"]})
    assert (gone.status_code, gone.json()["code"]) == (404, "INVALID_TOKEN")
    assert http.post(f"{place}/tunnel/8080", json={"name": "site"}).json()["url"] == opened["url"]
    assert (
        http.post(f"{place}/tunnel/8080", json={"name": "my-site"}).json()["hostname"].split(".")[0][-7:] == "my_site"
    )
    for port in ("80", "3000", "70000", "x"):
        assert refusal(http.post(f"{place}/tunnel/{port}")) == (400, "invalid_request")
    assert refusal(http.post(f"{place}/tunnel/8080", json={"name": "No name"})) == (400, "invalid_request")


def test_a_bucket_is_mounted_by_its_name(http: httpx.Client, place: str) -> None:
    body = {"bucket": "default", "mountPath": "/workspace/bucket", "options": {}}
    assert http.post(f"{place}/mount", json=body).json() == {"ok": True}
    run(http, place, "sh", "-c", "echo there >/workspace/bucket/f")
    assert run(http, place, "cat", "/workspace/bucket/f")["stdout"] == b"there\n"
    unmount = {"mountPath": "/workspace/bucket"}
    assert http.post(f"{place}/unmount", json=unmount).json() == {"ok": True}
    assert run(http, place, "test", "-e", "/workspace/bucket")["exit"] == {"exit_code": 1}
    assert refusal(http.post(f"{place}/unmount", json=unmount)) == (502, "unmount_error")
    assert refusal(http.post(f"{place}/unmount", json={"mountPath": "/"})) == (400, "invalid_request")
    assert refusal(http.post(f"{place}/mount", json={**body, "bucket": "none"})) == (502, "mount_error")
    assert refusal(http.post(f"{place}/mount", json={**body, "mountPath": "x"})) == (400, "invalid_request")
    given = {"endpoint": "https://s3.example.com", "credentials": {"accessKeyId": "a", "secretAccessKey": "b"}}
    assert refusal(http.post(f"{place}/mount", json={**body, "options": given})) == (400, "mount_error")


def test_a_terminal_says_ready_and_how_it_ended(server: ServerProcess, http: httpx.Client, place: str) -> None:
    address = server.url.replace("http", "ws") + place + "/pty"
    headers = {"Authorization": f"Bearer {KEY}"}
    with connect(f"{address}?cols=100&rows=30", additional_headers=headers) as socket:
        while socket.recv(30) != '{"type":"ready"}':
            pass
        socket.send(b"stty size; exit 7\n")
        seen, last = b"", ""
        while not last.startswith('{"type":"exit"'):
            frame = socket.recv(30)
            if isinstance(frame, bytes):
                seen += frame
            else:
                last = frame
    assert b"30 100" in seen
    assert json.loads(last) == {"type": "exit", "code": 7}
    assert refusal(http.get(f"{place}/pty")) == (400, "invalid_request")
    with pytest.raises(InvalidStatus) as refused:
        connect(f"{address}?cols=wide", additional_headers=headers)
    assert refused.value.response.status_code == 400


def test_what_cannot_be_read_is_refused(http: httpx.Client, place: str) -> None:
    assert refusal(http.post(f"{place}/exec", content=b"{")) == (400, "invalid_request")
    for body in ({}, {"argv": []}, {"argv": "ls"}, {"argv": [1]}, {"argv": ["ls"], "timeout_ms": "1"}):
        assert refusal(http.post(f"{place}/exec", json=body)) == (400, "invalid_request")
    outside = {"argv": ["ls"], "cwd": "/etc"}
    assert refusal(http.post(f"{place}/exec", json=outside)) == (403, "invalid_request")
    for id in ("UPPER", "a1", "x" * 129):
        assert refusal(http.get(f"/v1/sandbox/{id}/running")) == (400, "invalid_request")
    for wrong in ("a b", "a..b"):
        headers = {"Session-Id": wrong}
        assert refusal(http.post(f"{place}/exec", json={"argv": ["ls"]}, headers=headers)) == (400, "invalid_request")


def test_long_ids_are_told_apart(http: httpx.Client) -> None:
    one, other = "a" * 127 + "b", "a" * 127 + "c"
    http.put(f"/v1/sandbox/{one}/file/workspace/f", content=b"1").raise_for_status()
    assert http.get(f"/v1/sandbox/{one}/file/workspace/f").content == b"1"
    assert http.get(f"/v1/sandbox/{other}/file/workspace/f").status_code == 404
    for id in (one, other):
        http.delete(f"/v1/sandbox/{id}")


def test_the_pool_is_counted(http: httpx.Client, place: str) -> None:
    found = http.get("/v1/pool/stats").json()
    assert found["total"] == found["warm"] + found["assigned"]
    assert found["assigned"] >= 1
    assert found["config"]["warmTarget"] == 1
    assert found["maxInstances"] is None
    for path in ("/v1/pool/prime", "/v1/pool/shutdown-prewarmed"):
        assert http.post(path).json() == {"ok": True}


def test_without_the_key_nothing_is_told(http: httpx.Client, server: ServerProcess, place: str) -> None:
    with httpx.Client(base_url=server.url) as nobody:
        for method, path, _, _ in bridge.TABLE:
            path = path.replace("{id}", "abc").replace("{rest:path}", "/workspace/f")
            path = path.replace("{sid}", "s").replace("{port}", "8080")
            assert refusal(nobody.request(method, path)) == (401, "unauthorized"), path
        assert nobody.get("/health").json()["ok"] is True


def test_the_document_names_every_route(http: httpx.Client, server: ServerProcess) -> None:
    document = http.get("/v1/openapi.json").json()
    assert document == openapi.DOCUMENT
    assert document["openapi"] == "3.1.0"
    named = {(method.upper(), path) for path, routes in document["paths"].items() for method in routes}
    for method, path, _, _ in bridge.TABLE:
        if "openapi" not in path:
            assert (method, path.replace("{rest:path}", "/{path}")) in named
    with httpx.Client(base_url=server.url) as browser:
        for path in ("/v1/openapi", "/v1/openapi.html"):
            page = browser.get(path, params={"token": KEY})
            assert "/v1/sandbox/{id}/exec" in page.text
        assert browser.get("/v1/openapi", params={"token": "wrong"}).status_code == 401
