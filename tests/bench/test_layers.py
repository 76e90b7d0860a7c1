from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def test_snapshots_are_measured_and_nothing_is_left(tmp_path: Path) -> None:
    line = [
        sys.executable,
        "-m",
        "tests.bench",
        "--quick",
        "--only",
        "fork-10",
        "--json",
        str(tmp_path / "report.json"),
    ]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(line, capture_output=True, text=True, timeout=110, check=False, env=env)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert (row["name"], row["skerry"]["n"]) == ("fork-10", 15)
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
