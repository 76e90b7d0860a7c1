"""Backups without root: with subordinate ids, and with none."""

from __future__ import annotations

import json

import pytest

from tests.providers.users import USER, needs_newuidmap, needs_root, place_of, run_as_user
from tests.storage.trees import LOOK, NASTY

_PROGRAM = """
import asyncio, json, sys
from pathlib import Path
from skerry.control.open import open_registry
from skerry.models import BackupRequest, ExecRequest, RestoreRequest
from skerry.settings import Settings

async def main():
    registry = await open_registry(Settings(home=Path(sys.argv[1]) / "home"))
    async def python(runtime, program, *arguments):
        request = ExecRequest(command="/run/skerry/bin/python3", args=["-c", program, *arguments], session=None)
        done = await runtime.exec(request)
        assert done.exit_code == 0, done.stderr
        return done.stdout
    async with registry.use("one") as one, registry.use("two") as two:
        await python(one, sys.argv[2], "/workspace")
        await one.exec(ExecRequest(command="echo set >/etc/setting; rm /etc/debian_version"))
        result = await registry.backups.backup(one, "one", BackupRequest())
        machine = await registry.backups.backup(one, "one", BackupRequest(dir="/"))
        done = await registry.backups.restore(two, "two", RestoreRequest(backup=result.backup.id))
        same = await python(one, sys.argv[3], "/workspace") == await python(two, sys.argv[3], "/workspace")
        await registry.backups.restore(two, "two", RestoreRequest(backup=machine.backup.id))
        setting = (await two.exec(ExecRequest(command="cat /etc/setting; ls -d /etc/deb*"))).stdout
    await registry.destroy("one")
    await registry.destroy("two")
    await registry.close()
    print(json.dumps([same, done.left_out, setting]))

asyncio.run(main())
"""


@needs_root
@pytest.mark.parametrize("subids", [False, pytest.param(True, marks=needs_newuidmap)])
def test_backups_work_for_an_ordinary_user(subids: bool) -> None:
    with place_of(USER) as place:
        found = json.loads(run_as_user(_PROGRAM, place, NASTY, LOOK, subids=subids))
    assert found == [True, {}, "set\n"]
