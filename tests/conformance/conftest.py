from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex

import httpx
import pytest

from tests.server.conftest import ServerProcess


@pytest.fixture(scope="session")
def container_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server for all that speaks to containers and the bridge."""
    home: Path = tmp_path_factory.mktemp("container-home")
    home.chmod(0o711)
    process = ServerProcess(home)
    yield process
    assert process.stop() == 0
    shutil.rmtree(home)


@pytest.fixture(scope="session")
def http(container_server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=container_server.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def box(http: httpx.Client) -> Iterator[str]:
    """A sandbox's id, for one file of tests."""
    id = f"cf-{token_hex(3)}"
    yield id
    http.delete(f"/v1/sandboxes/{id}")
