"""Things break: the server is killed, the launcher is killed, clients vanish. Nothing that was acknowledged is lost,
nothing is left behind.

``make soak`` sets SKERRY_SOAK=1 for the full counts: 200 random kills, 1,000 create/destroy cycles.
"""

from __future__ import annotations

import os
import random
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.disks import names
from tests.providers.users import needs_root, needs_watching
from tests.servers import Server, mounts_below, vanished

SOAK = bool(os.environ.get("SKERRY_SOAK"))
KILLS = 200 if SOAK else 6
CYCLES = 1000 if SOAK else 40

pytestmark = pytest.mark.timeout(3600 if SOAK else 300)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path / "home").start()
    yield server
    if server.process.poll() is None:
        server.stop()


def run(client: httpx.Client, id: str, command: str, **options: object) -> dict[str, object]:
    answer = client.post(f"/v1/sandboxes/{id}/exec", json={"command": command, **options})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


class Load:
    """Clients that write, run and create until the server goes away, and remember what was acknowledged."""

    def __init__(self, url: str, round: int) -> None:
        self.written: dict[tuple[str, str], str] = {}
        self.made: set[str] = set()
        self.doomed: set[str] = set()
        self._url = url
        self._round = round
        self._threads = [
            threading.Thread(target=target, args=(n,))
            for target in (self._write, self._exec, self._create)
            for n in range(2)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _until_gone(self, step: object) -> None:
        with httpx.Client(base_url=self._url, timeout=60) as client:
            for count in range(100_000):
                try:
                    step(client, count)  # type: ignore[operator]
                except httpx.TransportError:
                    return

    def _write(self, n: int) -> None:
        def step(client: httpx.Client, count: int) -> None:
            name = f"r{self._round}-{n}-{count}"
            content = name * random.randint(1, 5000)
            answer = client.put(f"/v1/sandboxes/writes-{n}/files", params={"path": name}, content=content)
            if answer.status_code == 200:
                self.written[f"writes-{n}", name] = content

        self._until_gone(step)

    def _exec(self, n: int) -> None:
        def step(client: httpx.Client, count: int) -> None:
            name = f"e{self._round}-{n}-{count}"
            command = f"sleep 300 & setsid sleep 300 & echo {name} >{name}; sleep 0.01"
            answer = client.post(f"/v1/sandboxes/execs-{n}/exec", json={"command": command})
            if answer.status_code == 200:
                self.written[f"execs-{n}", name] = f"{name}\n"

        self._until_gone(step)

    def _create(self, n: int) -> None:
        def step(client: httpx.Client, count: int) -> None:
            id = f"c{self._round}-{n}-{count}"
            if client.post(f"/v1/sandboxes/{id}/exec", json={"command": "true"}).status_code == 200:
                self.made.add(id)
            if count % 3:
                self.doomed.add(id)
                if client.delete(f"/v1/sandboxes/{id}").status_code == 200:
                    self.made.discard(id)

        self._until_gone(step)


def test_killing_the_server_at_any_moment_loses_nothing_acknowledged_and_leaves_nothing(server: Server) -> None:
    for round in range(KILLS):
        load = Load(server.url, round)
        load.start()
        time.sleep(random.uniform(0.1, 1.0))
        family = server.family()
        server.kill()
        load.join()
        assert vanished(family) == set(), "processes survived the server"
        assert mounts_below(server.home) == []
        server.start()
        with server.client() as client:
            for (id, name), content in load.written.items():
                answer = client.get(f"/v1/sandboxes/{id}/files/content", params={"path": name})
                assert answer.text == content, (id, name)
            for id in sorted(load.made):
                answer = client.get(f"/v1/sandboxes/{id}")
                if id in load.doomed and answer.status_code == 404:
                    continue  # its destruction had begun, and was finished
                info = answer.json()
                assert info["state"] == "hibernated", info
                assert "server ended unexpectedly" in info["lastStop"]
            _only_known_directories(server, client)
            for sandbox in _all(client):
                assert client.delete(f"/v1/sandboxes/{sandbox}").status_code == 200


def _all(client: httpx.Client) -> list[str]:
    found, cursor = [], None
    while True:
        page = client.get("/v1/sandboxes", params={"limit": 100, **({"cursor": cursor} if cursor else {})}).json()
        found += [sandbox["id"] for sandbox in page["sandboxes"]]
        cursor = page["nextCursor"]
        if cursor is None:
            return found


def _only_known_directories(server: Server, client: httpx.Client) -> None:
    kept = set(names(server.home, "sandboxes"))
    assert kept <= set(_all(client)), "directories without a sandbox"


def test_cycles_of_create_and_destroy_leak_nothing(server: Server) -> None:
    def measure() -> tuple[int, int, int]:
        # Destroyed files are deleted in the background; wait for that, not for a time.
        until = time.monotonic() + 60
        while names(server.home, "trash") and time.monotonic() < until:
            time.sleep(0.05)
        return server.descriptors(), len(server.family()), len(names(server.home, "sandboxes"))

    with server.client() as client:
        for n in range(5):
            _cycle(client, f"warm-up-{n}")
        before = measure()
        for n in range(CYCLES):
            _cycle(client, f"cycle-{n}")
        after = measure()
    assert after[0] <= before[0] + 2, "descriptors leaked"
    assert after[1:] == before[1:], "processes or directories leaked"
    assert names(server.home, "trash") == []
    assert mounts_below(server.home) == []
    server.stop()
    with sqlite3.connect(server.home / "skerry.db") as database:
        for table in ("sandboxes", "processes", "contexts", "exposures", "mounts", "workspaces", "snapshots"):
            assert database.execute(f"select count(*) from {table}").fetchone() == (0,), table
        told: dict[str, list[str]] = {}
        for id, kind in database.execute("select sandbox_id, kind from events order by id"):
            told.setdefault(id, []).append(kind)
    # What happened to each is kept for a while, and nothing else.
    cycles = [*(f"warm-up-{n}" for n in range(5)), *(f"cycle-{n}" for n in range(CYCLES))]
    assert told == {id: ["created", "started", "session_created", "destroyed"] for id in cycles}


def _cycle(client: httpx.Client, id: str) -> None:
    assert run(client, id, "echo hi; echo x >f; sleep 100 &")["stdout"] == "hi\n"
    assert client.post(f"/v1/sandboxes/{id}/sessions", json={"id": "s"}).status_code == 201
    assert client.post(f"/v1/sandboxes/{id}/processes", json={"command": "sleep 100"}).status_code == 201
    assert client.delete(f"/v1/sandboxes/{id}").status_code == 200


def test_a_client_killed_in_mid_stream_takes_its_command_with_it_and_nothing_else(server: Server) -> None:
    program = (
        "import httpx,sys\n"
        "with httpx.stream('POST', sys.argv[1], json={'command': 'yes flood'}, timeout=None) as answer:\n"
        "    for chunk in answer.iter_raw():\n"
        "        print(len(chunk), flush=True)\n"
    )
    url = f"{server.url}/v1/sandboxes/stream/exec/stream"
    reader = subprocess.Popen([sys.executable, "-c", program, url], stdout=subprocess.PIPE)
    assert reader.stdout is not None
    assert reader.stdout.readline()
    with server.client() as client:
        assert run(client, "stream", "pgrep -x yes", session=None)["exitCode"] == 0
        reader.kill()
        reader.wait()
        reader.stdout.close()
        until = time.monotonic() + 30
        while run(client, "stream", "pgrep -x yes", session=None)["exitCode"] == 0:
            assert time.monotonic() < until, "the command outlived its client"
        assert run(client, "stream", "echo usable")["stdout"] == "usable\n"


def test_a_client_that_disconnects_during_exec_cancels_the_command(server: Server) -> None:
    with server.client() as client:
        run(client, "gone", "true")
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/sandboxes/gone/exec", json={"command": "sleep 431"}, timeout=0.5)
        until = time.monotonic() + 30
        while run(client, "gone", "pgrep -f 'sleep 43[1]'", session=None)["exitCode"] == 0:
            assert time.monotonic() < until, "the command outlived its client"
        assert run(client, "gone", "echo usable")["stdout"] == "usable\n"


def test_background_processes_outlive_the_client_that_started_them(server: Server) -> None:
    with server.client() as client:
        client.post(
            "/v1/sandboxes/bg/processes", json={"command": "sleep 0.5; echo done >f; sleep 60", "processId": "p"}
        )
    with server.client() as client:
        until = time.monotonic() + 30
        while run(client, "bg", "cat f")["stdout"] != "done\n":
            assert time.monotonic() < until
        assert client.get("/v1/sandboxes/bg/processes/p").json()["status"] == "running"


def test_a_killed_launcher_is_replaced_and_the_loss_is_told(server: Server) -> None:
    with server.client() as client:
        run(client, "one", "echo kept >f")
        launcher = [pid for pid in server.family() if b"launcher_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert len(launcher) == 1
        family = server.family()
        os.kill(launcher[0], 9)
        assert vanished(family) == set()
        assert run(client, "one", "cat f")["stdout"] == "kept\n"
        info = client.get("/v1/sandboxes/one").json()
        assert (info["starts"], "unexpectedly" in info["lastStop"]) == (2, True)
    server.stop()


@needs_root
@needs_watching
def test_one_that_is_full_is_told_so_by_the_next_server_and_keeps_what_it_has(server: Server) -> None:
    write = "head -c 64M /dev/zero >big; stat -c %s kept"
    with server.client() as client:
        client.post("/v1/sandboxes", json={"id": "full", "limits": {"disk": "24M"}})
        run(client, "full", "head -c 4M /dev/zero >kept; sync kept")
        assert "No space left" in str(run(client, "full", write)["stderr"])
        client.post("/v1/sandboxes/full/processes", json={"command": "while :; do echo x >>big; done"})
        family = server.family()
    server.kill()
    assert vanished(family) == set()
    server.start()
    with server.client() as client:
        result = run(client, "full", write)
        assert ("No space left" in str(result["stderr"]), result["stdout"]) == (True, f"{4 << 20}\n")
        assert run(client, "full", "rm big; head -c 8M /dev/zero >big")["exitCode"] == 0
    server.stop()


def test_a_full_disk_is_an_error_for_the_writer_and_nothing_else(server: Server) -> None:
    with server.client() as client:
        # /dev/shm inside is a small file system of its own.
        result = run(client, "full", "head -c 200000000 /dev/zero >/dev/shm/x")
        assert result["exitCode"] == 1
        assert "No space left" in str(result["stderr"])
        answer = client.put(
            "/v1/sandboxes/full/files", params={"path": "/dev/shm/y", "force": "true"}, content=b"x" * 100_000
        )
        assert (answer.status_code, answer.json()["error"]["code"]) == (507, "no_space")
        assert run(client, "full", "ls /dev/shm; echo usable")["stdout"] == "x\nusable\n"
