"""The bench of egress: it measures beside the same program without a door, and leaves nothing running."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.bench.test_code import _running

NAMES = {f"egress-{way}": "direct" for way in ("http", "fresh", "tunnel", "caught")}


def test_egress_is_measured_beside_the_straight_way(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "tests.bench", "--quick", "--only", "egress-small"]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    report = tmp_path / "report.json"
    done = subprocess.run(
        [*line, "--json", str(report)], capture_output=True, text=True, timeout=100, check=False, env=env
    )
    assert done.returncode == 0, done.stderr + done.stdout
    rows = json.loads(report.read_text())["rows"]
    assert {row["name"]: row["rivals"][0]["name"] for row in rows} == NAMES
    for row in rows:
        assert row["skerry"]["n"] == row["rivals"][0]["n"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
    assert not _running(str(tmp_path))
