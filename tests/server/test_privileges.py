"""What the server's process and all that it starts may still do."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from skerry.providers.local.turns import NICE
from skerry.server.privileges import KEPT
from tests.providers.users import USER, needs_newuidmap, needs_root, place_of, run_as_user
from tests.servers import Server

MASK = sum(1 << bit for bit in KEPT.values())


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Server]:
    tmp_path.chmod(0o711)
    before = os.getpriority(os.PRIO_PROCESS, 0)
    os.setpriority(os.PRIO_PROCESS, 0, 0)  # the tests themselves may run behind others
    try:
        server = Server(tmp_path / "home").start()
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, before)
    yield server
    server.stop()


def states(pid: int) -> list[dict[str, str]]:
    """What is said of each thread."""
    found = []
    for thread in os.listdir(f"/proc/{pid}/task"):
        text = Path(f"/proc/{pid}/task/{thread}/status").read_text()
        found.append(dict(re.findall(r"^(\w+):\t(\S+)", text, re.MULTILINE)))
    return found


@needs_root
def test_no_thread_of_the_server_and_nothing_it_starts_has_more_than_it_needs(running: Server) -> None:
    with running.client() as client:
        body = {"command": "cat /proc/self/status", "session": None}
        inside = client.post("/v1/sandboxes/demo/exec", json=body).json()["stdout"]
        assert client.post("/v1/sandboxes/demo/code", json={"code": "1"}).status_code == 200
        outside = [pid for pid in running.family() if _uid(pid) == 0]
        assert len(outside) >= 1  # the launcher; the seed comes later
        for pid in (running.process.pid, *outside):
            for state in states(pid):
                assert int(state["CapEff"], 16) & ~MASK == 0
                assert int(state["CapPrm"], 16) & ~MASK == 0
                assert int(state["CapBnd"], 16) & ~MASK == 0
                assert (state["CapInh"], state["CapAmb"]) == ("0" * 16, "0" * 16)
                assert state["NoNewPrivs"] == "1"
    assert len(states(running.process.pid)) > 1
    # A user namespace begins with a set of its own.
    assert "CapBnd:\t00000000800405fb" in inside


@needs_root
def test_the_event_loop_comes_first_and_nothing_else_with_it(running: Server) -> None:
    with running.client() as client:
        said = client.post("/v1/sandboxes/demo/exec", json={"command": "nice"}).json()["stdout"]
    assert said == "0\n"
    pid = running.process.pid
    places = {thread: os.getpriority(os.PRIO_PROCESS, int(thread)) for thread in os.listdir(f"/proc/{pid}/task")}
    assert places.pop(str(pid)) == NICE
    assert set(places.values()) == {0}
    assert {os.getpriority(os.PRIO_PROCESS, process) for process in running.family()} == {0}


@needs_root
def test_a_server_keeps_the_place_it_was_given(tmp_path: Path) -> None:
    tmp_path.chmod(0o711)
    before = os.getpriority(os.PRIO_PROCESS, 0)
    os.setpriority(os.PRIO_PROCESS, 0, 5)
    try:
        server = Server(tmp_path / "home").start()
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, before)
    try:
        assert {os.getpriority(os.PRIO_PROCESS, process) for process in (server.process.pid, *server.family())} == {5}
    finally:
        server.stop()


def _uid(pid: int) -> int:
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return -1


@needs_root
@pytest.mark.parametrize("pool", [256 << 20, 0])
def test_nothing_that_was_given_up_is_missed(tmp_path: Path, pool: int) -> None:
    tmp_path.chmod(0o711)
    server = Server(tmp_path / "home", pool_size=pool).start()

    try:
        _live(server)
    finally:
        server.stop()


def _live(server: Server) -> None:
    """Use what takes rights: ids, layers, namespaces, snapshots, freezing, copies."""

    def ask(path: str, **body: object) -> dict[str, object]:
        done = client.post(f"/v1/sandboxes/demo{path}", json=body)
        assert done.status_code < 300, done.text
        found: dict[str, object] = done.json()
        return found

    with server.client() as client:
        made = ask("/exec", command="useradd -m bob && su bob -c 'id -un' && echo x >/usr/bin/x && rm /usr/bin/less")
        assert made["stdout"] == "bob\n", made
        ask("/sessions", id="alone")
        assert ask("/exec", command="id -u", session="alone")["stdout"] == "0\n"
        assert ask("/code", code="import pandas; 6 * 7")["results"]
        ask("/snapshots", name="before")
        ask("/exec", command="rm -r /usr/bin/x /home/bob; mkfifo /tmp/f")
        ask("/fork", ids=["copy"])
        ask("/rollback", snapshot="before")
        assert ask("/exec", command="su bob -c 'cat /usr/bin/x'; ls /usr/bin/less")["stdout"] == "x\n"
        ask("/sleep", stage="freeze")
        ask("/wake")
        ask("/sleep", stage="hibernate")
        assert ask("/exec", command="cat /usr/bin/x")["stdout"] == "x\n"
        for id in ("demo", "copy"):
            assert client.delete(f"/v1/sandboxes/{id}").status_code == 200


def test_a_crash_of_the_server_leaves_no_core(running: Server) -> None:
    limits = Path(f"/proc/{running.process.pid}/limits").read_text()
    found = re.search(r"Max core file size +(\S+) +(\S+)", limits)
    assert found
    assert set(found.groups()) <= {"0", "1"}


_ORDINARY = """
import asyncio, json, re, sys
from pathlib import Path
from skerry.server import privileges
from skerry.control.open import open_registry
from skerry.settings import Settings
from skerry.models import CreateSandbox, ExecRequest
async def main():
    privileges.give_up()
    registry = await open_registry(Settings(home=Path(sys.argv[1])))
    await registry.create(CreateSandbox(id="x"))
    async with registry.use("x") as runtime:
        done = await runtime.exec(ExecRequest(command="id -u; cat /proc/self/uid_map"))
    await registry.close()
    status = Path("/proc/self/status").read_text()
    print(json.dumps({"out": done.stdout, "nnp": re.search("NoNewPrivs:.([01])", status)[1]}))
asyncio.run(main())
"""


@needs_root
@pytest.mark.parametrize("subids", [False, pytest.param(True, marks=needs_newuidmap)])
def test_an_ordinary_users_server_gives_up_setuid_programs_unless_it_needs_one(subids: bool) -> None:
    with place_of(USER) as place:
        found = json.loads(run_as_user(_ORDINARY, place / "home", subids=subids))
    assert found["out"].startswith("0\n")
    assert found["nnp"] == ("0" if subids else "1")
