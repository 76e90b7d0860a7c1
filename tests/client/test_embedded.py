"""The server inside the user's process: it starts by itself, survives a fork, and leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from skerry import AsyncSandbox, HostUnfitError, Sandbox
from skerry.client.endpoint import resolve

FORK = """
import os, sys
from skerry import Sandbox, SandboxBusyError
home = sys.argv[1]
parent = Sandbox("parent", home=home)
print(parent.exec("echo parent").stdout, end="", flush=True)
child = os.fork()
if child == 0:
    with Sandbox("child", home=home, ephemeral=True) as sandbox:
        print(sandbox.exec("echo child").stdout, end="", flush=True)
    try:
        parent.exec("true")
    except SandboxBusyError:
        print("busy", flush=True)
    sys.exit(0)
os.waitpid(child, 0)
print(parent.exec("echo parent again").stdout, end="", flush=True)
parent.destroy()
"""

LEAVE = """
import sys
from skerry import Sandbox
sandbox = Sandbox("left", home=sys.argv[1])
sandbox.write_file("note", "kept")
sandbox.start_process("sleep 98765")
for event in sandbox.exec_stream("echo streaming; sleep 98765", session=None):
    if event.type == "stdout":
        break
print("left")
"""


def script(code: str, home: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", code, str(home)], capture_output=True, text=True, check=False, timeout=100
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_all_clients_of_a_process_share_one_server(home: Path) -> None:
    first, second = resolve(None, None, home), resolve(None, None, str(home))
    assert first.host is second.host
    assert first.host is not None


def test_many_threads_use_it_at_once(home: Path) -> None:
    said: list[str] = []
    with Sandbox("threads", home=home, ephemeral=True) as sandbox:

        def work(number: int) -> None:
            said.append(sandbox.exec(f"echo {number}", session=None).stdout.strip())

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(said) == [str(number) for number in range(8)]


async def test_an_async_client_shares_it_with_a_sync_one(home: Path) -> None:
    async with AsyncSandbox("both", home=home, ephemeral=True) as one:
        await one.write_file("note", "seen by both")
        with Sandbox("both", home=home) as other:
            assert other.read_file("note") == "seen by both"


def test_a_forked_child_starts_its_own(tmp_path: Path) -> None:
    assert script(FORK, tmp_path) == ["parent", "child", "busy", "parent again"]


def test_leaving_python_ends_what_runs_and_keeps_the_files(tmp_path: Path) -> None:
    assert script(LEAVE, tmp_path) == ["left"]
    assert subprocess.run(["pgrep", "-f", "sleep [9]8765"], check=False, capture_output=True).stdout == b""
    with Sandbox("left", home=tmp_path) as sandbox:
        assert sandbox.read_file("note") == "kept"
        sandbox.destroy()


def test_a_home_that_cannot_be_used_is_an_error_not_a_hang(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with Sandbox("x", home=tmp_path / "file" / "home") as sandbox, pytest.raises((OSError, HostUnfitError)):
        sandbox.exec("true")
