"""The bench of previews: it measures beside the same server without them, and leaves nothing running."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.bench.test_code import _running

NAMES = {"preview-page": "direct", "preview-websocket": "direct", "terminal": "a terminal of this machine"}


def test_previews_are_measured_beside_the_server_itself(tmp_path: Path) -> None:
    only = [part for name in NAMES for part in ("--only", name)]
    # On one core: with several, what counts most in an echo is where the kernel has put the two who talk.
    pinned = ["taskset", "-c", str(min(os.sched_getaffinity(0))), sys.executable]
    line = [*pinned, "-m", "tests.bench", "--quick", *only, "--json", str(tmp_path / "report.json")]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(line, capture_output=True, text=True, timeout=100, check=False, env=env)
    assert done.returncode == 0, done.stderr + done.stdout
    rows = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert {row["name"]: row["rivals"][0]["name"] for row in rows} == NAMES
    for row in rows:
        assert row["skerry"]["n"] == row["rivals"][0]["n"] > 0
        ours, straight = row["skerry"]["p50"], row["rivals"][0]["p50"]
        assert min(ours, straight) > 0
        # An echo takes either way a few microseconds, and the host's own loopback may be paced where ours is not.
        assert ours > straight or row["name"] == "preview-websocket", "a detour was shorter than the straight way"
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
    assert not _running(str(tmp_path))
