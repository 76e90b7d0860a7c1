"""The whole way that a project takes: made ready, worked on, kept, destroyed, and brought back elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from websockets.sync.client import connect

from tests.s3 import S3
from tests.servers import Server

ORIGIN = """
set -e
git init -q -b main /srv/origin; cd /srv/origin
printf 'def tide():\\n    return "low"\\n' > tide.py
printf 'from tide import tide\\nassert tide() == "low"\\nprint("all is well")\\n' > check.py
git add . && git -c user.name=a -c user.email=a@b.c commit -qm first
"""


@pytest.fixture(params=["localBucket", "remoteR2"])
def server(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    if request.param == "remoteR2":
        s3: S3 = request.getfixturevalue("s3")
        monkeypatch.setenv("R2_ENDPOINT", s3.endpoint)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.access_key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.secret_key)
        monkeypatch.setenv("PROJECT_DATA_BUCKET_NAME", s3.create_bucket())
    server = Server(tmp_path / "home").start()
    yield server
    server.stop()


def post(client: httpx.Client, path: str, body: object) -> dict[str, object]:
    answer = client.post(f"/v1/sandboxes/{path}", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, object] = answer.json()
    assert found["ok"] is True
    return found


def test_the_evaluation_sequence(server: Server, request: pytest.FixtureRequest) -> None:
    local = request.node.callspec.params["server"] == "localBucket"
    with server.client() as client:
        health = client.get("/health").json()
        assert health["ok"] is True
        assert health["bindings"] == {"sandbox": True, "projectData": True, "backupBucket": True}

        # There is no network inside, so the repository's home is a path of the sandbox itself.
        assert post(client, "demo/exec", {"command": ORIGIN})["result"]["exitCode"] == 0  # type: ignore[index]
        made = post(
            client,
            "demo/bootstrap",
            {"repoUrl": "file:///srv/origin", "depth": 1, "mountProjectData": True, "localBucket": local},
        )
        assert [step["type"] for step in made["steps"]] == ["mountBucket", "gitCheckout", "writeFile"]  # type: ignore[attr-defined]
        marker = client.get(
            "/v1/sandboxes/demo/files", params={"path": "/workspace/.stackmemory-cloudflare-spike.json"}
        ).json()
        said = json.loads(marker["file"]["content"])
        assert (said["sandboxId"], said["mounted"], said["repoUrl"]) == ("demo", True, "file:///srv/origin")
        check = {"command": "bash", "args": ["-lc", "cd /workspace/repo && python3 -B check.py"]}
        assert post(client, "demo/exec", check)["result"]["stdout"] == "all is well\n"  # type: ignore[index]

        with connect(f"{server.url.replace('http', 'ws', 1)}/v1/sandboxes/demo/terminal?cols=80&rows=24") as terminal:
            terminal.send(b"cd /workspace/repo; echo $((6 * 7))-is-the-answer\n")
            seen = b""
            while b"42-is-the-answer" not in seen:
                frame = terminal.recv(timeout=30)
                seen += frame if isinstance(frame, bytes) else b""

        mounted = post(client, "demo/mount", {"mountPath": "/more", "prefix": "notes", "localBucket": local})
        assert mounted["mount"]["mode"] == request.node.callspec.params["server"]  # type: ignore[index]
        assert mounted["mount"]["prefix"] == "/notes/"  # type: ignore[index]
        wrote = post(
            client, "demo/exec", {"command": "echo kept > /persist/note && echo here > /more/note && cat /more/note"}
        )
        assert wrote["result"]["stdout"] == "here\n"  # type: ignore[index]

        post(
            client,
            "demo/exec",
            {"command": "cd /workspace/repo && echo '# changed' >> tide.py && touch -d 2020-01-01 new"},
        )
        backup = post(
            client, "demo/backup", {"dir": "/workspace", "name": "evening", "ttl": 3600, "useGitignore": False}
        )
        assert post(client, "demo/destroy", {})["destroyed"] is True

        assert client.get("/v1/sandboxes/demo").status_code == 404
        restored = post(client, "again/restore", {"backup": backup["backup"]})
        assert restored["restored"] is True
        after = post(
            client,
            "again/exec",
            {"command": "cd /workspace/repo && python3 -B check.py && git status --short && date -r new +%Y"},
        )
        assert after["result"]["stdout"] == "all is well\n M tide.py\n?? new\n2020\n"  # type: ignore[index]
        # What was written through the mount outlived the sandbox.
        post(client, "again/mount", {"mountPath": "/persist", "prefix": "/projects/demo/", "localBucket": local})
        assert post(client, "again/exec", {"command": "cat /persist/note"})["result"]["stdout"] == "kept\n"  # type: ignore[index]


def test_without_credentials_a_remote_mount_says_which_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("R2_ENDPOINT", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "PROJECT_DATA_BUCKET_NAME"):
        monkeypatch.delenv(name, raising=False)
    server = Server(tmp_path / "home").start()
    try:
        with server.client() as client:
            answer = client.post("/v1/sandboxes/demo/mount", json={})
        assert answer.status_code >= 400
        assert "missing env vars: R2_ENDPOINT, AWS_ACCESS_KEY_ID" in answer.json()["error"]["message"]
    finally:
        server.stop()
