"""Snapshots without root: copies on any file system, instant on btrfs; with subordinate ids, and with none."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.disks import file_system
from tests.providers.users import USER, needs_newuidmap, needs_root, place_of, run_as_user

_PROGRAM = """
import asyncio, json, os, sys
from pathlib import Path
from skerry.control.open import open_registry
from skerry.models import CreateSandbox, CreateSnapshot, ExecRequest, ForkSandbox, RollbackSandbox, StartProcess
from skerry.settings import Settings

MAKE = '''
echo one >f; ln f hard; ln -s /etc/passwd link; mkfifo pipe; mkdir -p d/e; echo x >d/e/x; chmod 4755 f
truncate -s 8M sparse; printf y >$'odd\\\\xff'; rm -r /etc/ssl; mkdir /etc/ssl; echo n >/etc/ssl/new
python3 -c "import os, socket; socket.socket(socket.AF_UNIX).bind('sock'); os.setxattr('f', 'user.a', b'v')"
mkdir closed; echo in >closed/in; chmod 0 closed; echo secret >locked; chmod 0 locked
id -u bob >/dev/null 2>&1 || useradd -m bob 2>/dev/null; chown bob d 2>/dev/null; rm /etc/group
'''
SEE = '''
ls -lan --time-style=full-iso /workspace /workspace/d /etc/ssl /home | grep -v ' \\\\.\\\\.$' | grep -v ^total
cat f hard d/e/x closed/in locked; ls /etc/group 2>&1; stat -c '%h %a' f; stat -c %b sparse
python3 -c "import os; print(os.getxattr('f', 'user.a'))"
'''

async def main():
    home = Path(sys.argv[1]) / "home"
    registry = await open_registry(Settings(home=home))
    found = {"kind": registry.provider.capabilities().snapshots, "uid": os.getuid()}
    async def sh(id, command):
        async with registry.use(id) as runtime:
            return (await runtime.exec(ExecRequest(command=command, session=None))).stdout
    await sh("a", MAKE)
    before = await sh("a", SEE)
    async with registry.use("a") as runtime:
        await runtime.processes.start(StartProcess(command="while :; do date >>log; sleep 0.01; done"))
    await sh("a", "until [ -e log ]; do sleep 0.01; done")
    first = await registry.snapshots.create("a", CreateSnapshot(name="first"))
    second = await registry.snapshots.create("a", CreateSnapshot(name="second"))
    await sh("a", "pkill -f date; rm -rf f hard d sparse closed locked; echo two >f; rm -f log; true")
    made = await registry.create(CreateSandbox(snapshot="second"))
    await sh(made.id, "rm -f log")
    forks = (await registry.snapshots.fork(made.id, ForkSandbox(count=2))).sandboxes
    await registry.snapshots.rollback("a", RollbackSandbox(snapshot="first"))
    await sh("a", "rm -f log")
    skip = lambda text: [line for line in text.splitlines() if not line.endswith(" .")]
    found["same"] = [skip(await sh(id, SEE)) == skip(before) for id in ("a", made.id, forks[0].id, forks[1].id)]
    found["different"] = [(b, a) for b, a in zip(skip(before), skip(await sh(made.id, SEE))) if a != b]
    await sh(forks[0].id, "echo mine >f")
    found["apart"] = [await sh(forks[1].id, "cat f"), await sh("a", "cat f")]
    async with registry.snapshots.sandbox_diff(forks[0].id, "second") as changes:
        found["diff"] = sorted((one.path, str(one.change)) for one in (await changes.list_(100))[0])
    async with registry.snapshots.sandbox_diff("a") as changes:
        listed = {one.path: str(one.change) for one in (await changes.list_(1000))[0]}
        found["image"] = [listed.get(path) for path in ("/workspace/f", "/etc/group", "/etc/ssl/new", "/etc/hosts")]
        found["tar"] = len(b"".join([chunk async for chunk in changes.tar()])) > 1000
    for info in (await registry.list()).sandboxes:
        await registry.destroy(info.id)
    for one in await registry.snapshots.list_():
        await registry.snapshots.delete(one.id)
    await registry.close()
    found["left"] = [p.name for d in ("sandboxes", "trash", "snapshots") for p in (home / d).iterdir()]
    print(json.dumps(found))

asyncio.run(main())
"""


@contextmanager
def place_on(kind: str) -> Iterator[Path]:
    if kind == "copy":
        with place_of(USER) as place:
            yield place
    else:
        with file_system("btrfs", 300, owner=USER) as place:
            yield place


@needs_root
@pytest.mark.parametrize("subids", [False, pytest.param(True, marks=needs_newuidmap)])
@pytest.mark.parametrize("kind", ["copy", "instant"])
def test_snapshots_work_for_an_ordinary_user(kind: str, subids: bool) -> None:
    with place_on(kind) as place:
        os.chmod(place.parent, 0o755)
        found = json.loads(run_as_user(_PROGRAM, place, subids=subids))
    assert (found["uid"], found["kind"]) == (USER, kind)
    assert found["different"] == []
    assert found["same"] == [True] * 4
    assert found["apart"] == ["one\n", "one\n"]
    assert found["diff"] == [["/workspace/f", "changed"], ["/workspace/hard", "changed"], ["/workspace/log", "deleted"]]
    assert found["image"] == ["added", "deleted", "added", None]
    assert found["tar"]
    assert found["left"] == []
