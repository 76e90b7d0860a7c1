"""The genuine clients of the bridge for JavaScript, in Node: the OpenAI Agents SDK and ComputeSDK; without a model."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.conformance.cloudflare.conftest import KEY, NODE
from tests.server.conftest import ServerProcess


def test_the_clients_for_javascript_do_what_they_say(bridge_clients: Path, bridge_server: ServerProcess) -> None:
    tests = ["openai_agents.test.mjs", "computesdk.test.mjs"]
    line = [NODE / "bin" / "node", "--test", "--test-reporter=spec", *tests]
    environment = {"PATH": "/usr/bin:/bin", "URL": bridge_server.url, "KEY": KEY}
    done = subprocess.run(
        line, cwd=bridge_clients, env=environment, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
