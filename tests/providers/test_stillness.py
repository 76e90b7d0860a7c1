"""Processes held still: nothing runs meanwhile, and afterwards all is as if nothing had been."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from skerry.providers.local.stillness import while_still

# Stands in for the init of a sandbox: what is below it is held, and it is not.
_INIT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], *sys.argv[2:]])
print(child.pid, flush=True)
sys.stdin.read()
child.kill()
child.wait()
"""


class Family:
    def __init__(self, program: str, *arguments: object) -> None:
        argv = [sys.executable, "-c", _INIT, program, *map(str, arguments)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True, start_new_session=True)
        assert self.process.stdout is not None
        self.child = int(self.process.stdout.readline())

    def until(self, file: Path) -> None:
        limit = time.monotonic() + 30
        while not file.exists() or not file.read_text():
            assert time.monotonic() < limit, f"{file.name} was not written"
            time.sleep(0.01)

    def close(self) -> None:
        """All of it ends, also what its child has left behind."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


@pytest.fixture
def families() -> Iterator[list[Family]]:
    made: list[Family] = []
    yield made
    for each in made:
        each.close()


def grows(file: Path, seconds: float = 0.3) -> bool:
    before = file.stat().st_size
    time.sleep(seconds)
    return file.stat().st_size > before


def test_every_thread_of_every_process_is_held_and_goes_on(families: list[Family], tmp_path: Path) -> None:
    program = """
import os, sys, threading
def write(name):
    with open(os.path.join(sys.argv[1], name), "a", buffering=1) as file:
        while True:
            file.write("x\\n")
for name in ("t1", "t2"):
    threading.Thread(target=write, args=(name,), daemon=True).start()
for n in range(3):
    if os.fork() == 0:
        write(f"p{n}")
write("main")
"""
    family = Family(program, tmp_path)
    families.append(family)
    files = [tmp_path / name for name in ("t1", "t2", "p0", "p1", "p2", "main")]
    for file in files:
        family.until(file)
    held: list[bool] = []
    while_still([family.process.pid], lambda: held.extend(grows(file, 0.05) for file in files))
    assert held == [False] * 6
    assert all(grows(file, 0.5) for file in files)
    assert "TracerPid:\t0" in Path(f"/proc/{family.child}/status").read_text()


def test_what_forks_all_the_time_is_held_too(families: list[Family], tmp_path: Path) -> None:
    program = """
import os, subprocess, sys
while True:
    subprocess.run(["/bin/sh", "-c", "echo x >>$0/log; true | true", sys.argv[1]])
"""
    families.append(Family(program, tmp_path))
    family = families[-1]
    family.until(tmp_path / "log")
    for _ in range(20):
        held: list[bool] = []
        while_still([family.process.pid], lambda held=held: held.append(grows(tmp_path / "log", 0.02)))  # type: ignore[misc]
        assert held == [False]
    assert grows(tmp_path / "log", 1)


def test_a_signal_that_arrives_meanwhile_is_delivered_afterwards(families: list[Family], tmp_path: Path) -> None:
    program = """
import os, signal, sys, time
def noted(number, _):
    with open(sys.argv[1] + "/signals", "a") as file:
        file.write(f"{number}\\n")
signal.signal(signal.SIGUSR1, noted)
open(sys.argv[1] + "/ready", "w").write("ready")
while True:
    time.sleep(0.001)
"""
    family = Family(program, tmp_path)
    families.append(family)
    family.until(tmp_path / "ready")
    for number in range(1, 21):
        os.kill(family.child, signal.SIGUSR1)  # may be on its way while it is stopped
        while_still([family.process.pid], lambda: None)
        limit = time.monotonic() + 10
        while (tmp_path / "signals").read_text().count("10\n") < number if (tmp_path / "signals").exists() else True:
            assert time.monotonic() < limit, "a signal was lost"
            time.sleep(0.005)
    while_still([family.process.pid], lambda: os.kill(family.child, signal.SIGUSR1))
    limit = time.monotonic() + 10
    while (tmp_path / "signals").read_text().count("10\n") < 21:
        assert time.monotonic() < limit, "a signal was lost"
        time.sleep(0.005)


def test_one_that_is_killed_meanwhile_is_gone_and_its_parent_knows(families: list[Family]) -> None:
    family = Family("import time; time.sleep(1000)")
    families.append(family)
    while_still([family.process.pid], lambda: os.kill(family.child, signal.SIGKILL))
    families.clear()
    family.process.communicate("")  # it waits for its child
    assert family.process.returncode == 0


def test_what_fails_meanwhile_is_raised_and_everything_goes_on(families: list[Family], tmp_path: Path) -> None:
    program = "import sys\nwith open(sys.argv[1], 'a', buffering=1) as f:\n    while True: f.write('x\\n')"
    family = Family(program, tmp_path / "log")
    families.append(family)
    family.until(tmp_path / "log")

    def fail() -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        while_still([family.process.pid], fail)
    assert grows(tmp_path / "log", 0.5)


def test_a_process_that_is_traced_already_does_not_hold_it_up(families: list[Family], tmp_path: Path) -> None:
    program = """
import ctypes, os, sys, time
child = os.fork()
if child == 0:
    while True:
        time.sleep(0.01)
libc = ctypes.CDLL(None)
assert libc.ptrace(0x4206, child, 0, 0) == 0
open(sys.argv[1], "w").write("ready")
while True:
    time.sleep(0.01)
"""
    family = Family(program, tmp_path / "ready")
    families.append(family)
    family.until(tmp_path / "ready")
    began = time.monotonic()
    while_still([family.process.pid], lambda: None)
    assert time.monotonic() - began < 20


def test_nothing_below_is_nothing_to_do() -> None:
    done: list[int] = []
    while_still([2**22 - 1], lambda: done.append(1))
    assert done == [1]
