"""The hot paths of previews and terminals, beside the same server, or shell, reached without Skerry."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

from tests.bench.paths import expect
from tests.bench.report import Row
from tests.bench.samples import Contestant, Samples, milliseconds, take_turns
from tests.bench.stand import Stand

ORIGIN = Path(__file__).with_name("origin.py")
PYTHON = "/usr/bin/python3"
PORTS = {"page": 3000, "large": 3001}
LARGE = 1 << 30
BLOCK = 1 << 20
CONNECTIONS = 16
LOAD_SECONDS = 3
PATIENCE = 30.0
LINE = 40
"""Keystrokes before the line is cleared, so that it never wraps."""


@dataclass(frozen=True)
class Door:
    """Where a server is reached."""

    port: int
    host: str

    def connect(self) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection


def page(stand: Stand) -> list[Row]:
    with _doors(stand, "page") as (preview, direct), ExitStack() as stack:

        def getting(door: Door) -> Callable[[], float]:
            kept = HTTPConnection("127.0.0.1", door.port, timeout=PATIENCE)
            stack.callback(kept.close)

            def get() -> None:
                kept.request("GET", "/", headers={"Host": door.host})
                answer = kept.getresponse()
                text = answer.read()
                expect(answer.status == 200 and b"a small page" in text, f"The page was answered with {answer.status}.")

            get()
            return lambda: milliseconds(get)

        rival = Contestant("direct", getting(direct), stand.counts.small)
        samples = take_turns(Contestant("Skerry", getting(preview), stand.counts.small), rival)
    goals = [_over(samples, rival, 1.5)]
    path, reach = "GET a small page through a preview, keep-alive", "p50 ≤ 1.5 ms over direct"
    return [Row("preview-page", path, reach, samples, rivals=[rival], goals=goals)]


def load(stand: Stand) -> list[Row]:
    """The server has one core for itself; the origin, and whoever asks, share the others."""
    cores = sorted(os.sched_getaffinity(0))
    with _doors(stand, "page") as (preview, direct), _pinned(stand.server.process.pid, cores[-1]):
        samples = Samples([_wrk(preview, cores[:-1] or cores) for _ in range(stand.counts.loads)])
        rival = Contestant("direct", values=[_wrk(direct, cores[:-1] or cores) for _ in range(stand.counts.loads)])
    path = f"the same by wrk on {CONNECTIONS} connections, the server on one core"
    return [Row("preview-load", path, "≥ 1,500 /s", samples, "/s", [rival], [samples.p50 >= 1500])]


def download(stand: Stand) -> list[Row]:
    growth: list[float] = []
    buffer = bytearray(BLOCK)

    def fetching(door: Door) -> float:
        with door.connect() as connection:
            start = time.perf_counter()
            connection.sendall(f"GET / HTTP/1.1\r\nHost: {door.host}\r\n\r\n".encode())
            _, rest = _head(connection, 200)
            size = len(rest)
            while size < LARGE and (count := connection.recv_into(buffer)):
                size += count
            expect(size == LARGE, "Bytes are missing.")
            return (time.perf_counter() - start) * 1000

    def ours() -> float:
        with _growth(stand.server.process.pid, growth):
            return fetching(preview)

    with _doors(stand, "large") as (preview, direct):
        ours()
        growth.clear()
        rival = Contestant("direct", lambda: fetching(direct), stand.counts.large)
        samples = take_turns(Contestant("Skerry", ours, stand.counts.large), rival)
    peak = Samples(growth)
    share = rival.samples.p50 / samples.p50 if rival.samples else None
    goals = [None if share is None else share >= 0.4]
    path, reach = "1 GB down through a preview", "40 % of direct: ≥ 0.4x"
    flat = "how much the server grows meanwhile"
    return [
        Row("preview-download", path, reach, samples, rivals=[rival], goals=goals),
        Row("preview-memory", flat, "≤ 16 MB", peak, "MB", goals=[peak.p95 <= 16]),
    ]


def websocket(stand: Stand) -> list[Row]:
    with _doors(stand, "page") as (preview, direct), ExitStack() as stack:

        def echoing(door: Door) -> Callable[[], float]:
            connection = stack.enter_context(door.connect())
            key = "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13"
            upgrade = f"Host: {door.host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n{key}"
            connection.sendall(f"GET / HTTP/1.1\r\n{upgrade}\r\n\r\n".encode())
            _head(connection, 101)

            def echo() -> None:
                connection.sendall(b"\x82\x85\0\0\0\0hello")  # five bytes, masked with zeros
                expect(_exactly(connection, 7) == b"\x82\x05hello", "Another echo came.")

            echo()
            return lambda: milliseconds(echo)

        rival = Contestant("direct", echoing(direct), stand.counts.small)
        samples = take_turns(Contestant("Skerry", echoing(preview), stand.counts.small), rival)
    path, reach = "WebSocket echo through a preview", "p50 ≤ 1 ms over direct"
    return [Row("preview-websocket", path, reach, samples, rivals=[rival], goals=[_over(samples, rival, 1)])]


def keystroke(stand: Stand) -> list[Row]:
    with stand.sandbox.terminal() as terminal, _shell() as (write, read):
        rival = Contestant("a terminal of this machine", _typing(write, read), stand.counts.small)
        ours = Contestant("Skerry", _typing(terminal.send, terminal.recv), stand.counts.small)
        samples = take_turns(ours, rival)
    path = "keystroke to echo in a terminal"
    return [Row("terminal", path, "p50 ≤ 3 ms", samples, rivals=[rival], goals=[samples.p50 <= 3])]


def _typing(write: Callable[[bytes], object], read: Callable[[], bytes]) -> Callable[[], float]:
    """One keystroke at a prompt of bash, until it shows."""

    def until(text: bytes) -> None:
        seen = b""
        while text not in seen:
            data = read()
            expect(data != b"", "The shell ended.")
            seen += data

    typed = 0

    def stroke() -> float:
        nonlocal typed
        if typed == LINE:
            # The whole line, Enter included: what it shows ends with the next prompt.
            typed = 0
            write(b"\x15\r")
            until(b"READY>")
        typed += 1
        start = time.perf_counter()
        write(b"x")
        until(b"x")
        return (time.perf_counter() - start) * 1000

    write(b"PS1=REA''DY\\>; PS0=; PROMPT_COMMAND=\r")
    until(b"READY>")
    stroke()
    return stroke


@contextmanager
def _shell() -> Iterator[tuple[Callable[[bytes], object], Callable[[], bytes]]]:
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    line = ["setsid", "--ctty", "bash", "--norc"]
    with subprocess.Popen(line, stdin=theirs, stdout=theirs, stderr=theirs) as shell:
        os.close(theirs)
        try:
            yield lambda data: os.write(ours, data), lambda: os.read(ours, 65536)
        finally:
            shell.kill()
            os.close(ours)


@contextmanager
def _doors(stand: Stand, kind: str) -> Iterator[tuple[Door, Door]]:
    """The same server twice: in the sandbox behind its preview, and on this machine's loopback."""
    sandbox, port = stand.sandbox, PORTS[kind]
    sandbox.write_file("/tmp/origin.py", ORIGIN.read_text())
    inside = sandbox.start_process(f"exec {PYTHON} -I /tmp/origin.py {kind} {port}")
    with subprocess.Popen([PYTHON, "-I", ORIGIN, kind, "0"], stdout=subprocess.PIPE, text=True) as outside:
        try:
            inside.wait_for_port(port, timeout=PATIENCE)
            url = sandbox.expose_port(port).url
            assert url is not None
            assert outside.stdout is not None
            said = outside.stdout.readline()
            expect(said != "", "The server to compare with did not start.")
            parts = urlsplit(url)
            assert parts.port is not None
            yield Door(parts.port, parts.netloc), Door(int(said), f"127.0.0.1:{said.strip()}")
        finally:
            outside.kill()
            inside.kill()
            inside.wait_for_exit(timeout=PATIENCE)


def _wrk(door: Door, cores: list[int]) -> float:
    """Requests per second."""
    url = f"http://127.0.0.1:{door.port}/"
    options = ["-t1", f"-c{CONNECTIONS}", f"-d{LOAD_SECONDS}s", "-H", f"Host: {door.host}"]
    line = ["taskset", "-c", ",".join(map(str, cores)), "wrk", *options, url]
    said = subprocess.run(line, check=True, capture_output=True, text=True, timeout=PATIENCE + LOAD_SECONDS).stdout
    rate = re.search(r"Requests/sec:\s+([0-9.]+)", said)
    expect(rate is not None and "Non-2xx" not in said and "Socket errors" not in said, "Not every page was answered.")
    assert rate is not None
    return float(rate[1])


@contextmanager
def _pinned(pid: int, core: int) -> Iterator[None]:
    """A process on one core, with all its threads but none of its children."""
    before = os.sched_getaffinity(pid)
    _pin(pid, {core})
    try:
        yield
    finally:
        _pin(pid, before)


def _pin(pid: int, cores: set[int]) -> None:
    for thread in os.listdir(f"/proc/{pid}/task"):
        try:
            os.sched_setaffinity(int(thread), cores)
        except ProcessLookupError:
            continue


@contextmanager
def _growth(pid: int, megabytes: list[float]) -> Iterator[None]:
    """By how much the process's memory was at most above what it was before."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # forgets the peak so far
    before = _memory(pid, "VmRSS")
    yield
    megabytes.append(max(0.0, _memory(pid, "VmHWM") - before))


def _memory(pid: int, field: str) -> float:
    found = re.search(rf"{field}:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found
    return int(found[1]) * 1024 / 1e6


def _head(connection: socket.socket, status: int) -> tuple[bytes, bytes]:
    """A response's head, and what came after it."""
    heard = b""
    while b"\r\n\r\n" not in heard:
        data = connection.recv(65536)
        expect(data != b"", "The connection ended.")
        heard += data
    head, _, rest = heard.partition(b"\r\n\r\n")
    expect(head.startswith(b"HTTP/1.1 %d" % status), f"The answer was {head.splitlines()[0].decode('latin-1')}.")
    return head, rest


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (more := connection.recv(size - len(data))):
        data += more
    return data


def _over(samples: Samples, rival: Contestant, most: float) -> bool | None:
    return None if rival.samples is None else samples.p50 - rival.samples.p50 <= most


PATHS: dict[str, Callable[[Stand], list[Row]]] = {
    "preview-page": page,
    "preview-load": load,
    "preview-download": download,
    "preview-websocket": websocket,
    "terminal": keystroke,
}
