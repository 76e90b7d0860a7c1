from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from skerry import AsyncSandbox, InvalidRequestError, Sandbox, ServerUnreachableError
from skerry.client.endpoint import resolve, running


@pytest.fixture
def listener() -> socket.socket:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening  # type: ignore[misc]


def note(home: Path, url: str, pid: int) -> None:
    (home / "server.json").write_text(json.dumps({"url": url, "pid": pid}))


def test_a_url_comes_first_and_the_environment_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKERRY_URL", "http://from-environment:1/")
    monkeypatch.setenv("SKERRY_API_KEY", "secret")
    assert resolve("https://given", None, None).url == "https://given"
    found = resolve(None, None, None)
    assert (found.url, found.headers) == ("http://from-environment:1", {"Authorization": "Bearer secret"})


def test_a_live_server_on_the_home_is_used(tmp_path: Path, listener: socket.socket) -> None:
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    note(tmp_path, url, os.getpid())
    assert resolve(None, None, tmp_path).url == url


def test_a_server_that_died_is_not_used(tmp_path: Path, listener: socket.socket) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    note(tmp_path, f"http://127.0.0.1:{listener.getsockname()[1]}", dead.pid)
    assert running(tmp_path) is None


def test_a_process_that_only_has_the_pid_of_a_server_is_not_used(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    note(tmp_path, f"http://127.0.0.1:{port}", os.getpid())
    assert running(tmp_path) is None


def test_a_broken_note_is_no_server(tmp_path: Path) -> None:
    (tmp_path / "server.json").write_text("{")
    assert running(tmp_path) is None


@pytest.mark.parametrize("url", ["localhost:8787", "ftp://x", "http://"])
def test_what_is_not_a_url_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequestError):
        resolve(url, None, None)


async def test_a_server_that_does_not_answer_is_named_with_a_hint() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with Sandbox("demo", url=url) as sandbox, pytest.raises(ServerUnreachableError, match=url) as caught:
        sandbox.exec("true")
    assert caught.value.hint is not None
    assert "skerry serve" in caught.value.hint
    async with AsyncSandbox("demo", url=url) as other:
        with pytest.raises(ServerUnreachableError):
            await other.terminal()
