"""What the Sandbox class has its container do to mount a bucket."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

Run = Callable[[str], dict[str, Any]]
OPTIONS = "'logfile=/tmp/.s3fs-log,passwd_file=/tmp/.passwd,url=https://s3.example.com{more}'"


@pytest.fixture(scope="module")
def run(http: httpx.Client, box: str) -> Run:
    def run(command: str) -> dict[str, Any]:
        body = {"command": command, "sessionId": "class", "origin": "internal"}
        answer = http.post(f"/v1/sandboxes/{box}/container/api/execute", json=body)
        return dict(answer.raise_for_status().json())

    return run


def script(bucket: str, path: str, more: str = "") -> str:
    """s3fs in a subshell that then waits for the mount."""
    options = OPTIONS.format(more=more)
    return (
        f"(\n  s3fs '{bucket}' '{path}' -o {options} >'/tmp/.s3fs-log' 2>&1\n  rc=$?\n"
        f"  if [ \"$rc\" -ne 0 ]; then exit 2; fi\n  mountpoint -q '{path}' || exit 3\n)"
    )


def test_a_bucket_of_the_server_is_mounted_and_unmounted(run: Run) -> None:
    assert run("mkdir -p '/data'")["exitCode"] == 0
    assert run(script("default:/mine", "/data"))["exitCode"] == 0
    assert run("mountpoint -q '/data' && echo 'FUSE_MOUNTED'")["stdout"] == "FUSE_MOUNTED"
    assert run("echo kept >/data/f; cat /data/f")["stdout"] == "kept"
    assert run("fusermount -u '/data'")["exitCode"] == 0
    assert run("mountpoint -q '/data'")["exitCode"] != 0
    assert run(script("default:/mine", "/data", ",ro"))["exitCode"] == 0
    assert run("cat /data/f")["stdout"] == "kept"
    assert run("echo x >/data/g")["exitCode"] != 0
    assert run("fusermount -u '/data'")["exitCode"] == 0


def test_a_bucket_that_the_server_does_not_know_is_named(run: Run) -> None:
    failed = run(script("nobodys", "/data"))
    assert failed["exitCode"] == 2
    assert "nobodys" in failed["stdout"]


def test_nobody_elses_commands_are_taken_for_these(http: httpx.Client, box: str, run: Run) -> None:
    body = {"command": "s3fs 'default' '/data' -o 'url=https://s3.example.com'", "sessionId": "user"}
    answer = http.post(f"/v1/sandboxes/{box}/container/api/execute", json=body).json()
    assert answer["exitCode"] == 127
    assert run('s3fs() { echo "$1"; }; s3fs --version')["stdout"] == "--version"
    assert run("s3fs 'default' '/data' -o 'url=http://r2.internal'")["exitCode"] == 0
    assert run("mountpoint -q '/data'")["exitCode"] != 0
    assert run("fusermount -u '/nowhere'")["exitCode"] != 0
