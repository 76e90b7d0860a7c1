"""The server is killed in the middle: what was acknowledged is there, and of the rest nothing."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from skerry.storage.buckets import Buckets
from tests.s3 import bucket_table
from tests.servers import Server
from tests.storage.trees import LOOK

SANDBOX = "/v1/sandboxes/demo"


@pytest.fixture
def home(tmp_path: Path, bucket_kind: str, request: pytest.FixtureRequest) -> Path:
    home = tmp_path / "home"
    home.mkdir()
    bucket_table(bucket_kind, tmp_path, request).rename(home / "buckets.toml")
    return home


@pytest.fixture
def server(home: Path) -> Iterator[Server]:
    server = Server(home).start()
    yield server
    if server.process.poll() is None:
        server.stop()


def sh(server: Server, command: str, **options: Any) -> str:
    with server.client() as client:
        answer = client.post(f"{SANDBOX}/exec", json={"command": command, **options}).raise_for_status().json()
    assert answer["exitCode"] == 0, answer["stderr"]
    return str(answer["stdout"])


def digest(server: Server) -> str:
    return sh(server, "/run/skerry/bin/python3", args=["-c", LOOK, "/workspace", "--digest"], session=None)


def backup(server: Server) -> str:
    with server.client() as client:
        answer = client.post(f"{SANDBOX}/backup", json={"bucket": "test"})
        return str(answer.raise_for_status().json()["backup"]["id"])


def restore(server: Server, id: str) -> None:
    with server.client() as client:
        assert client.post(f"{SANDBOX}/restore", json={"backup": id}).raise_for_status().json()["restored"] is True


def killed_during(server: Server, path: str, body: dict[str, Any], moment: Callable[[], None]) -> bool:
    """Ask for something and kill the server at some moment of it; whether it had been acknowledged by then."""
    acknowledged = threading.Event()

    def ask() -> None:
        try:
            with server.client() as client:
                if client.post(path, json=body).is_success:
                    acknowledged.set()
        except httpx.HTTPError:
            pass

    asking = threading.Thread(target=ask)
    asking.start()
    moment()
    server.kill()
    asking.join()
    return acknowledged.is_set()


def keys(home: Path) -> set[str]:
    async def listed() -> set[str]:
        return {item.key.split("/")[1] async for item in Buckets(home).open("test").list()}

    return asyncio.run(listed())


def holds_only(home: Path, ids: set[str]) -> bool:
    return keys(home) == ids


def eventually(condition: Callable[[], bool]) -> bool:
    for _ in range(400):
        if condition():
            return True
        time.sleep(0.05)
    return False


def root(server: Server) -> Path:
    """Of the sandbox that runs, as it is seen from outside."""
    roots = [Path(f"/proc/{pid}/root") for pid in server.family()]
    return next(root for root in roots if os.path.lexists(root / "run/skerry/bin/python3"))


def left(server: Server) -> list[Path]:
    staged = [path for place in ("", "usr", "workspace") for path in (root(server) / place).glob(".skerry-restore-*")]
    return [*server.home.glob("restores/*"), *staged]


def test_a_server_killed_in_mid_backup_leaves_only_what_it_acknowledged(server: Server, home: Path) -> None:
    sh(server, "head -c 60000000 /dev/urandom >/workspace/large; echo 1 >/workspace/small")
    kept = {backup(server)}
    before = digest(server)
    for round in range(4):
        moment = partial(time.sleep, random.Random(round).uniform(0.05, 0.8))
        acknowledged = killed_during(server, f"{SANDBOX}/backup", {"bucket": "test"}, moment)
        server.start()
        assert eventually(lambda: not list(home.glob("backups/*"))), "what was begun was not swept"
        with server.client() as client:
            listed = {one["id"] for one in client.get("/v1/backups").raise_for_status().json()["backups"]}
        # It may have been complete when the server was killed, but for the answer.
        assert kept <= listed
        assert len(listed - kept) in ((1,) if acknowledged else (0, 1))
        kept = listed
        assert eventually(partial(holds_only, home, kept)), "parts were left"
    sh(server, "rm /workspace/*")
    for id in kept:
        restore(server, id)
        assert digest(server) == before


def test_a_server_killed_while_a_restore_unpacks_leaves_the_old_content(server: Server) -> None:
    sh(server, "head -c 90000000 /dev/urandom >/workspace/large; echo 1 >/workspace/small")
    id, new = backup(server), digest(server)
    sh(server, "rm /workspace/*; echo old >/workspace/small")
    old = digest(server)
    place = root(server)

    def unpacking() -> None:
        assert eventually(lambda: any(place.glob(".skerry-restore-*/new/large")))

    assert not killed_during(server, f"{SANDBOX}/restore", {"backup": id}, unpacking)
    server.start()
    assert digest(server) == old
    assert left(server) == []
    with server.client() as client:
        kinds = [event["kind"] for event in client.get(f"{SANDBOX}/events").raise_for_status().json()["events"]]
    assert "restore_undone" in kinds
    restore(server, id)
    assert digest(server) == new


@pytest.mark.parametrize("bytes_of_log", [1, 20_000, 100_000])
def test_a_server_killed_while_entries_change_places_leaves_one_content_or_the_other(
    server: Server, bytes_of_log: int
) -> None:
    """The shell stands in /workspace, so its entries change places one by one."""
    sh(server, "cd /workspace; touch $(seq -f new%g 1500) $(seq -f both%g 500); mkdir d; echo new >d/f; chmod 750 .")
    id, new = backup(server), digest(server)
    sh(server, "cd /workspace; rm -rf new* d; touch $(seq -f old%g 500); echo old >both1; chmod 700 .")
    old = digest(server)
    place = root(server)

    def swapping() -> None:
        def far_enough() -> bool:
            return any(log.stat().st_size >= bytes_of_log for log in place.glob(".skerry-restore-*/log"))

        while not far_enough():
            assert server.process.poll() is None

    acknowledged = killed_during(server, f"{SANDBOX}/restore", {"backup": id}, swapping)
    server.start()
    found = digest(server)
    assert found == new if acknowledged else found in (old, new)
    if bytes_of_log < 100_000:
        assert found == old
    assert left(server) == []
    restore(server, id)
    assert digest(server) == new
