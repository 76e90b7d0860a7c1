"""The bench of keys: with and without them in one run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.bench.test_code import _running


def test_an_exec_with_a_key_is_measured_beside_one_without(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "tests.bench", "--quick", "--only", "auth", "--json", str(tmp_path / "report.json")]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(line, capture_output=True, text=True, timeout=100, check=False, env=env)
    assert done.returncode == 0, done.stderr + done.stdout
    (row,) = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert (row["name"], row["rivals"][0]["name"]) == ("auth", "without keys")
    assert row["skerry"]["n"] == row["rivals"][0]["n"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
    assert not _running(str(tmp_path))
