"""The server is killed while it takes snapshots, forks, rolls back, deletes, backs up, restores, freezes, hibernates
and wakes. What was acknowledged is intact, what was not is whole or gone, and nothing is left that nobody owns.

``make soak`` sets SKERRY_SOAK=1 for the full count of 200 kills.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.disks import devices_of, names, opened
from tests.servers import Server, mounts_below, vanished

SOAK = bool(os.environ.get("SKERRY_SOAK"))
KILLS = 100 if SOAK else 10  # of each kind
FILES = 40

pytestmark = pytest.mark.timeout(3600 if SOAK else 300)


class Load:
    """Two clients, each with a sandbox whose files all hold one word, which changes; they know what it was when."""

    def __init__(self) -> None:
        self.snapshots: dict[str, str] = {}
        self.sandboxes: dict[str, set[str]] = {}
        """Which words a sandbox may hold: one, or two when a rollback or a change was not acknowledged."""
        self.uncertain: set[str] = set()
        """Snapshots whose deletion was asked for."""
        self.backups: dict[str, str] = {}
        self.failures: list[Exception] = []
        self._count = 0

    def run(self, url: str, seconds: float, kill: Callable[[], None]) -> None:
        threads = [threading.Thread(target=self._work, args=(url, f"work-{n}")) for n in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(seconds)
        kill()
        for thread in threads:
            thread.join()
        if self.failures:
            raise self.failures[0]

    def _work(self, url: str, id: str) -> None:
        with httpx.Client(base_url=url, timeout=60) as client:
            try:
                while True:
                    self._step(client, id)
            except httpx.TransportError:
                return
            except Exception as error:  # noqa: BLE001 - raised by the thread that waits
                self.failures.append(error)

    def _step(self, client: httpx.Client, id: str) -> None:
        layers = (self._change, self._snapshot, self._snapshot, self._fork, self._back, self._delete)
        step = random.choice((*layers, self._backup, self._restore, self._freeze, self._hibernate))
        step(client, id)

    def _change(self, client: httpx.Client, id: str) -> None:
        self._count += 1
        word = f"{id}-{self._count}-{random.randbytes(3).hex()}"
        self.sandboxes[id] = self.sandboxes.get(id, set()) | {word}
        # One name for all the files, swapped in one step: a kill in the middle leaves one word or the other.
        command = (
            f"set -e; rm -rf new; mkdir new; for i in $(seq {FILES}); do echo {word} >new/$i; done; mkdir -p at; "
            f"mv -T new at/{word}; ln -sfn at/{word} next; mv -T next now; "
            f"find at -mindepth 1 -maxdepth 1 ! -name {word} -exec rm -rf {{}} +"
        )
        answer = client.post(f"/v1/sandboxes/{id}/exec", json={"command": command, "session": None})
        assert answer.json()["exitCode"] == 0, answer.text
        self.sandboxes[id] = {word}

    def _snapshot(self, client: httpx.Client, id: str) -> None:
        if len(self.sandboxes.get(id, ())) != 1:
            return self._change(client, id)
        (word,) = self.sandboxes[id]
        answer = client.post(f"/v1/sandboxes/{id}/snapshots")
        assert answer.status_code == 201, answer.text
        self.snapshots[answer.json()["id"]] = word

    def _fork(self, client: httpx.Client, id: str) -> None:
        if len(self.sandboxes.get(id, ())) != 1:
            return self._change(client, id)
        (word,) = self.sandboxes[id]
        answer = client.post(f"/v1/sandboxes/{id}/fork", json={"count": 3})
        assert answer.status_code == 201, answer.text
        for info in answer.json()["sandboxes"]:
            self.sandboxes[info["id"]] = {word}

    def _back(self, client: httpx.Client, id: str) -> None:
        known = self._known()
        if not known or id not in self.sandboxes:
            return
        chosen, word = random.choice(known)
        self.sandboxes[id] |= {word}
        answer = client.post(f"/v1/sandboxes/{id}/rollback", json={"snapshot": chosen})
        if answer.status_code == 404:
            assert chosen in self.uncertain  # by the other client, just now
        else:
            assert answer.status_code == 200, answer.text
            self.sandboxes[id] = {word}

    def _delete(self, client: httpx.Client, id: str) -> None:
        known = self._known()
        if len(known) < 3:
            return
        doomed, _ = random.choice(known)
        self.uncertain.add(doomed)
        answer = client.delete(f"/v1/snapshots/{doomed}", params={"force": "true"})
        assert answer.status_code in (200, 404), answer.text
        self.snapshots.pop(doomed, None)

    def _backup(self, client: httpx.Client, id: str) -> None:
        if len(self.sandboxes.get(id, ())) != 1:
            return self._change(client, id)
        (word,) = self.sandboxes[id]
        answer = client.post(f"/v1/sandboxes/{id}/backup")
        assert answer.status_code == 200, answer.text
        self.backups[answer.json()["backup"]["id"]] = word

    def _restore(self, client: httpx.Client, id: str) -> None:
        if not self.backups or id not in self.sandboxes:
            return
        backup, word = random.choice(list(self.backups.items()))
        self.sandboxes[id] |= {word}
        answer = client.post(f"/v1/sandboxes/{id}/restore", json={"backup": backup})
        assert answer.status_code == 200, answer.text
        self.sandboxes[id] = {word}

    def _freeze(self, client: httpx.Client, id: str) -> None:
        self._sleep(client, id, {"stage": "freeze"})

    def _hibernate(self, client: httpx.Client, id: str) -> None:
        self._sleep(client, id, {"stage": "hibernate", "grace": 1})

    def _sleep(self, client: httpx.Client, id: str, how: dict[str, object]) -> None:
        if id in self.sandboxes:
            assert client.post(f"/v1/sandboxes/{id}/sleep", json=how).status_code == 200
            assert client.post(f"/v1/sandboxes/{id}/wake").status_code == 200

    def _known(self) -> list[tuple[str, str]]:
        """As it is just now: the other client changes it too."""
        return [(id, word) for id, word in list(self.snapshots.items()) if id not in self.uncertain]

    # -- afterwards ----------------------------------------------------------------------------------------------------

    def check(self, client: httpx.Client, home: Path) -> None:
        listed = {one["id"]: one for one in client.get("/v1/snapshots").json()["snapshots"]}
        sandboxes = {one["id"] for one in client.get("/v1/sandboxes", params={"limit": 100}).json()["sandboxes"]}
        assert set(self.snapshots) - self.uncertain <= set(listed)
        for id in sandboxes & set(self.sandboxes):
            # A restore that was cut off is put right when its sandbox next starts.
            assert client.post(f"/v1/sandboxes/{id}/exec", json={"command": "true"}).status_code == 200
        self._check_backups(client, home)
        self.snapshots = {id: word for id, word in self.snapshots.items() if id in listed}
        assert set(names(home, "snapshots")) == set(listed)
        assert set(names(home, "sandboxes")) <= sandboxes
        found: dict[str, set[str]] = {}
        with opened(home) as disk:
            for snapshot in listed:
                words = _words(disk / "snapshots" / snapshot)
                assert len(words) == 1, f"snapshot {snapshot} is not whole: {words}"
                if snapshot in self.snapshots:
                    assert words == {self.snapshots[snapshot]}
            for sandbox in sandboxes:
                words = _words(disk / "sandboxes" / sandbox)
                assert words <= self.sandboxes.get(sandbox, words), sandbox
                assert len(words) <= 1
                found[sandbox] = words
        self.sandboxes = {sandbox: words for sandbox, words in found.items() if words}

    def _check_backups(self, client: httpx.Client, home: Path) -> None:
        until = time.monotonic() + 60
        while any((home / "backups").glob("*.json")) and time.monotonic() < until:
            time.sleep(0.05)  # what was cut off is swept soon after the start
        listed = {one["id"] for one in client.get("/v1/backups").json()["backups"]}
        assert set(self.backups) <= listed
        place = home / "buckets" / "default" / "backups"
        assert {path.name for path in place.glob("*")} == listed
        for id in sorted(listed)[:-3]:
            assert client.delete(f"/v1/backups/{id}").status_code == 200
            self.backups.pop(id, None)

    def clear(self, client: httpx.Client) -> None:
        """Keep what is there small: all forks, and all snapshots but the newest."""
        for one in client.get("/v1/sandboxes", params={"limit": 100}).json()["sandboxes"]:
            if not one["id"].startswith("work-") or len(one["id"]) > 6:
                assert client.delete(f"/v1/sandboxes/{one['id']}").status_code == 200
                self.sandboxes.pop(one["id"], None)
        for one in client.get("/v1/snapshots").json()["snapshots"][:-4]:
            assert client.delete(f"/v1/snapshots/{one['id']}", params={"force": "true"}).status_code == 200
            self.snapshots.pop(one["id"], None)
        self.uncertain.clear()


def _words(volume: Path) -> set[str]:
    """The words in the files of a volume; complete, or this fails."""
    workspace = volume / "root" / "upper" / "workspace"
    if not os.path.lexists(workspace / "now"):
        return set()
    place = workspace / os.readlink(workspace / "now")
    found = [(place / str(number)).read_text().strip() for number in range(1, FILES + 1)]
    return set(found)


@pytest.mark.parametrize("kind", ["instant", "copy"])
def test_nothing_acknowledged_is_lost_and_nothing_is_left_when_the_server_is_killed(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "copy":
        monkeypatch.setenv("SKERRY_POOL_SIZE", "0")
    home, load = tmp_path / "home", Load()
    server = Server(home)
    try:
        for _ in range(KILLS):
            server.start()
            with server.client() as client:
                load.check(client, home)
                load.clear(client)
            family = server.family()
            load.run(server.url, random.uniform(0.05, 1.2), server.kill)
            assert vanished(family) == set()
        server.start()
        with server.client() as client:
            load.check(client, home)
            assert load.snapshots, "nothing was ever acknowledged"
            assert load.backups, "no backup was ever acknowledged"
    finally:
        if server.process.poll() is None:
            server.stop()
    assert names(home, "trash") == []
    assert mounts_below(home) == []
    assert devices_of(home) == []
