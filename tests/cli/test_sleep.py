from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.cli.conftest import Skerry
from tests.server.conftest import ServerProcess


def test_sleep_wake_touch_update_and_events(
    skerry: Skerry, program: list[str], environment: dict[str, str], tmp_path: Path
) -> None:
    server = ServerProcess(tmp_path / "served")
    try:

        def at(*arguments: str) -> str:
            done = skerry("--url", server.url, *arguments)
            assert done.returncode == 0, done.stderr
            return done.stdout.decode()

        assert at("create", "nap", "--on-idle", "freeze", "--hibernate-after", "1h", "--keep-alive") == "nap\n"
        at("exec", "nap", "--", "sh", "-c", "echo kept >f")
        assert at("touch", "nap") == "-\n"
        assert at("update", "nap", "--no-keep-alive", "--sleep-after", "20m") == "nap\n"
        assert int(at("touch", "nap")) == 1200
        assert at("sleep", "nap", "--freeze") == "frozen\n"
        assert at("wake", "nap") == "active\n"
        assert at("sleep", "nap", "--grace", "1s") == "hibernated\n"
        assert at("exec", "nap", "cat f") == "kept\n"
        lines = [line.split("\t") for line in at("events", "nap").splitlines()]
        assert [line[2] for line in lines] == [
            "created",
            "started",
            "updated",
            "frozen",
            "thawed",
            "hibernated",
            "woken",
        ]
        assert lines[3][3] == "local client"
        assert lines[3][4].endswith(" ms")
        follow = ["--url", server.url, "events", "nap", "--follow", "--json", "--after", lines[-1][0]]
        with subprocess.Popen([*program, *follow], stdout=subprocess.PIPE, env=environment) as following:
            assert following.stdout is not None
            at("sleep", "nap", "--freeze")
            assert json.loads(following.stdout.readline())["kind"] == "frozen"
            at("rm", "nap")
            assert json.loads(following.stdout.readline())["kind"] == "destroyed"
            assert following.wait(30) == 0
        assert json.loads(at("events", "nap", "--json"))[-1]["kind"] == "destroyed"
    finally:
        assert server.stop() == 0


def test_what_is_not_there_is_an_error(skerry: Skerry) -> None:
    for command in ("sleep", "wake", "touch", "events"):
        done = skerry(command, "nobody")
        assert (done.returncode, b"no sandbox" in done.stderr) == (1, True)
    assert skerry("ls").stdout == b""
