from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Skerry


def test_a_workspace_is_backed_up_restored_listed_and_deleted(skerry: Skerry) -> None:
    skerry("exec", "keeper", "--", "sh", "-c", "echo one >/workspace/file; echo junk >/workspace/a.log")
    done = skerry("backup", "keeper", "--name", "nightly", "--ttl", "1h", "--exclude", "*.log")
    assert done.returncode == 0, done.stderr
    id = done.stdout.decode().split("\t")[0]
    listed = skerry("backups", "--sandbox", "keeper").stdout.decode()
    assert listed.startswith(f"{id}\tnightly\tkeeper\t/workspace\t2\t")
    skerry("exec", "keeper", "--", "sh", "-c", "echo two >/workspace/file")
    done = skerry("restore", "keeper", id)
    assert done.returncode == 0, done.stderr
    assert skerry("exec", "keeper", "--", "sh", "-c", "cat /workspace/*").stdout == b"one\n"
    assert skerry("backups", "--delete", id).stdout.decode() == f"{id}\n"
    assert skerry("backups", "--sandbox", "keeper").stdout == b""
    done = skerry("restore", "keeper", id)
    assert done.returncode == 1
    assert b"There is no backup" in done.stderr


def test_a_handle_in_json_restores_into_a_new_sandbox(skerry: Skerry) -> None:
    skerry("exec", "origin", "--", "sh", "-c", "echo one >/workspace/file")
    handle = skerry("backup", "origin", "--json").stdout
    assert json.loads(handle)["bucket"] == "default"
    done = skerry("restore", "copy", "-", "/opt/copy", "--json", stdin=handle)
    assert json.loads(done.stdout)["dir"] == "/opt/copy"
    assert skerry("exec", "copy", "--", "cat", "/opt/copy/file").stdout == b"one\n"


def test_the_buckets_are_listed(skerry: Skerry) -> None:
    assert skerry("buckets").stdout.decode().startswith("default\tdirectory\tfile:///")
    assert json.loads(skerry("buckets", "--json").stdout)[0]["default"] is True


def test_mistakes_are_said(skerry: Skerry) -> None:
    done = skerry("backup", "nobody-made-this")
    assert done.returncode == 1
    assert b"There is no sandbox" in done.stderr
    skerry("exec", "keeper", "--", "true")
    done = skerry("backup", "keeper", "--compression", "zip")
    assert done.returncode == 2
    done = skerry("backup", "keeper", "--bucket", "sea")
    assert b"those that are configured are default" in done.stderr


def test_a_broken_file_of_buckets_is_told_when_the_server_starts(skerry: Skerry, tmp_path: Path) -> None:
    (tmp_path / "buckets.toml").write_text("[near]\nurl = 'file:///srv'\n\n[far]\nregion = 'x'\n")
    refused = skerry("serve", "--port", "0", "--home", tmp_path)
    said = f"error: [far] in '{tmp_path}/buckets.toml', line 4, cannot be used: url: Field required.\n"
    assert (refused.returncode, refused.stdout, refused.stderr.decode()) == (2, b"", said)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["buckets.toml"]
    findings = json.loads(skerry("--home", tmp_path, "doctor", "--json").stdout)["findings"]
    (told,) = [one for one in findings if one["name"] == "buckets"]
    assert not told["ok"]
    assert f"{tmp_path}/buckets.toml', line 4" in told["detail"]
    (tmp_path / "buckets.toml").write_text("[near]\nurl = 'file:///srv'\n")
    findings = json.loads(skerry("--home", tmp_path, "doctor", "--json").stdout)["findings"]
    (told,) = [one for one in findings if one["name"] == "buckets"]
    assert (told["ok"], told["detail"]) == (True, "default (directory), near (directory).")
