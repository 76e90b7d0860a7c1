"""Mounts where the server is an ordinary user, with subordinate ids and with none; and where it is killed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import httpx
import pytest

from tests.providers.users import USER, needs_newuidmap, needs_root, place_of, run_as_user
from tests.servers import Server, mounts_below, vanished

_PROGRAM = """
import asyncio, json, os, sys
from pathlib import Path
from skerry.control.open import open_registry
from skerry.models import CreateSession, ExecRequest, MountBucket
from skerry.settings import Settings

async def main():
    home = Path(sys.argv[1]) / "home"
    registry = await open_registry(Settings(home=home))
    async def sh(command, **options):
        async with registry.use("mine") as runtime:
            done = await runtime.exec(ExecRequest(command=command, **options))
            return (done.stdout + done.stderr).strip()
    can = registry.provider.capabilities()
    found = {"users": can.details["users"], "mounts": can.mounts}
    await registry.mounts.mount("mine", MountBucket(local_bucket=True))
    await sh("mkdir /persist/d; echo hello > /persist/d/f; mv /persist/d /persist/e")
    found["inside"] = await sh("cat /persist/e/f; stat -c %u /persist/e/f")
    found["outside"] = (home / "buckets/default/projects/mine/e/f").read_text()
    async with registry.use("mine") as runtime:
        await runtime.files.write("/persist/api", b"by the API")
        found["api"] = (await runtime.files.read("/persist/api")).content
        await runtime.sessions.create(CreateSession(id="iso"))
    found["isolated"] = await sh("cat /persist/e/f", session="iso")
    await registry.stop("mine")
    found["after"] = await sh("cat /persist/e/f")
    await registry.mounts.unmount("mine", "/persist")
    await registry.mounts.mount("mine", MountBucket(local_bucket=True, read_only=True))
    found["refused"] = await sh("touch /persist/x")
    await registry.destroy("mine")
    await registry.close()
    print(json.dumps(found))

asyncio.run(main())
"""


@needs_root
@pytest.mark.parametrize("subids", [False, pytest.param(True, marks=needs_newuidmap)])
def test_an_ordinary_user_mounts_buckets_too(subids: bool) -> None:
    with place_of(USER) as place:
        found = json.loads(run_as_user(_PROGRAM, place, subids=subids))
    assert found == {
        "users": "subids" if subids else "single",
        "mounts": True,
        "inside": "hello\n0",
        "outside": "hello\n",
        "api": "by the API",
        "isolated": "hello",
        "after": "hello",
        "refused": "touch: cannot touch '/persist/x': Read-only file system",
    }


def test_a_server_that_is_killed_leaves_no_process_and_no_mount_and_loses_nothing_that_was_closed(
    tmp_path: Path,
) -> None:
    home = tmp_path / "home"
    server = Server(home).start()
    with httpx.Client(base_url=server.url, timeout=60) as client:
        assert client.post("/v1/sandboxes/box/mount", json={"localBucket": True}).status_code == 200
        command = (
            "cd /persist; for i in $(seq 20); do echo $i > f$i; done; "
            "(while :; do cat /bin/true > busy; ls /persist; done) > /dev/null 2>&1 & exec 3>open; echo x >&3"
        )
        assert client.post("/v1/sandboxes/box/exec", json={"command": command}).json()["exitCode"] == 0
    family = server.family()
    server.kill()
    assert not vanished(family)
    assert not mounts_below(home)
    assert not any(path.is_file() for path in (home / "spool").iterdir())
    kept = home / "buckets" / "default" / "projects" / "box"
    assert [(kept / f"f{number}").read_text() for number in range(1, 21)] == [f"{number}\n" for number in range(1, 21)]
    server = Server(home).start()
    with httpx.Client(base_url=server.url, timeout=60) as client:
        done = client.post("/v1/sandboxes/box/exec", json={"command": "cat /persist/f20"}).json()
        assert done["stdout"] == "20\n"
    server.stop()
    assert os.listdir(home / "spool") == []
