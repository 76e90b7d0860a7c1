"""All tests, as a few runs of pytest beside each other: most of them wait more than they work.

What failed beside the others is run by itself, where it must pass three times in a row. What came through that way
is named at the end: it is a test, or a part of Skerry, that minds what else the machine does.
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
PARTS = [
    ["bench", "browser", "cli", "client", "portal", "runtime", "test_documentation.py", "test_examples.py"],
    ["control", "conformance", "egress", "storage", "test_acceptance.py", "test_escape.py"],
]
"""What each run has; the last has all the rest."""
LEFT_TO_SOAK = ["client/_sync"]
"""Generated from those of the async client. The command line and the documents' examples use the sync one as well."""
AGAIN_AT_MOST = 20
IN_A_ROW = 3
_TESTS_FAILED = 1


class Part:
    def __init__(self, scratch: Path, name: str, chosen: list[str]) -> None:
        self._place = scratch / name
        self._place.mkdir(mode=0o755)
        self._chosen = chosen

    def start(self, *more: str, chosen: bool = True, output: IO[bytes] | None = None) -> subprocess.Popen[bytes]:
        # Not --basetemp: with that pytest keeps the directories of tests that passed, and each may hold a gigabyte.
        options = ["-q", "-o", f"cache_dir={self._place}/.cache", *more, *sys.argv[1:]]
        return subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *(self._chosen if chosen else ())],
            cwd=ROOT,
            env={**os.environ, "PYTEST_DEBUG_TEMPROOT": str(self._place)},
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
        )

    def failed(self) -> list[str]:
        record = self._place / ".cache" / "v" / "cache" / "lastfailed"
        return sorted(json.loads(record.read_text())) if record.exists() else []

    def again(self, names: list[str]) -> bool:
        """Whether all of them pass, each time; the first failure decides."""
        return all(self.start(*names, chosen=False).wait() == 0 for _ in range(IN_A_ROW))


def main() -> int:
    chosen = [[f"tests/{name}" for name in names] for names in PARTS]
    chosen.append(["tests", *(f"--ignore={path}" for paths in chosen for path in paths)])
    chosen[0] += [f"--ignore=tests/{name}" for name in LEFT_TO_SOAK]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="skerry-run-", ignore_cleanup_errors=True) as scratch:
        Path(scratch).chmod(0o755)
        parts = [Part(Path(scratch), f"part{number}", paths) for number, paths in enumerate(chosen, 1)]
        codes = _beside_each_other(parts, Path(scratch))
        failed = [part.failed() for part in parts]
        names = [name for some in failed for name in some]
        known = all(code == (_TESTS_FAILED if some else 0) for code, some in zip(codes, failed, strict=True))
        if known and 0 < len(names) <= AGAIN_AT_MOST:
            print(f"Failed, and now run {IN_A_ROW} times by themselves:", *names, sep="\n  ", flush=True)
            again = [part.again(some) for part, some in zip(parts, failed, strict=True) if some]
            codes = [0 if all(again) else _TESTS_FAILED]
    print(f"All of it took {time.monotonic() - began:.0f} s.")
    if any(codes):
        return 1
    if names:
        count = f"{len(names)} test{'s' if len(names) > 1 else ''}"
        print(f"{count} failed beside the others and passed alone, {IN_A_ROW} times in a row:", *names, sep="\n  ")
    return 0


def _beside_each_other(parts: list[Part], scratch: Path) -> list[int]:
    """The first is seen at once, the others when they are done."""
    began = time.monotonic()
    logs = [scratch / f"part{number}.log" for number in range(2, len(parts) + 1)]
    runs = [parts[0].start()]
    codes: list[int] = []
    try:
        for part, log in zip(parts[1:], logs, strict=True):
            with log.open("wb") as output:
                runs.append(part.start(output=output))
        for number, run in enumerate(runs, 1):
            codes.append(run.wait())
            if number > 1:
                sys.stdout.write(logs[number - 2].read_text(errors="replace"))
            print(f"Part {number} of {len(parts)} took {time.monotonic() - began:.0f} s at most.", flush=True)
    finally:
        for run in runs:
            if run.poll() is None:
                run.terminate()
                run.wait()
    return codes


if __name__ == "__main__":
    sys.exit(main())
