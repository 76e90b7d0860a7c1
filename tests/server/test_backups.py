"""The routes of backups, as programs written for other systems use them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.s3 import bucket_table
from tests.servers import Server

SANDBOX = "/v1/sandboxes/demo"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Server]:
    place = tmp_path_factory.mktemp("backups")
    home = place / "home"
    home.mkdir()
    bucket_table("s3", place, request).rename(home / "buckets.toml")
    server = Server(home).start()
    yield server
    server.stop()


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def sh(client: httpx.Client, command: str) -> str:
    answer = client.post(f"{SANDBOX}/exec", json={"command": command}).raise_for_status().json()
    assert answer["exitCode"] == 0, answer["stderr"]
    return str(answer["stdout"])


def test_the_bodies_and_answers_are_those_of_the_older_api(client: httpx.Client) -> None:
    sh(client, "cd /workspace; git init -q .; echo '*.log' >.gitignore; echo 1 >file; echo 2 >a.log")
    answer = client.post(f"{SANDBOX}/backup", json={"dir": "/workspace", "name": "n", "ttl": 60, "useGitignore": True})
    body = answer.raise_for_status().json()
    assert body["ok"] is True
    handle = body["backup"]
    assert {"id", "dir", "name", "createdAt", "expiresAt", "size", "files", "bucket"} <= set(handle)
    sh(client, "rm /workspace/file")
    answer = client.post(f"{SANDBOX}/restore", json={"backup": handle}).raise_for_status().json()
    assert (answer["ok"], answer["restored"]) == (True, True)
    assert sh(client, "cat /workspace/file; ls /workspace") == "1\nfile\n"
    assert client.get("/health").json()["bindings"]["backupBucket"] is True


def test_without_a_body_the_workspace_is_backed_up(client: httpx.Client) -> None:
    assert client.post(f"{SANDBOX}/backup").raise_for_status().json()["backup"]["dir"] == "/workspace"


def test_events_tell_how_far_it_is(client: httpx.Client) -> None:
    headers = {"Accept": "text/event-stream"}
    with client.stream("POST", f"{SANDBOX}/backup", json={"bucket": "test"}, headers=headers) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        events = [json.loads(line[5:]) for line in stream.iter_lines() if line.startswith("data:")]
    assert [events[0]["type"], events[-1]["type"]] == ["start", "complete"]
    id = events[0]["id"]
    assert events[-1]["backup"]["id"] == id
    with client.stream("POST", f"{SANDBOX}/restore", json={"backup": "nothing"}, headers=headers) as stream:
        stream.read()
        assert stream.status_code == 404
        assert stream.json()["error"]["code"] == "backup_not_found"
    assert client.delete(f"/v1/backups/{id}").json()["ok"] is True
    assert client.get(f"/v1/backups/{id}").status_code == 404


def test_a_client_that_leaves_cancels_its_backup(client: httpx.Client, server: Server) -> None:
    sh(client, "head -c 200000000 /dev/urandom >/workspace/large")
    with pytest.raises(httpx.ReadTimeout), server.client() as hasty:
        hasty.post(f"{SANDBOX}/backup", json={"bucket": "test"}, timeout=0.4)
    for _ in range(200):
        if not list(Path(server.home, "backups").iterdir()):
            break
        time.sleep(0.05)
    assert list(Path(server.home, "backups").iterdir()) == []
    assert client.get("/v1/backups", params={"bucket": "test"}).json()["backups"] == []
    sh(client, "rm /workspace/large")


def test_one_that_is_being_made_is_cancelled_by_deleting_it(client: httpx.Client, server: Server) -> None:
    sh(client, "head -c 200000000 /dev/urandom >/workspace/large")
    headers = {"Accept": "text/event-stream"}
    events = []
    with client.stream("POST", f"{SANDBOX}/backup", json={"bucket": "test"}, headers=headers) as stream:
        for line in stream.iter_lines():
            if line.startswith("data:"):
                events.append(json.loads(line[5:]))
                if events[-1]["type"] == "progress":
                    with server.client() as other:
                        other.delete(f"/v1/backups/{events[0]['id']}").raise_for_status()
    assert (events[-1]["type"], events[-1]["code"]) == ("error", "backup_cancelled")
    sh(client, "rm /workspace/large")


@pytest.mark.parametrize(
    "body",
    [
        {"dir": 5},
        {"compression": "zip"},
        {"level": 40},
        {"excludes": "a"},
        {"nonsense": 1},
        {"ttl": "soon"},
        {"dir": "/workspace/../etc"},
        {"dir": ""},
    ],
)
def test_a_body_that_makes_no_sense_is_refused(client: httpx.Client, body: dict[str, object]) -> None:
    answer = client.post(f"{SANDBOX}/backup", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


def test_the_buckets_are_named_without_their_keys(client: httpx.Client) -> None:
    answer = client.get("/v1/buckets").raise_for_status()
    assert {one["name"] for one in answer.json()["buckets"]} == {"default", "test"}
    assert "low-tide-at-noon" not in answer.text
    assert "skerry-tests" not in answer.text


def test_an_expired_backup_is_swept_by_the_server(tmp_path: Path) -> None:
    server = Server(tmp_path / "home", backup_sweep=0.2).start()
    try:
        with server.client() as client:
            client.post(f"{SANDBOX}/backup", json={"ttl": 0.1}).raise_for_status()
            place = tmp_path / "home/buckets/default"
            for _ in range(200):
                left = [name for _, _, names in os.walk(place) for name in names]  # it may be deleted meanwhile
                if not left:
                    break
                time.sleep(0.05)
            assert left == []
    finally:
        server.stop()
