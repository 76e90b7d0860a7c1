"""Buckets that a program brings with it: an address and keys, over the bridge, the container and OpenAI's client."""

from __future__ import annotations

import asyncio
import shutil
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from secrets import token_hex
from typing import Any

import httpx
import pytest
from agents.extensions.sandbox import CloudflareSandboxClient, CloudflareSandboxClientOptions
from agents.extensions.sandbox.cloudflare import CloudflareBucketMountStrategy
from agents.sandbox import Manifest
from agents.sandbox.entries import S3Mount

from skerry.control.own_buckets import OwnBuckets
from skerry.control.store import MountRow
from skerry.egress.vault import Vault
from skerry.errors import BucketEndpointError, BucketError, BucketNotConfiguredError, InvalidRequestError
from skerry.models import BucketCredentials, MountBucket
from skerry.settings import Settings
from skerry.storage.bucket import Bucket
from skerry.storage.buckets import Buckets, opened_with
from tests.s3 import S3
from tests.server.conftest import ServerProcess

KEY = "a-key-of-some-length"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, s3: S3) -> Iterator[ServerProcess]:
    home: Path = tmp_path_factory.mktemp("own-buckets")
    home.chmod(0o711)
    process = ServerProcess(home, api_keys=[KEY], mount_endpoints=[s3.endpoint.removeprefix("http://")])
    yield process
    assert process.stop() == 0
    kept = b"".join(path.read_bytes() for path in home.glob("skerry.db*"))
    assert s3.secret_key.encode() not in kept, "the keys of buckets are kept sealed"
    shutil.rmtree(home)


@pytest.fixture(scope="module")
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60, headers={"Authorization": f"Bearer {KEY}"}) as client:
        yield client


@pytest.fixture(scope="module")
def id(http: httpx.Client) -> str:
    return str(http.post("/v1/sandbox").json()["id"])


def options(s3: S3, **more: Any) -> dict[str, Any]:
    keys = {"accessKeyId": s3.access_key, "secretAccessKey": s3.secret_key}
    return {"endpoint": s3.endpoint, "credentials": keys, **more}


def run(http: httpx.Client, id: str, command: str) -> str:
    answer = http.post(f"/v1/sandboxes/{id}/exec", json={"command": command, "session": None})
    return str(answer.raise_for_status().json()["stdout"])


def test_a_bucket_comes_with_the_request_and_stays_while_the_sandbox_sleeps(
    http: httpx.Client, s3: S3, id: str
) -> None:
    bucket, place = s3.create_bucket(), f"/v1/sandbox/{id}"
    body = {"bucket": bucket, "mountPath": "/workspace/own", "options": options(s3, prefix="/here/")}
    assert http.post(f"{place}/mount", json=body).json() == {"ok": True}
    run(http, id, "echo tide >/workspace/own/f")
    assert s3.request("GET", f"{bucket}/here/f").text == "tide\n"
    (shown,) = http.get(f"/v1/sandboxes/{id}/mounts").json()["mounts"]
    assert (shown["bucket"], shown["endpoint"], shown["prefix"]) == (bucket, s3.endpoint, "/here/")
    assert s3.secret_key not in str(shown)
    assert s3.secret_key not in run(http, id, "cat /proc/*/environ /proc/mounts 2>/dev/null | tr '\\0' '\\n'")
    assert http.post(f"/v1/sandboxes/{id}/stop").status_code == 200
    assert run(http, id, "cat /workspace/own/f") == "tide\n"
    # The same again changes nothing; other keys are another mount.
    assert http.post(f"{place}/mount", json=body).json() == {"ok": True}
    other = {**options(s3, prefix="/here/"), "credentials": {"accessKeyId": "else", "secretAccessKey": "wrong"}}
    refused = http.post(f"{place}/mount", json={**body, "options": other})
    assert (refused.status_code, refused.json()["code"]) == (502, "mount_error")
    assert http.post(f"{place}/unmount", json={"mountPath": "/workspace/own"}).json() == {"ok": True}


def test_what_cannot_be_mounted_changes_nothing(http: httpx.Client, s3: S3, id: str) -> None:
    body = {"bucket": s3.create_bucket(), "mountPath": "/workspace/none"}
    wrong = {"accessKeyId": s3.access_key, "secretAccessKey": "not-this-one"}
    for given, status in (
        (options(s3, credentials=wrong), 502),
        (options(s3, endpoint="http://169.254.169.254"), 400),
        (options(s3, endpoint="https://s3.amazonaws.com.example.com"), 400),
        (options(s3, endpoint="file:///etc"), 502),
        (options(s3, credentials={"accessKeyId": "a"}), 400),
        (options(s3, credentials="a:b"), 400),
    ):
        answer = http.post(f"/v1/sandbox/{id}/mount", json={**body, "options": given})
        assert answer.status_code == status, (given, answer.text)
        assert s3.secret_key not in answer.text
    both = {**body, "binding": "DATA", "options": options(s3)}
    assert http.post(f"/v1/sandbox/{id}/mount", json=both).status_code == 400
    assert http.get(f"/v1/sandboxes/{id}/mounts").json()["mounts"] == []


def test_the_sandbox_class_mounts_with_what_it_would_give_s3fs(http: httpx.Client, s3: S3, id: str) -> None:
    bucket, container = s3.create_bucket(), f"/v1/sandboxes/{id}/container/api"
    keys = {"path": "/tmp/.passwd-s3fs-1", "content": f"{bucket}:{s3.access_key}:{s3.secret_key}"}
    http.post(f"{container}/write", json=keys).raise_for_status()
    line = f"s3fs '{bucket}' /mnt/own -o 'passwd_file=/tmp/.passwd-s3fs-1,url={s3.endpoint}' >'/tmp/.log' 2>&1"
    command = f"(\n      {line}\n      rc=$?\n)"
    body = {"command": command, "origin": "internal", "sessionId": "__DISABLE_SESSION__"}
    assert http.post(f"{container}/execute", json=body).json()["exitCode"] == 0
    run(http, id, "echo high >/mnt/own/g")
    assert s3.request("GET", f"{bucket}/g").text == "high\n"
    http.post(f"{container}/execute", json={**body, "command": "fusermount -u '/mnt/own'"}).raise_for_status()
    assert http.get(f"/v1/sandboxes/{id}/mounts").json()["mounts"] == []


async def test_openais_client_mounts_what_its_manifest_names(server: ServerProcess, s3: S3) -> None:
    bucket, key = s3.create_bucket(), f"f-{token_hex(4)}"
    entry = S3Mount(
        bucket=bucket,
        endpoint_url=s3.endpoint,
        access_key_id=s3.access_key,
        secret_access_key=s3.secret_key,
        read_only=False,
        mount_strategy=CloudflareBucketMountStrategy(),
    )
    client = CloudflareSandboxClient(exec_timeout_s=30, request_timeout_s=60)
    session = await client.create(
        manifest=Manifest(entries={"data": entry}),
        options=CloudflareSandboxClientOptions(worker_url=server.url, api_key=KEY),
    )
    try:
        await session.start()
        assert (await session.exec(f"echo from inside >data/{key}")).exit_code == 0
        assert s3.request("GET", f"{bucket}/{key}").text == "from inside\n"
    finally:
        await session.shutdown()


@pytest.mark.parametrize("closed", [True, False])
def test_where_others_may_ask_only_stores_that_everybody_knows_are_called(tmp_path: Path, closed: bool) -> None:
    def kept(endpoint: str, allowed: tuple[str, ...] | None = None) -> bool:
        own = OwnBuckets(Settings(home=tmp_path, mount_endpoints=allowed), lambda: closed, lambda: Vault(tmp_path))
        keys = BucketCredentials(access_key_id="a", secret_access_key="b")  # type: ignore[arg-type]
        try:
            return own.kept(MountBucket(bucket="data", endpoint=endpoint, credentials=keys), "x", "/data") is not None
        except BucketEndpointError:
            return False

    known = ("https://abc123.r2.cloudflarestorage.com", "https://s3.amazonaws.com", "https://storage.googleapis.com")
    for endpoint in (*known, "https://abc.eu.r2.cloudflarestorage.com", "https://s3.eu-central-1.amazonaws.com/"):
        assert kept(endpoint)
        assert not kept(endpoint, ("s3.example.com",))
    for endpoint in (
        "http://127.0.0.1:9000",
        "https://ec2-1-2-3-4.compute-1.amazonaws.com",
        "http://s3.amazonaws.com",
        "https://s3.amazonaws.com:8443",
        "https://storage.googleapis.com.example.com",
    ):
        assert kept(endpoint) is not closed
        assert kept(endpoint, ("*",))
    assert kept("https://s3.example.com:9000", ("*.example.com:9000",))
    assert not kept("https://s3.example.com:9001", ("*.example.com:9000",))
    for endpoint in ("s3.example.com", "ftp://x", "https://a:b@x.com", "https://x.com/?q", "https://x.com:99999", ""):
        with pytest.raises(InvalidRequestError):
            kept(endpoint, ("*",))


def test_what_is_no_longer_allowed_is_no_longer_opened(tmp_path: Path) -> None:
    closed = False
    own = OwnBuckets(Settings(home=tmp_path), lambda: closed, lambda: Vault(tmp_path))
    keys = BucketCredentials(access_key_id="a", secret_access_key="b")  # type: ignore[arg-type]
    kept = own.kept(MountBucket(bucket="data", endpoint="http://127.0.0.1:9", credentials=keys), "x", "/data")
    row = MountRow(sandbox_id="x", path="/data", bucket="data", own=kept)
    assert own.opened(row).name == "data"
    with pytest.raises(BucketNotConfiguredError):
        own.opened(replace(row, path="/elsewhere"))
    closed = True
    with pytest.raises(BucketEndpointError):
        own.opened(row)


@pytest.mark.parametrize("where", ["request", "file", "variables", "environment"])
def test_of_the_servers_environment_only_what_belongs_together_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    for name in ("AWS_SESSION_TOKEN", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "of-the-server")
    monkeypatch.setenv("THEIR_KEY", "theirs")
    keys = {
        "file": 'access_key = "theirs"\nsecret_key = "secret"\n',
        "variables": 'access_key_env = "THEIR_KEY"\nsecret_key_env = "THEIR_KEY"\n',
        "environment": 'access_key_env = "AWS_ACCESS_KEY_ID"\nsecret_key_env = "AWS_SECRET_ACCESS_KEY"\n',
    }
    with Listener() as listener:
        if where == "request":
            bucket = opened_with("data", listener.url, "theirs", "secret")
        else:
            path = tmp_path / "buckets.toml"
            path.write_text(f'[data]\nurl = "s3://data"\nendpoint = "{listener.url}"\n{keys[where]}')
            path.chmod(0o600)
            bucket = Buckets(tmp_path, path).open("data")
        with pytest.raises(BucketError):
            asyncio.run(_listed(bucket))
    own = where == "environment"
    assert f"Credential={'of-the-server' if own else 'theirs'}/" in listener.heard
    assert ("x-amz-security-token: of-the-server" in listener.heard.lower()) is own
    assert ("of-the-server" in listener.heard) is own


async def _listed(bucket: Bucket) -> None:
    async for _ in bucket.list():
        pass


class Listener:
    """Hears what a client of S3 says first, and refuses it."""

    def __init__(self) -> None:
        self.heard = ""
        self._server = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        self._thread = threading.Thread(target=self._listen)

    def __enter__(self) -> Listener:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()
        self._thread.join()

    def _listen(self) -> None:
        connection, _ = self._server.accept()
        with connection:
            self.heard = connection.recv(65536).decode()
            connection.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
