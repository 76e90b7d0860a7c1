"""skerry audit, skerry webhooks."""

from __future__ import annotations

import json
import os
import pwd
from pathlib import Path

from tests.cli.conftest import Skerry


def test_what_was_done_on_the_command_line_is_on_record(skerry: Skerry, tmp_path: Path) -> None:
    assert skerry("exec", "noted", "--", "echo", "hi").returncode == 0
    assert skerry("rm", "noted").returncode == 0
    done = skerry("audit", "noted", "--json")
    assert done.returncode == 0, done.stderr
    entries = list(reversed(json.loads(done.stdout)))
    assert [(e["actor"], e["operation"], e["outcome"]) for e in entries if e["operation"] != "get_sandbox"] == [
        ("embedded", "execute_stream", "ok"),
        ("embedded", "delete_sandbox", "ok"),
    ]
    shown = skerry("audit", "noted", "--operation", "execute_stream", "--since", "1h", "--limit", "1").stdout.decode()
    assert shown.split("\t")[1:6] == [_user(), "-", "execute_stream", "noted", "ok"]
    assert skerry("audit", "--since", "soon").returncode == 2
    assert skerry("audit", "--outcome", "good").returncode == 2

    export = tmp_path / "audit.ndjson"
    export.write_bytes(skerry("audit", "--export").stdout)
    verified = skerry("audit", "--verify")
    assert verified.returncode == 0
    head, said = verified.stdout.decode().splitlines()
    assert said == "The audit log is as it was written."
    whole = skerry("audit", "--verify", "--file", export, "--head", head)
    assert whole.returncode == 0, whole.stderr
    lines = export.read_text().splitlines(keepends=True)
    for broken in (lines[1:2] + lines[:1] + lines[2:], lines[:1] + lines[2:], lines[:-1]):
        export.write_text("".join(broken))
        found = skerry("audit", "--verify", "--file", export, "--head", head)
        assert (found.returncode, found.stdout.splitlines()[-1]) == (1, b"The audit log was tampered with.")


def test_webhooks_are_made_looked_at_and_removed(skerry: Skerry) -> None:
    made = skerry("webhooks", "add", "http://127.0.0.1:9/hooks", "-e", "sandbox.*", "--description", "none there")
    id, secret = made.stdout.decode().strip().split("\t")
    assert secret.startswith("whsec_")
    listed = skerry("webhooks", "list").stdout.decode()
    assert listed.split("\t")[:3] == [id, "sandbox.*", "enabled"]
    assert secret not in listed
    pinged = skerry("webhooks", "ping", id)
    assert (pinged.returncode, pinged.stdout) == (1, b"The connection could not be made.\n")
    (dead,) = skerry("webhooks", "deliveries", id, "--state", "dead").stdout.decode().splitlines()
    again = skerry("webhooks", "redeliver", id, "--dead").stdout.decode().strip()
    assert dead.split("\t")[0] == again
    changed = skerry("webhooks", "update", id, "--rotate-secret", "--disable").stdout.decode().strip().split("\t")
    assert changed[0] == id
    assert changed[1] not in ("None", secret)
    assert "disabled" in skerry("webhooks", "list").stdout.decode()
    assert skerry("webhooks", "remove", id).returncode == 0
    gone = skerry("webhooks", "ping", id)
    assert (gone.returncode, gone.stderr.splitlines()[0]) == (1, b"error: There is no such webhook.")
    refused = skerry("webhooks", "add", "http://169.254.169.254/")
    assert refused.returncode == 1


def _user() -> str:
    return pwd.getpwuid(os.geteuid()).pw_name
