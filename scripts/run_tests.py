"""All tests, as two runs of pytest beside each other: most of them wait more than they work.

What failed beside the other half is run once more by itself and counts if it fails again; the summary names it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parent.parent
FIRST = ["bench", "browser", "cli", "client", "control", "portal"]
FIRST_FILES = ["test_acceptance.py", "test_documentation.py", "test_escape.py", "test_examples.py"]
AGAIN_AT_MOST = 20
_TESTS_FAILED = 1


class Half:
    def __init__(self, scratch: Path, name: str, chosen: list[str]) -> None:
        self._place = scratch / name
        self._place.mkdir(mode=0o755)
        self._chosen = chosen

    def start(self, *more: str, output: IO[bytes] | None = None) -> subprocess.Popen[bytes]:
        # Not --basetemp: with that pytest keeps the directories of tests that passed, and each may hold a gigabyte.
        options = ["-q", "-o", f"cache_dir={self._place}/.cache", *more, *sys.argv[1:]]
        return subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *self._chosen],
            cwd=ROOT,
            env={**os.environ, "PYTEST_DEBUG_TEMPROOT": str(self._place)},
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
        )

    def failed(self) -> list[str]:
        record = self._place / ".cache" / "v" / "cache" / "lastfailed"
        return sorted(json.loads(record.read_text())) if record.exists() else []

    def again(self) -> int:
        return self.start("--last-failed", "--last-failed-no-failures=none").wait()


def main() -> int:
    chosen = [f"tests/{name}" for name in (*FIRST, *FIRST_FILES)]
    others = ["tests", *(f"--ignore={path}" for path in chosen)]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="skerry-run-", ignore_cleanup_errors=True) as scratch:
        Path(scratch).chmod(0o755)
        halves = Half(Path(scratch), "first", chosen), Half(Path(scratch), "second", others)
        codes = _beside_each_other(*halves, Path(scratch, "second.log"))
        names = [name for half in halves for name in half.failed()]
        if set(codes) <= {0, _TESTS_FAILED} and 0 < len(names) <= AGAIN_AT_MOST:
            print("Failed, and run once more by themselves:", *names, sep="\n  ", flush=True)
            codes = tuple(half.again() if code else 0 for half, code in zip(halves, codes, strict=True))
    print(f"All of it took {time.monotonic() - began:.0f} s.")
    return 1 if any(codes) else 0


def _beside_each_other(first: Half, second: Half, log: Path) -> tuple[int, ...]:
    began = time.monotonic()
    with log.open("wb") as output:
        runs = second.start(output=output), first.start()
    try:
        one = runs[1].wait()
        print(f"The first half took {time.monotonic() - began:.0f} s; the second half:", flush=True)
        other = runs[0].wait()
    finally:
        for run in runs:
            if run.poll() is None:
                run.terminate()
                run.wait()
        sys.stdout.write(log.read_text(errors="replace"))
        sys.stdout.flush()
    return one, other


if __name__ == "__main__":
    sys.exit(main())
