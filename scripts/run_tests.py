"""All tests, as a few runs of pytest beside each other: most of them wait more than they work.

Each run takes one file after the other of those that are left (tests/shared.py), so that they end together. What failed
beside the others is run by itself, where it must pass three times in a row. What came through that way is named at the
end: it is a test, or a part of Skerry, that minds what else the machine does.
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
RUNS = 3
AGAIN_AT_MOST = 20
IN_A_ROW = 3
_TESTS_FAILED = 1


class Run:
    def __init__(self, scratch: Path, number: int) -> None:
        self._taken = scratch / "taken"
        self._taken.mkdir(exist_ok=True)
        self._place = scratch / f"run{number}"
        self._place.mkdir(mode=0o755)
        self._temporary = scratch / "tmp"
        self._temporary.mkdir(exist_ok=True)
        self._temporary.chmod(0o1777)
        self.log = scratch / f"run{number}.log"

    def start(self, output: IO[bytes] | None = None) -> subprocess.Popen[bytes]:
        """Beside the others, with which it shares the tests."""
        return self._pytest("tests", output=output, TESTS_TAKEN=str(self._taken))

    def failed(self) -> list[str]:
        record = self._place / ".cache" / "v" / "cache" / "lastfailed"
        return sorted(json.loads(record.read_text())) if record.exists() else []

    def again(self, names: list[str]) -> bool:
        """Whether all of them pass, each time; the first failure decides."""
        return all(self._pytest(*names).wait() == 0 for _ in range(IN_A_ROW))

    def _pytest(self, *more: str, output: IO[bytes] | None = None, **environment: str) -> subprocess.Popen[bytes]:
        # Not --basetemp: with that pytest keeps the directories of tests that passed, and each may hold a gigabyte.
        options = ["-q", "-o", f"cache_dir={self._place}/.cache", "-o", "console_output_style=classic", *sys.argv[1:]]
        places = {"PYTEST_DEBUG_TEMPROOT": str(self._place), "TMPDIR": str(self._temporary)}
        return subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *more],
            cwd=ROOT,
            # What pytest makes of the tests' files is written down, also where Python is told not to do that.
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "", **places, **environment},
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
        )


def main() -> int:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="skerry-run-", ignore_cleanup_errors=True) as scratch:
        Path(scratch).chmod(0o755)
        runs = [Run(Path(scratch), number) for number in range(1, RUNS + 1)]
        codes = _beside_each_other(runs)
        failed = [run.failed() for run in runs]
        names = [name for some in failed for name in some]
        known = all(code == (_TESTS_FAILED if some else 0) for code, some in zip(codes, failed, strict=True))
        if known and 0 < len(names) <= AGAIN_AT_MOST:
            print(f"Failed, and now run {IN_A_ROW} times by themselves:", *names, sep="\n  ", flush=True)
            again = [run.again(some) for run, some in zip(runs, failed, strict=True) if some]
            codes = [0 if all(again) else _TESTS_FAILED]
    print(f"All of it took {time.monotonic() - began:.0f} s.")
    if any(codes):
        return 1
    if names:
        count = f"{len(names)} test{'s' if len(names) > 1 else ''}"
        print(f"{count} failed beside the others and passed alone, {IN_A_ROW} times in a row:", *names, sep="\n  ")
    return 0


def _beside_each_other(runs: list[Run]) -> list[int]:
    """The first is seen at once, the others when they are done."""
    began = time.monotonic()
    processes = [runs[0].start()]
    codes: list[int] = []
    try:
        for run in runs[1:]:
            with run.log.open("wb") as output:
                processes.append(run.start(output))
        for number, (run, process) in enumerate(zip(runs, processes, strict=True), 1):
            codes.append(process.wait())
            if number > 1:
                sys.stdout.write(run.log.read_text(errors="replace"))
            print(f"Run {number} of {len(runs)} took {time.monotonic() - began:.0f} s at most.", flush=True)
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()
                process.wait()
    return codes


if __name__ == "__main__":
    sys.exit(main())
