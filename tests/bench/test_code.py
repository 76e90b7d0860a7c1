"""The bench itself: it measures, beside a rival that takes part, and leaves nothing running."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def test_code_is_measured_beside_a_kernel_that_ends_with_the_bench(tmp_path: Path) -> None:
    names = ("code-javascript", "code-memory")
    only = [part for name in names for part in ("--only", name)]
    line = [sys.executable, "-m", "tests.bench", "--quick", *only, "--json", str(tmp_path / "report.json")]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(line, capture_output=True, text=True, timeout=100, check=False, env=env)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert [row["name"] for row in rows] == list(names)
    for row in rows:
        assert row["skerry"]["n"] > 0
        assert row["rivals"][0]["name"] == "Jupyter kernel"
        assert row["rivals"][0]["p50"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
    assert not _running(str(tmp_path))


def _running(place: str) -> list[str]:
    """What has this place in its command line."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return [line for line in lines if place in line]
