from __future__ import annotations

import json
import os
import pty
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Skerry
from tests.servers import Server


@pytest.fixture
def skerry(skerry: Skerry, tmp_path: Path) -> Iterator[Skerry]:
    """With a server, which makes each of many commands shorter."""
    server = Server(tmp_path / "home").start()
    yield lambda *arguments: skerry("--url", server.url, *arguments)
    server.stop()


def said(skerry: Skerry, *arguments: str | Path) -> str:
    done = skerry(*arguments)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


@pytest.mark.timeout(300)
def test_snapshots_on_the_command_line(skerry: Skerry, tmp_path: Path) -> None:
    said(skerry, "exec", "lay", "--", "sh", "-c", "echo one >f")
    id = said(skerry, "snapshot", "lay", "before", "-l", "a=b").strip()
    said(skerry, "exec", "lay", "--", "sh", "-c", "rm f; echo two >g")
    assert said(skerry, "diff", "lay", "--since", "before") == "D /workspace/f\nA /workspace/g\n"
    assert "A /workspace/g\n" in said(skerry, "diff", "lay")
    said(skerry, "diff", "lay", "--since", "before", "--tar", tmp_path / "layer.tar")
    with tarfile.open(tmp_path / "layer.tar") as tar:
        assert sorted(tar.getnames()) == ["workspace/.wh.f", "workspace/g"]
    assert said(skerry, "fork", "lay", "lay-a", "lay-b") == "lay-a\nlay-b\n"
    assert said(skerry, "create", "lay-c", "--snapshot", "before") == "lay-c\n"
    after = said(skerry, "snapshot", "lay").strip()
    named = said(skerry, "snapshot", "lay", "--name", "option").strip()
    assert said(skerry, "snapshots", "lay", "--rm", "option", "--json") == '[\n  "option"\n]\n'
    assert skerry("snapshot", "lay", "one", "--name", "other").returncode == 2
    assert named not in said(skerry, "snapshots")
    assert said(skerry, "diff", "before", after) == "D /workspace/f\nA /workspace/g\n"
    assert said(skerry, "rollback", "lay", "before") == f"lay\t{id}\thibernated\n"
    assert json.loads(said(skerry, "rollback", "lay", "before", "--json"))["base"] == id
    assert said(skerry, "exec", "lay", "--", "cat", "f") == "one\n"
    assert said(skerry, "exec", "lay-a", "--", "cat", "g") == "two\n"
    assert said(skerry, "exec", "lay-c", "--", "cat", "f") == "one\n"
    listed = json.loads(said(skerry, "snapshots", "lay", "--json"))
    assert [(one["id"], one["name"], one["labels"]) for one in listed] == [
        (id, "before", {"a": "b"}),
        (after, None, {}),
    ]
    assert said(skerry, "snapshots", "--tree").splitlines() == [
        "host",
        "└─ before (of lay)",
        f"   ├─ {after} (of lay)",
        "   ├─ [lay]",
        "   ├─ [lay-a, forked from lay]",
        "   ├─ [lay-b, forked from lay]",
        "   └─ [lay-c]",
    ]
    refused = skerry("snapshots", "--rm", "before")
    assert refused.returncode == 1
    assert b"lay-c" in refused.stderr
    assert said(skerry, "snapshots", "--rm", "before", "--rm", after, "--force") == f"before\n{after}\n"
    assert said(skerry, "snapshots") == ""
    said(skerry, "rm", "lay", "lay-a", "lay-b", "lay-c")


def test_a_mistyped_name_makes_nothing(skerry: Skerry) -> None:
    for line in (("snapshot", "nowhere"), ("fork", "nowhere"), ("rollback", "nowhere", "x"), ("diff", "nowhere")):
        assert skerry(*line).returncode == 1
    assert b"nowhere" not in skerry("ls").stdout


def test_people_are_told_in_sentences_what_became_of_a_sandbox(
    environment: dict[str, str], program: list[str], tmp_path: Path
) -> None:
    server = Server(tmp_path / "home").start()

    def seen(*arguments: str) -> str:
        master, terminal = pty.openpty()
        try:
            line = [*program, "--url", server.url, *arguments]
            subprocess.run(line, stdin=subprocess.DEVNULL, stdout=terminal, env=environment, timeout=60, check=True)
            return os.read(master, 10_000).decode().replace("\r\n", "\n")
        finally:
            os.close(terminal)
            os.close(master)

    try:
        assert seen("snapshots") == "There are no snapshots yet. `skerry snapshot demo` takes one of sandbox demo.\n"
        assert seen("backups").startswith("There are no backups yet.")
        assert seen("workspaces").startswith("No workspace is stored yet.")
        seen("create", "box")
        assert seen("wake", "box") == "box is awake.\n"
        seen("snapshot", "box", "--name", "start")
        assert seen("diff", "box", "--since", "start") == "Nothing has changed.\n"
        said = "box is as it was at snapshot start. What ran in it has ended; the next command wakes it.\n"
        assert seen("rollback", "box", "start") == said
        assert "the next command wakes it" in seen("sleep", "box")
        assert "Nothing is mounted in box." in seen("mounts", "box")
    finally:
        server.stop()
