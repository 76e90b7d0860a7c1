"""expose, ports, open and forward, with real servers on both sides."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import select
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from skerry import Sandbox
from tests import warm
from tests.cli.conftest import RUN, Skerry

REVERSE = """
import socketserver

class Reverse(socketserver.StreamRequestHandler):
    def handle(self):
        self.wfile.write(self.rfile.read()[::-1])

class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    request_queue_size = 256
    daemon_threads = True

Server(("127.0.0.1", 7000), Reverse).serve_forever()
"""

Forward = Callable[..., "Forwarding"]


class Served:
    """A server in a process of its own, that can be killed and started again at the same place."""

    def __init__(self, environment: dict[str, str], home: Path) -> None:
        self._environment, self._home = environment, home
        self.url = ""
        self.start()

    def start(self) -> None:
        port = self.url.rpartition(":")[2] or "0"
        line = ("serve", "--port", port, "--home", str(self._home))
        self._process = warm.Popen(RUN, *line, stdout=subprocess.PIPE, text=True, env=self._environment)
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().split()[-1]

    def stop(self, number: int = signal.SIGTERM) -> None:
        self._process.send_signal(number)
        self._process.wait(60)
        assert self._process.stdout is not None
        self._process.stdout.close()


class Forwarding:
    def __init__(self, line: list[str], environment: dict[str, str]) -> None:
        pipe = subprocess.PIPE
        self.process = warm.Popen(RUN, *line, stdout=pipe, stderr=pipe, text=True, env=environment)

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def port(self) -> int:
        found = re.match(r"127\.0\.0\.1:(\d+) here leads to port \d+ in ", self.line())
        assert found is not None
        return int(found[1])

    def complaint(self) -> str:
        assert self.process.stderr is not None
        assert select.select([self.process.stderr], [], [], 30)[0]
        return self.process.stderr.readline()

    def interrupt(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(30)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def server(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    server = Served(environment, tmp_path_factory.mktemp("cli-ports"))
    yield server
    server.stop()


@pytest.fixture
def sandbox(server: Served) -> Iterator[Sandbox]:
    with Sandbox(f"cli-{secrets.token_hex(4)}", url=server.url, ephemeral=True) as sandbox:
        sandbox.start()
        yield sandbox


@pytest.fixture
def reversing(sandbox: Sandbox) -> Sandbox:
    """A sandbox with a server on port 7000 that answers with what it got, backwards."""
    sandbox.write_file("reverse.py", REVERSE)
    sandbox.start_process("python3 reverse.py")
    sandbox.wait_for_port(7000, timeout=30)
    return sandbox


@pytest.fixture
def forward(environment: dict[str, str], server: Served) -> Iterator[Forward]:
    begun: list[Forwarding] = []

    def forward(*arguments: str) -> Forwarding:
        begun.append(Forwarding(["--url", server.url, "forward", *arguments], environment))
        return begun[-1]

    yield forward
    for forwarding in begun:
        forwarding.close()


def exchange(port: int, data: bytes) -> bytes:
    """Send all of it, end, and read all of the answer, at the same time."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        broken: list[OSError] = []

        def send() -> None:
            try:
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
            except OSError as error:
                broken.append(error)

        sender = threading.Thread(target=send)
        sender.start()
        answer = b""
        while piece := connection.recv(1 << 18):
            answer += piece
        sender.join()
        if any(isinstance(error, ConnectionResetError) for error in broken):
            raise broken[0]  # who sends and who reads are not both told of a reset
    return answer


# -- exposing ----------------------------------------------------------------------------------------------------------


def test_a_port_is_exposed_listed_and_closed(server: Served, sandbox: Sandbox, skerry: Skerry) -> None:
    def run(*arguments: str) -> str:
        done = skerry("--url", server.url, *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout.decode()

    url = run("expose", sandbox.id, "3000", "--name", "dev", "--token", "tok").strip()
    assert url == f"http://3000-{sandbox.id}-tok.localhost:{server.url.rpartition(':')[2]}/"
    run("expose", sandbox.id, "80", "--private", "--wake", "--token", "t2")
    rows = [line.split("\t") for line in run("ports", sandbox.id).splitlines()]
    assert [(row[0], row[1], row[2]) for row in rows] == [("80", "-", "private, wakes"), ("3000", "dev", "public")]
    assert rows[1][4] == url
    listed = json.loads(run("ports", sandbox.id, "--json"))
    assert [one["port"] for one in listed] == [80, 3000]
    assert run("open", sandbox.id, "3000").strip() == url
    assert "?skerry_link=" in run("open", sandbox.id, "80")
    assert f"http://9000-{sandbox.id}-" in run("open", sandbox.id, "9000")  # exposed on the way
    assert sandbox.is_port_exposed(9000)
    run("unexpose", sandbox.id, "3000")
    done = skerry("--url", server.url, "unexpose", sandbox.id, "3000")
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"is not exposed" in done.stderr


@pytest.mark.parametrize("command", ["open", "unexpose"])
def test_a_mistyped_name_makes_no_sandbox(server: Served, skerry: Skerry, command: str) -> None:
    done = skerry("--url", server.url, command, "mistyped", "3000")
    assert done.returncode == 1
    assert "mistyped" not in [info.id for info in Sandbox.list(url=server.url)]


def test_a_browser_is_opened_from_a_terminal_and_not_from_a_pipe(
    server: Served, sandbox: Sandbox, program: list[str], environment: dict[str, str], tmp_path: Path
) -> None:
    browser, note = tmp_path / "browser", tmp_path / "note"
    browser.write_text(f'#!/bin/sh\necho "$1" >{note}\n')
    browser.chmod(0o755)
    line = [*program, "--url", server.url, "open", sandbox.id, "3000"]
    settings = environment | {"BROWSER": str(browser)}
    piped = subprocess.run(line, capture_output=True, env=settings, timeout=60, check=True)
    assert not note.exists()
    subprocess.run(
        ["script", "-qec", " ".join(line), "/dev/null"], capture_output=True, env=settings, timeout=60, check=True
    )
    assert note.read_bytes() == piped.stdout


# -- forwarding --------------------------------------------------------------------------------------------------------


def test_a_megabyte_each_way_and_two_ports_at_once(reversing: Sandbox, forward: Forward) -> None:
    reversing.start_process("python3 -m http.server 8000 --bind 127.0.0.1")
    reversing.wait_for_port(8000, timeout=30)
    forwarding = forward(reversing.id, "0:7000", "0:8000")
    port, web = forwarding.port(), forwarding.port()
    data = os.urandom(1 << 20)
    assert exchange(port, data) == data[::-1]
    assert b"reverse.py" in exchange(web, b"GET / HTTP/1.0\r\n\r\n")
    assert forwarding.interrupt() == 130


def test_many_connections_at_once(reversing: Sandbox, forward: Forward) -> None:
    port = forward(reversing.id, "0:7000").port()
    pieces = [os.urandom(20_000) for _ in range(150)]
    with ThreadPoolExecutor(50) as pool:
        assert list(pool.map(lambda data: exchange(port, data), pieces)) == [data[::-1] for data in pieces]


def test_one_that_is_not_read_does_not_hold_up_the_others(reversing: Sandbox, forward: Forward) -> None:
    port = forward(reversing.id, "0:7000").port()
    with socket.create_connection(("127.0.0.1", port), timeout=60) as lazy:
        lazy.sendall(b"x" * (8 << 20))
        lazy.shutdown(socket.SHUT_WR)
        for _ in range(5):
            assert exchange(port, b"abc" * 100_000) == b"cba" * 100_000
        left = 8 << 20
        while piece := lazy.recv(1 << 18):
            left -= len(piece)
        assert left == 0


def test_a_break_on_one_side_is_a_break_on_the_other(reversing: Sandbox, forward: Forward) -> None:
    port = forward(reversing.id, "0:7000").port()
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    connection.sendall(b"half a question")
    established = "ss -Htn state established '( sport = :7000 )' | wc -l"
    while reversing.exec(established, session=None).stdout.strip() != "1":
        time.sleep(0.02)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    while reversing.exec(established, session=None).stdout.strip() != "0":
        time.sleep(0.02)

    with socket.create_connection(("127.0.0.1", port), timeout=60) as other:
        other.sendall(b"a question")
        while reversing.exec(established, session=None).stdout.strip() != "1":
            time.sleep(0.02)
        reversing.stop()
        with contextlib.suppress(ConnectionResetError):
            assert other.recv(1) == b""


def test_nobody_listening_inside_is_said_and_the_connection_broken(sandbox: Sandbox, forward: Forward) -> None:
    forwarding = forward(sandbox.id, "0:7999")
    port = forwarding.port()
    for _ in range(2):
        with pytest.raises(ConnectionResetError), socket.create_connection(("127.0.0.1", port), 60) as connection:
            connection.recv(1)
    assert "Nothing listens on port 7999" in forwarding.complaint()


def test_forwarding_goes_on_after_the_server_was_started_again(
    server: Served, reversing: Sandbox, forward: Forward
) -> None:
    forwarding = forward(reversing.id, "0:7000")
    port = forwarding.port()
    assert exchange(port, b"before") == b"erofeb"
    server.stop()
    with pytest.raises(ConnectionResetError):
        exchange(port, b"lost")
    server.start()
    reversing.write_file("reverse.py", REVERSE)  # an ephemeral sandbox forgets its files
    reversing.start_process("python3 reverse.py")
    reversing.wait_for_port(7000, timeout=30)
    assert exchange(port, b"after") == b"retfa"


@pytest.mark.parametrize("pair", ["x:1", "1:0", "1:70000", "70000", "1:2:3", "", "-1:5"])
def test_what_is_no_pair_of_ports_is_refused(server: Served, skerry: Skerry, pair: str) -> None:
    assert skerry("--url", server.url, "forward", "demo", "--", pair).returncode == 2


def test_a_local_port_that_is_taken_is_said(sandbox: Sandbox, forward: Forward) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        forwarding = forward(sandbox.id, f"{taken.getsockname()[1]}:80")
        assert "Cannot listen on 127.0.0.1" in forwarding.complaint()
        assert forwarding.process.wait(30) == 1


# -- the other way -----------------------------------------------------------------------------------------------------


@pytest.fixture
def echo() -> Iterator[int]:
    """A server of this machine that answers with what it got, when it has all of it."""

    def handle(connection: socket.socket) -> None:
        with connection:
            data = b""
            while piece := connection.recv(1 << 18):
                data += piece
            connection.sendall(data)

    def accept() -> None:
        with contextlib.suppress(OSError), ThreadPoolExecutor(64) as pool:
            while True:
                pool.submit(handle, listener.accept()[0])

    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        thread = threading.Thread(target=accept)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


ASK = """
import hashlib, socket, sys, threading
from concurrent.futures import ThreadPoolExecutor

def ask(size):
    data = (b"%d" % size) * (size // 8)
    c = socket.create_connection(("127.0.0.1", 5432))
    def send():
        c.sendall(data)
        c.shutdown(1)
    threading.Thread(target=send).start()
    came = b""
    while piece := c.recv(1 << 16):
        came += piece
    return came == data

sizes = [8 << 20] + [10_000 + n for n in range(60)]
with ThreadPoolExecutor(30) as pool:
    print(all(pool.map(ask, sizes)), hashlib.sha256(b"done").hexdigest())
"""


def test_a_port_of_this_machine_appears_inside(sandbox: Sandbox, forward: Forward, echo: int) -> None:
    forwarding = forward(sandbox.id, "-R", f"5432:{echo}")
    assert forwarding.line() == f"Port 5432 in {sandbox.id} leads to 127.0.0.1:{echo} here.\n"
    sandbox.write_file("ask.py", ASK)
    done = sandbox.exec("python3 ask.py", timeout=60)
    assert done.stdout.split() == ["True", hashlib.sha256(b"done").hexdigest()], done.stderr
    assert forwarding.interrupt() == 130
    gone = sandbox.exec("until ! (exec 3<>/dev/tcp/127.0.0.1/5432) 2>/dev/null; do sleep 0.05; done", timeout=30)
    assert gone.exit_code == 0


def test_nobody_listening_here_is_said(sandbox: Sandbox, forward: Forward) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    forwarding = forward(sandbox.id, "-R", f"5432:{port}")
    forwarding.line()
    sandbox.exec("exec 3<>/dev/tcp/127.0.0.1/5432; cat <&3", timeout=30, session=None)
    assert f"Nothing listens on 127.0.0.1:{port} here" in forwarding.complaint()


def test_a_port_inside_that_is_taken_ends_it_and_so_does_the_sandbox(reversing: Sandbox, forward: Forward) -> None:
    taken = forward(reversing.id, "-R", "7000:1")
    assert "taken by a program in it" in taken.complaint()
    assert taken.process.wait(30) == 1
    forwarding = forward(reversing.id, "-R", "7001:1")
    forwarding.line()
    reversing.stop()
    assert f"Sandbox '{reversing.id}' ended" in forwarding.complaint()
    assert forwarding.process.wait(30) == 1
