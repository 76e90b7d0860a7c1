"""The bench of backups: it measures beside tar and zstd, and leaves nothing running."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.bench.test_code import _running

NAMES = {"backup": "tar | zstd -3", "restore": "unzstd | tar x"}


def test_backups_are_measured_beside_tar_and_zstd(tmp_path: Path) -> None:
    line = [
        sys.executable,
        "-m",
        "tests.bench",
        "--quick",
        "--only",
        "storage",
        "--json",
        str(tmp_path / "report.json"),
    ]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(line, capture_output=True, text=True, timeout=110, check=False, env=env)
    assert done.returncode == 0, done.stderr + done.stdout
    rows = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert {row["name"]: row["rivals"][0]["name"] for row in rows} == NAMES
    for row in rows:
        assert row["skerry"]["n"] == row["rivals"][0]["n"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
    assert not _running(str(tmp_path))
