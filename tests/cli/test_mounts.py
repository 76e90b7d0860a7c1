"""mount, unmount and mounts."""

from __future__ import annotations

import json

from tests.cli.conftest import Skerry


def test_a_bucket_is_mounted_listed_and_unmounted(skerry: Skerry) -> None:
    mounted = skerry("mount", "shelf", "default", "/data", "--prefix", "shelf", "--json")
    assert mounted.returncode == 0, mounted.stderr
    assert json.loads(mounted.stdout)["mountPath"] == "/data"
    assert skerry("exec", "shelf", "--", "sh", "-c", "echo kept > /data/f").returncode == 0
    assert skerry("mounts", "shelf").stdout.split(b"\t")[:4] == [b"/data", b"default", b"/shelf/", b"writable"]
    (listed,) = json.loads(skerry("mounts", "shelf", "--json").stdout)
    assert (listed["mode"], listed["readOnly"]) == ("localBucket", False)
    assert skerry("unmount", "shelf", "/data").returncode == 0
    again = skerry("unmount", "shelf", "/data")
    assert again.returncode == 1
    assert b"Nothing is mounted at '/data'" in again.stderr
    read_only = skerry("mount", "shelf", "default", "/data", "--prefix", "shelf", "--read-only")
    assert b"read-only" in read_only.stdout
    assert skerry("exec", "shelf", "--", "cat", "/data/f").stdout == b"kept\n"
    assert skerry("mount", "shelf", "unknown").returncode == 1
    assert skerry("rm", "shelf").returncode == 0


def test_a_sandbox_is_bootstrapped(skerry: Skerry) -> None:
    made = "git init -q /srv/origin && git -C /srv/origin -c user.name=n -c user.email=n@x commit -qm one --allow-empty"
    assert skerry("exec", "ready", "--", "sh", "-c", made).returncode == 0
    line = ["bootstrap", "ready", "/srv/origin", "--bucket", "default", "--setup", "echo hello", "--setup", "true"]
    first = skerry(*line)
    assert first.returncode == 0, first.stderr
    assert [row.split(b"\t")[0] for row in first.stdout.splitlines()] == [
        b"mountBucket", b"gitCheckout", b"exec", b"exec", b"writeFile",
    ]  # fmt: skip
    assert b"hello" in first.stderr
    steps = json.loads(skerry(*line, "--json").stdout)["steps"]
    assert [step["changed"] for step in steps] == [False] * 5
    failed = skerry("bootstrap", "ready", "--setup", "echo sorry >&2; exit 3")
    assert failed.returncode == 1
    assert b"ended with exit code 3" in failed.stderr
    assert skerry("rm", "ready").returncode == 0
