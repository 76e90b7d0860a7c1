"""All tests, as a few runs of pytest beside each other: most of them wait more than they work.

Each run takes one file after the other of those that are left (tests/shared.py), so that they end together. What failed
beside the others is run by itself, where it must pass three times in a row. What came through that way is named at the
end: it is a test, or a part of Skerry, that minds what else the machine does.

A run that has not begun a new test for longer than any may take hangs where not even its own timeout gets through. It
says where and is ended; another takes its place, and the file it was at is run by itself as what failed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parent.parent
RUNS = 3
AGAIN_AT_MOST = 20
IN_A_ROW = 3
STUCK = 500.0
"""Seconds, more than the longest timeout of a test."""
LAST_WORDS = 10.0
GLANCE = 0.2
_TESTS_FAILED, _NONE_LEFT = 1, 5


class Run:
    def __init__(self, scratch: Path, number: int) -> None:
        self.number = number
        self._taken = scratch / "taken"
        self._taken.mkdir(exist_ok=True)
        self._place = scratch / f"run{number}"
        self._place.mkdir(mode=0o755)
        self._temporary = scratch / "tmp"
        self._temporary.mkdir(exist_ok=True)
        self._temporary.chmod(0o1777)
        self._began = time.monotonic()
        self._process: subprocess.Popen[bytes] | None = None
        self.log = scratch / f"run{number}.log"
        self.code: int | None = None
        self.hung: str | None = None
        """The test that it was at when it had to be ended."""

    def start(self, *, seen: bool) -> None:
        """Beside the others, with which it shares the tests; ``seen`` as it goes, or read from its log at the end."""
        if seen:
            self._process = self._pytest("tests", TESTS_TAKEN=str(self._taken))
            return
        with self.log.open("wb") as output:
            self._process = self._pytest("tests", output=output.fileno(), TESTS_TAKEN=str(self._taken))

    def look(self) -> bool:
        """Whether it is through; one that hangs is ended."""
        if self._process is None:
            return True
        self.code = self._process.poll()
        if self.code is None and self._quiet() > STUCK:
            self.hung = self._at().read_text() if self._at().exists() else "its start"
            print(f"\nRun {self.number} hung at {self.hung}.", flush=True)
            self.code = self.end(signal.SIGABRT)  # of which pytest's faulthandler makes a trace of all threads
        if self.code is None:
            return False
        self._process = None
        if self.log.exists():
            sys.stdout.write(self.log.read_text(errors="replace"))
        print(f"Run {self.number} took {time.monotonic() - self._began:.0f} s.", flush=True)
        return True

    def end(self, how: signal.Signals = signal.SIGTERM) -> int:
        process = self._process
        if process is None:
            return 0
        process.send_signal(how)
        with suppress(subprocess.TimeoutExpired):
            return process.wait(LAST_WORDS)
        process.kill()
        return process.wait()

    def failed(self) -> list[str]:
        record = self._place / "failed"
        names = sorted(set(record.read_text().splitlines())) if record.exists() else []
        return names if self.hung is None else [*names, self.hung.partition("::")[0]]

    def known(self) -> bool:
        """Whether what it failed at, if anything, is all in ``failed``."""
        if self.hung is not None:
            return True
        return self.code == _TESTS_FAILED if self.failed() else self.code in (0, _NONE_LEFT)

    def again(self, names: list[str]) -> bool:
        """Whether all of them pass, each time; the first failure decides."""
        for _ in range(IN_A_ROW):
            self._began = time.monotonic()
            self._process = self._pytest(*names)
            try:
                while not self.look():
                    time.sleep(GLANCE)
            finally:
                self.end()
            if self.code:
                return False
        return True

    def _at(self) -> Path:
        return self._place / "at"

    def _quiet(self) -> float:
        """For how many seconds no test has begun."""
        try:
            return min(time.time() - self._at().stat().st_mtime, time.monotonic() - self._began)
        except FileNotFoundError:
            return time.monotonic() - self._began

    def _pytest(self, *more: str, output: int | None = None, **environment: str) -> subprocess.Popen[bytes]:
        # Not --basetemp: with that pytest keeps the directories of tests that passed, and each may hold a gigabyte.
        options = ["-q", "-o", f"cache_dir={self._place}/.cache", "-o", "console_output_style=classic", *sys.argv[1:]]
        places = {"PYTEST_DEBUG_TEMPROOT": str(self._place), "TMPDIR": str(self._temporary)}
        return subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *more],
            cwd=ROOT,
            # What pytest makes of the tests' files is written down, also where Python is told not to do that.
            env={
                **os.environ,
                "PYTHONDONTWRITEBYTECODE": "",
                "TESTS_RECORD": str(self._place),
                **places,
                **environment,
            },
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
        )


def main() -> int:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="skerry-run-", ignore_cleanup_errors=True) as scratch:
        Path(scratch).chmod(0o755)
        runs = _beside_each_other(Path(scratch))
        names = [name for run in runs for name in run.failed()]
        known = all(run.known() for run in runs)
        fine = known and not names and any(run.code == 0 for run in runs)
        if known and 0 < len(names) <= AGAIN_AT_MOST:
            print(f"Failed, and now run {IN_A_ROW} times by themselves:", *names, sep="\n  ", flush=True)
            fine = Run(Path(scratch), len(runs) + 1).again(names)
    print(f"All of it took {time.monotonic() - began:.0f} s.")
    if fine and names:
        count = f"{len(names)} failure{'s' if len(names) > 1 else ''}"
        print(f"{count} beside the others, which passed alone {IN_A_ROW} times in a row:", *names, sep="\n  ")
    return 0 if fine else 1


def _beside_each_other(scratch: Path) -> list[Run]:
    """The first is seen at once, the others when they are done."""
    runs = [Run(scratch, number) for number in range(1, RUNS + 1)]
    try:
        for run in runs:
            run.start(seen=run.number == 1)
        under_way = list(runs)
        while under_way:
            under_way = [run for run in under_way if not run.look()]
            for _ in range(RUNS + sum(run.hung is not None for run in runs) - len(runs)):
                runs.append(Run(scratch, len(runs) + 1))
                runs[-1].start(seen=False)
                under_way.append(runs[-1])
            time.sleep(GLANCE)
    finally:
        for run in runs:
            run.end()
    return runs


if __name__ == "__main__":
    sys.exit(main())
