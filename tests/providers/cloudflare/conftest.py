"""Two servers: one speaks the bridge and stands in for the cloud, the other has it as its provider.

There is no Cloudflare on the machine that runs the tests; what Skerry's own bridge is true to is proved, with genuine
clients, in ``tests/conformance/cloudflare``.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from skerry import AsyncSandbox
from tests.server.conftest import ServerProcess

TOKEN = "token-of-the-bridge"


@pytest.fixture(scope="package")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    home: Path = tmp_path_factory.mktemp("cloud")
    home.chmod(0o711)
    process = ServerProcess(home, api_keys=[TOKEN], pool_size=1 << 28)
    yield process
    assert process.stop() == 0
    shutil.rmtree(home)


@pytest.fixture(scope="package")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "near"


@pytest.fixture(scope="package")
def near(cloud: ServerProcess, log: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    home: Path = tmp_path_factory.mktemp("near")
    with log.open("w") as file:
        process = ServerProcess(
            home,
            log=file,
            provider="cloudflare",
            cloudflare_url=cloud.url,
            cloudflare_token=TOKEN,
            cloudflare_timeout=20,
        )
        yield process
        assert process.stop() == 0
    shutil.rmtree(home)


@pytest.fixture(scope="package")
async def box(near: ServerProcess) -> AsyncIterator[AsyncSandbox]:
    """One sandbox for tests that leave nothing behind in it but files."""
    async with AsyncSandbox("shared", url=near.url) as sandbox:
        yield sandbox
        await sandbox.destroy()
