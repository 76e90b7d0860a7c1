"""The bench of the container API measures what it says, and prints theirs beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def test_the_container_api_is_measured_beside_what_theirs_took(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "tests.bench", "--quick", "--only", "cloudflare", "--json", str(tmp_path / "r.json")]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(line, capture_output=True, text=True, timeout=100, check=False, env=env)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["cf-exec", "cf-stream", "cf-list", "cf-exists", "cf-context", "cf-run"]
    assert all(row["skerry"]["n"] > 0 for row in rows)
    assert "8.2 ms" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]
