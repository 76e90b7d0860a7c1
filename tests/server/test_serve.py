from __future__ import annotations

import json
import os
import signal
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import websockets

from skerry.errors import HostUnfitError, InvalidRequestError
from skerry.server.serve import announced, bind, run
from skerry.settings import Settings
from tests.server.conftest import ServerProcess


@pytest.fixture
def own(home: Path) -> Iterator[ServerProcess]:
    place = home / "own"
    place.mkdir(exist_ok=True)
    process = ServerProcess(place, api_keys=["secret"], host="127.0.0.1")
    yield process
    process.stop()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_announces_itself_while_it_runs_and_stops_on_a_signal(own: ServerProcess, number: int) -> None:
    file = own.home / "server.json"
    assert json.loads(file.read_text()) == {"url": own.url, "pid": own.process.pid}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert httpx.get(f"{own.url}/health").json()["service"] == "skerry"
    assert httpx.get(f"{own.url}/v1/sandboxes").status_code == 401
    assert httpx.get(f"{own.url}/v1/sandboxes", headers={"X-API-Key": "secret"}).status_code == 200
    assert own.stop(number) == 0
    assert not file.exists()


def test_stopping_ends_open_streams_at_once_and_sandboxes_with_them(own: ServerProcess) -> None:
    keyed = httpx.Client(base_url=own.url, headers={"X-API-Key": "secret"}, timeout=60)
    with keyed, keyed.stream("POST", "/v1/sandboxes/stopping/exec/stream", json={"command": "sleep 1000"}) as response:
        lines = response.iter_lines()
        assert '"start"' in next(lines)
        own.process.send_signal(signal.SIGTERM)
        assert [line for line in lines if line and '"error"' not in line] == []
    assert own.stop() == 0


async def test_a_terminal_needs_the_key_too(own: ServerProcess) -> None:
    url = f"{own.url.replace('http', 'ws', 1)}/v1/sandboxes/keyed/terminal"
    async with websockets.connect(url) as socket:
        with pytest.raises(websockets.ConnectionClosed):
            await socket.recv()
        assert socket.close_code == 4401
    async with websockets.connect(url, additional_headers={"Authorization": "Bearer secret"}) as socket:
        assert json.loads(await socket.recv())["type"] == "ready"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", ""])
def test_an_address_that_others_can_reach_needs_a_key(tmp_path: Path, host: str) -> None:
    with pytest.raises(InvalidRequestError, match="without an API key") as caught:
        run(Settings(home=tmp_path, host=host))
    assert "SKERRY_API_KEYS" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_port_that_is_taken_is_said_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(HostUnfitError, match="cannot listen"):
        bind("127.0.0.1", taken.getsockname()[1])


def test_an_announcement_that_another_server_replaced_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "server.json"
    with announced(tmp_path, "http://127.0.0.1:1"):
        assert json.loads(file.read_text())["pid"] == os.getpid()
        file.write_text(json.dumps({"url": "http://127.0.0.1:2", "pid": 1}))
    assert json.loads(file.read_text())["url"].endswith(":2")
