from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator

import pytest

from skerry import Sandbox
from tests.cli.conftest import Skerry


@pytest.fixture(scope="module")
def url(program: list[str], environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    home = tmp_path_factory.mktemp("cli-served")
    line = [*program, "serve", "--port", "0", "--home", str(home)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        assert f"baseUrl {url}/v1/sandboxes/NAME/container" in process.stdout.readline()
        yield url
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_processes_are_listed_and_their_logs_shown(url: str, skerry: Skerry) -> None:
    with Sandbox("work", url=url, ephemeral=True) as sandbox:
        sandbox.start_process("echo out; echo err >&2", process_id="short").wait_for_exit(timeout=30)
        running = sandbox.start_process("echo begun; read x; echo $x", process_id="long")
        running.wait_for_log("begun", timeout=30)

        rows = [line.split("\t") for line in skerry("--url", url, "ps", "work").stdout.decode().splitlines()]
        assert [(row[0], row[2], row[3]) for row in rows] == [("short", "completed", "0"), ("long", "running", "-")]
        listed = json.loads(skerry("--url", url, "ps", "work", "--json").stdout)
        assert [one["id"] for one in listed] == ["short", "long"]

        done = skerry("--url", url, "logs", "work", "short")
        assert (done.stdout, done.stderr) == (b"out\n", b"err\n")
        assert skerry("--url", url, "logs", "work", "long").stdout == b"begun\n"
        assert json.loads(skerry("--url", url, "logs", "work", "short", "--json").stdout)["stdout"] == "out\n"
        running.write_stdin("more\n", eof=True)
        assert skerry("--url", url, "logs", "work", "long", "-f").stdout == b"begun\nmore\n"
        assert skerry("--url", url, "logs", "work", "unknown").returncode == 1
