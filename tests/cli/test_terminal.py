"""The command line on a real terminal, driven as a person would: with tmux."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.cli.conftest import Skerry
from tests.providers.tarballs import directory, file, tarball
from tests.server.conftest import ServerProcess

# A new size and what is typed after it take different ways, and the size may come later.
WHEN_RESIZED = """until [ "$(stty size)" = "20 90" ]; do sleep 0.1; done; echo $(stty size) it is"""


class Screen:
    """A tmux session of its own on a socket of its own."""

    def __init__(self, socket: Path, environment: dict[str, str]) -> None:
        self._tmux = ["tmux", "-S", str(socket), "-f", "/dev/null"]
        self._environment = environment

    def open(self, command: list[str], columns: int = 100, rows: int = 30) -> None:
        size = ["-x", str(columns), "-y", str(rows)]
        self._run("new-session", "-d", "-s", "t", *size, self._line(command))

    def open_again(self, command: list[str]) -> None:
        self._run("respawn-pane", "-k", "-t", "t", self._line(command))

    def _line(self, command: list[str]) -> str:
        return f"{shlex.join(command)}; echo exit=$?; stty -a | grep -o -- '-*icanon'; exec sleep 1000"

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
        return self.wait_until(lambda shown: text in shown, seconds, repr(text))

    def colours(self) -> str:
        """The screen with the sequences that colour it."""
        return self._run("capture-pane", "-e", "-p", "-t", "t")

    def wait_for_prompt(self) -> str:
        """A full-screen program throws away what was typed before it ended."""
        return self.wait_until(lambda shown: shown.rstrip().endswith("#"), what="A prompt")

    def wait_until(self, fits: Callable[[str], bool], seconds: float = 40, what: str = "It") -> str:
        until = time.monotonic() + seconds
        shown = ""
        while time.monotonic() < until:
            shown = self._run("capture-pane", "-p", "-t", "t")
            if fits(shown):
                return shown
            time.sleep(0.05)
        raise AssertionError(f"{what} never appeared on:\n{shown}")

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
    screen.type(WHEN_RESIZED, "Enter")
    screen.wait_for("20 90 it is")
    screen.type("tput colors; printf '\\033[3%dm%s\\033[0m\\n' 1 red", "Enter")
    screen.wait_for("256\nred")
    assert "\x1b[31mred" in screen.colours()
    screen.type("echo be''gun; sleep 1000", "Enter")
    screen.wait_for("begun")
    screen.type("C-c")
    screen.type("echo interrupted=$?", "Enter")
    screen.wait_for("interrupted=130")
    screen.type("less /usr/share/common-licenses/GPL-3", "Enter")
    screen.wait_for("GNU GENERAL PUBLIC LICENSE", 20)
    screen.type("q")
    screen.wait_for_prompt()
    screen.type("exit 7", "Enter")
    assert "\nicanon" in screen.wait_for("icanon"), "the terminal was left in raw mode"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    home = tmp_path_factory.mktemp("served")
    home.chmod(0o711)
    server = ServerProcess(home)
    yield server
    server.stop()


@pytest.fixture
def served(program: list[str], server: ServerProcess) -> list[str]:
    return [*program, "--url", server.url]


def test_full_screen_programs_work(screen: Screen, served: list[str]) -> None:
    screen.open([*served, "shell", "full"])
    screen.wait_for("root@full")
    screen.type("vi -u NONE -N /tmp/edited", "Enter")
    screen.wait_for("~")
    screen.type("i")
    screen.wait_for("-- INSERT --")
    screen.type("grüße")
    screen.wait_for("grüße")
    screen.type("Escape")
    screen.wait_until(lambda shown: "INSERT" not in shown)
    screen.resize(90, 20)
    screen.type(":wq", "Enter")
    screen.wait_for_prompt()
    screen.type(f"clear; cat /tmp/edited; {WHEN_RESIZED}", "Enter")
    screen.wait_for("grüße\n20 90 it is")
    screen.type("top -d 0.2", "Enter")
    screen.wait_for("PID USER")
    screen.type("q")
    screen.wait_for_prompt()
    screen.type("clear; less /usr/share/common-licenses/GPL-3", "Enter")
    screen.wait_for("GNU GENERAL PUBLIC LICENSE")
    screen.type("G")
    screen.wait_for("(END)")
    screen.type("q")
    screen.wait_for_prompt()
    screen.type("clear; exit 7", "Enter")
    shown = screen.wait_for("icanon")
    assert "exit=7" in shown
    assert "-icanon" not in shown


def test_a_job_is_stopped_and_taken_up_again_inside(screen: Screen, served: list[str]) -> None:
    screen.open([*served, "shell", "jobs"])
    screen.wait_for("root@jobs")
    job = "trap 'echo go''es on' CONT; echo be''gun; while :; do sleep 0.1; done"
    screen.type(f'sh -c "{job}"', "Enter")
    screen.wait_for("begun")
    screen.type("C-z")
    screen.wait_for("Stopped")
    screen.type("fg", "Enter")
    screen.wait_for("goes on")
    screen.type("C-c")
    screen.type("echo interrupted=$?", "Enter")
    screen.wait_for("interrupted=130")


def test_a_terminal_is_left_and_come_back_to(screen: Screen, served: list[str]) -> None:
    screen.open([*served, "shell", "left"])
    screen.wait_for("root@left")
    screen.type("A=kept; vi -u NONE -N", "Enter")
    screen.wait_for("~")
    screen.type("C-]", "C-]", "C-]")
    shown = screen.wait_for("icanon")
    assert "exit=0" in shown
    assert "-icanon" not in shown
    assert "~\n~" not in shown, "the program's screen was left on ours"
    assert "skerry attach left t-" in shown
    screen.open_again([*served, "attach", "left"])
    screen.wait_for("~")
    screen.type(":q", "Enter")
    screen.wait_for_prompt()
    screen.type("echo $A-$((1+2))", "Enter")
    screen.wait_for("kept-3")
    screen.type("exit", "Enter")
    screen.wait_for("exit=0")


def test_leaving_a_terminal_that_no_server_keeps_says_so(screen: Screen, program: list[str]) -> None:
    screen.open([*program, "shell", "alone"])
    screen.wait_for("root@alone")
    screen.type("C-]", "C-]", "C-]")
    assert "no server keeps it" in screen.wait_for("icanon")


def test_a_session_is_where_it_was(screen: Screen, served: list[str], skerry: Skerry, server: ServerProcess) -> None:
    there = ("--url", server.url)
    assert skerry(*there, "exec", "--session", "default", "begun", "cd /usr/lib; export WHO=me").returncode == 0
    screen.open([*served, "shell", "begun", "--session", "default", "--shell", "sh"])
    screen.wait_for("#")
    screen.type("echo $WHO@$PWD", "Enter")
    screen.wait_for("me@/usr/lib\n")


def test_attaching_says_which_terminals_there_are(
    screen: Screen, served: list[str], skerry: Skerry, server: ServerProcess
) -> None:
    there = ("--url", server.url)
    skerry(*there, "exec", "many", "true")
    none = skerry(*there, "attach", "many")
    assert (none.returncode, b"skerry shell many" in none.stderr) == (2, True)
    line = f"{shlex.join(served)} shell many"
    screen.open(["sh", "-c", f"sleep 1000 | {line} & sleep 1000 | {line}"])
    for _ in range(400):
        if len(httpx.get(f"{server.url}/v1/sandboxes/many/terminals").json()["terminals"]) == 2:
            break
        time.sleep(0.05)
    several = skerry(*there, "attach", "many")
    assert (several.returncode, several.stderr.count(b"bash in session default")) == (2, 2), several.stderr
    wrong = skerry(*there, "attach", "many", "t-none")
    assert (wrong.returncode, b"no terminal 't-none'" in wrong.stderr) == (1, True)


def test_a_lost_connection_is_said_and_made_again(screen: Screen, program: list[str], tmp_path: Path) -> None:
    tmp_path.chmod(0o711)
    server = ServerProcess(tmp_path / "home")
    try:
        with Cable(urlsplit(server.url).port or 0) as cable:
            screen.open([*program, "--url", f"http://127.0.0.1:{cable.port}", "shell", "cut"])
            screen.wait_for("root@cut")
            screen.type("A=kept; clear; echo early-$((1+1))", "Enter")
            screen.wait_for("early-2")
            cable.cut()
            screen.wait_for("The connection was lost")
            cable.mend()
            screen.wait_until(lambda shown: "was lost" not in shown and "early-2" in shown)
            screen.type("echo $A-$((1+2))", "Enter")
            screen.wait_for("kept-3")
            cable.cut()
            screen.wait_for("Ctrl-C gives up")
            screen.type("C-c")
            shown = screen.wait_for("icanon")
            assert "exit=1" in shown
            assert "-icanon" not in shown
            assert "error: The connection to the terminal was lost." in shown
    finally:
        server.stop()


class Cable:
    """A port that leads to another, until it is cut."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._whole = True
        self._ends: list[socket.socket] = []

    def __enter__(self) -> Cable:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if not self._whole:
                near.close()
                continue
            far = socket.create_connection(("127.0.0.1", self._target))
            self._ends += [near, far]
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=(one, other), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def cut(self) -> None:
        self._whole = False
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self._ends.clear()

    def mend(self) -> None:
        self._whole = True


def test_a_server_that_stops_gives_the_terminal_back(screen: Screen, program: list[str], tmp_path: Path) -> None:
    tmp_path.chmod(0o711)
    server = ServerProcess(tmp_path / "home")
    screen.open([*program, "--url", server.url, "shell", "stopped"])
    screen.wait_for("root@stopped")
    assert server.stop() == 0
    screen.wait_for("The connection was lost")
    screen.type("C-c")
    assert "-icanon" not in screen.wait_for("icanon")


def test_a_sandbox_that_is_stopped_gives_the_terminal_back(
    screen: Screen, served: list[str], skerry: Skerry, server: ServerProcess
) -> None:
    screen.open([*served, "shell", "asleep"])
    screen.wait_for("root@asleep")
    assert skerry("--url", server.url, "stop", "asleep").returncode == 0
    shown = screen.wait_for("icanon")
    assert "error: The sandbox is no longer running" in shown
    assert "exit=1" in shown
    assert "-icanon" not in shown


def test_a_kill_gives_the_terminal_back(screen: Screen, served: list[str]) -> None:
    screen.open(["sh", "-c", f"exec {shlex.join([*served, 'shell', 'killed'])}"])
    screen.wait_for("root@killed")
    found = subprocess.run(["pgrep", "-f", "shell killed$"], capture_output=True, text=True, check=True).stdout.split()
    for pid in found:
        if "python" in Path(f"/proc/{pid}/comm").read_text():
            os.kill(int(pid), signal.SIGTERM)
    shown = screen.wait_for("icanon")
    assert "exit=143" in shown
    assert "-icanon" not in shown


def test_a_shell_is_fed_from_a_pipe(skerry: Skerry, server: ServerProcess) -> None:
    done = skerry("--url", server.url, "shell", "piped", stdin=b"echo $((6*7))\nexit 5\n")
    assert (done.returncode, b"42" in done.stdout) == (5, True)


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
