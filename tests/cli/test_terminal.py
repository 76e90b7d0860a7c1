"""The command line on a real terminal, driven as a person would: with tmux."""

from __future__ import annotations

import shlex
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Skerry
from tests.providers.tarballs import directory, file, tarball


class Screen:
    """A tmux session of its own on a socket of its own."""

    def __init__(self, socket: Path, environment: dict[str, str]) -> None:
        self._tmux = ["tmux", "-S", str(socket), "-f", "/dev/null"]
        self._environment = environment

    def open(self, command: list[str], columns: int = 100, rows: int = 30) -> None:
        line = f"{shlex.join(command)}; echo exit=$?; stty -a | grep -o -- '-*icanon'; exec sleep 1000"
        size = ["-x", str(columns), "-y", str(rows)]
        self._run("new-session", "-d", "-s", "t", *size, line)

    def _run(self, *arguments: str) -> str:
        done = subprocess.run(
            [*self._tmux, *arguments], capture_output=True, text=True, env=self._environment, check=True
        )
        return done.stdout

    def type(self, *keys: str) -> None:
        self._run("send-keys", "-t", "t", *keys)

    def resize(self, columns: int, rows: int) -> None:
        self._run("resize-window", "-t", "t", "-x", str(columns), "-y", str(rows))

    def wait_for(self, text: str, seconds: float = 40) -> str:
        until = time.monotonic() + seconds
        shown = ""
        while time.monotonic() < until:
            shown = self._run("capture-pane", "-p", "-t", "t")
            if text in shown:
                return shown
            time.sleep(0.05)
        raise AssertionError(f"{text!r} never appeared on:\n{shown}")

    def close(self) -> None:
        subprocess.run([*self._tmux, "kill-server"], capture_output=True, check=False)


@pytest.fixture
def screen(tmp_path: Path, environment: dict[str, str]) -> Iterator[Screen]:
    screen = Screen(tmp_path / "tmux", environment | {"LC_ALL": "C.UTF-8", "TERM": "xterm-256color"})
    yield screen
    screen.close()


def test_a_shell_is_used_like_any_other(screen: Screen, program: list[str]) -> None:
    screen.open([*program, "shell", "typed"])
    screen.wait_for("root@typed")
    screen.type("stty size; echo äöü; tty", "Enter")
    shown = screen.wait_for("/dev/pts/")
    assert "30 100" in shown
    assert "äöü\n" in shown
    screen.resize(90, 20)
    screen.type("stty size", "Enter")
    screen.wait_for("20 90")
    screen.type("sleep 1000", "Enter")
    time.sleep(0.3)
    screen.type("C-c")
    screen.type("echo interrupted=$?", "Enter")
    screen.wait_for("interrupted=130")
    screen.type("less /etc/services", "Enter")
    screen.wait_for("/etc/services", 20)
    screen.type("q")
    screen.type("exit 7", "Enter")
    assert "\nicanon" in screen.wait_for("icanon"), "the terminal was left in raw mode"


def test_copying_shows_how_far_it_is(screen: Screen, program: list[str], tmp_path: Path) -> None:
    large = tmp_path / "large.bin"
    with large.open("wb") as sparse:
        sparse.truncate(200_000_000)
    screen.open([*program, "cp", str(large), "copied:/workspace/"])
    shown = screen.wait_for("exit=0")
    assert "100%" in shown


def test_lists_are_tables_with_headings_on_a_terminal(screen: Screen, program: list[str]) -> None:
    screen.open([*program, "image", "list"])
    assert "NAME" in screen.wait_for("exit=0").upper()


def test_images_are_imported_used_and_removed(skerry: Skerry, tmp_path: Path) -> None:
    shell = Path("/bin/sh").read_bytes()
    source = tarball(
        tmp_path / "tiny.tar", [directory("bin"), file("bin/sh", shell, mode=0o755), file("etc/hello", b"x")]
    )
    imported = skerry("image", "import", "tiny", source)
    assert imported.returncode == 0, imported.stderr
    assert b"tiny" in skerry("image", "list").stdout
    again = skerry("image", "import", "tiny", source)
    assert (again.returncode, b"exists already" in again.stderr) == (1, True)
    assert skerry("create", "of-tiny", "--image", "tiny").returncode == 0
    in_use = skerry("image", "remove", "tiny")
    assert (in_use.returncode, b"used by 1 sandbox" in in_use.stderr) == (1, True)
    assert skerry("rm", "of-tiny").returncode == 0
    assert skerry("image", "remove", "tiny").returncode == 0
    assert b"tiny" not in skerry("image", "list").stdout
    tree = tmp_path / "tree"
    (tree / "bin").mkdir(parents=True)
    (tree / "bin" / "sh").write_bytes(shell)
    (tree / "bin" / "sh").chmod(0o755)
    assert skerry("image", "import", "tree", tree).returncode == 0
    assert b"tree\t" in skerry("image", "list").stdout
    assert skerry("image", "remove", "tree").returncode == 0
    missing = skerry("image", "import", "other", tmp_path / "nothing.tar")
    assert missing.returncode in (1, 2)
    assert b"nothing.tar" in missing.stderr
