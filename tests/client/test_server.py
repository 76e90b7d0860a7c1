"""The SDK against `skerry serve`, over real sockets."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from skerry import AsyncSandbox, Sandbox, ServerUnreachableError, UnauthorizedError
from skerry.client.endpoint import resolve

KEY = "a-long-enough-key"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    home = tmp_path_factory.mktemp("served")
    (home / "sandboxes/left-behind").mkdir(parents=True)  # sweeping it is logged, and not where the URL is announced
    keys = home / "keys"
    keys.write_text(f"\n{KEY}\n")
    line = [sys.executable, "-m", "skerry.cli.main", "serve", "--port", "0", "--home", str(home), "--api-key-file"]
    with subprocess.Popen([*line, str(keys)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        try:
            yield said.split()[-1], home
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0


async def test_everything_streams_over_http(server: tuple[str, Path], tmp_path: Path) -> None:
    url, _ = server
    blob = os.urandom(2_000_000)
    async with AsyncSandbox("wire", url=url, api_key=KEY, ephemeral=True) as sandbox:
        assert (await sandbox.exec("echo hi")).stdout == "hi\n"
        await sandbox.write_file("blob", blob)
        assert b"".join([piece async for piece in sandbox.read_file_stream("blob")]) == blob
        events = [event.type async for event in sandbox.exec_stream("echo one")]
        assert events == ["start", "stdout", "complete"]
        async with await sandbox.terminal() as terminal:
            await terminal.send("exit 4\n")
            while await terminal.recv():
                pass
            assert terminal.exit_code == 4


def test_the_sync_client_has_terminals_over_http_too(server: tuple[str, Path]) -> None:
    url, _ = server
    with (
        Sandbox("wire-sync", url=url, api_key=KEY, ephemeral=True) as sandbox,
        sandbox.terminal(cols=50, rows=10) as terminal,
    ):
        terminal.send("stty size; exit\n")
        shown = b""
        while data := terminal.recv():
            shown += data
        assert b"10 50" in shown


def test_a_server_on_the_same_home_is_found(server: tuple[str, Path]) -> None:
    url, home = server
    assert resolve(None, None, home).url == url
    with Sandbox("found", home=home, api_key=KEY, ephemeral=True) as sandbox:
        assert sandbox.exec("true").success


async def test_a_wrong_key_is_refused_everywhere(server: tuple[str, Path]) -> None:
    url, _ = server
    with Sandbox("locked", url=url, api_key="wrong") as sandbox:
        with pytest.raises(UnauthorizedError):
            sandbox.exec("true")
        with pytest.raises(UnauthorizedError):
            list(sandbox.exec_stream("true"))
        with pytest.raises(UnauthorizedError), sandbox.terminal() as terminal:
            terminal.recv()
    async with AsyncSandbox("locked", url=url) as other:
        with pytest.raises(UnauthorizedError):
            await other.exec("true")
        with pytest.raises(UnauthorizedError):
            async with await other.terminal() as refused:
                await refused.recv()


def test_a_server_that_goes_away_is_an_error_that_says_so(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "skerry.cli.main", "serve", "--port", "0", "--home", str(tmp_path)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        with Sandbox("cut", url=url) as sandbox:
            events = sandbox.exec_stream("sleep 1000")
            assert next(events).type == "start"
            process.kill()
            with pytest.raises(ServerUnreachableError):
                list(events)
            with pytest.raises(ServerUnreachableError):
                sandbox.exec("true")
