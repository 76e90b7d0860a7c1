"""The whole of it without root: with subordinate ids, and with none."""

from __future__ import annotations

import json

import pytest

from tests.providers.users import USER, needs_newuidmap, needs_root, place_of, run_as_user

_PROGRAM = """
import asyncio, json, os, sys
from pathlib import Path
from skerry.control.open import open_registry
from skerry.models import CreateSession, ExecRequest, RunCode, StartProcess
from skerry.settings import Settings

async def main():
    registry = await open_registry(Settings(home=Path(sys.argv[1]) / "home"))
    found = {"users": registry.provider.capabilities().details["users"], "uid": os.getuid()}
    async with registry.use("mine") as runtime:
        async def sh(command, **options):
            return (await runtime.exec(ExecRequest(command=command, **options))).stdout.strip()
        found["id"] = await sh("id -u")
        found["kept"] = await sh("cd /tmp; export A=1; echo ok") and await sh("pwd; echo $A")
        found["useradd"] = await sh("useradd -m bob && su bob -c 'id -un'")
        found["usr"] = await sh("touch /usr/x 2>&1 || echo read-only")
        await runtime.files.write("/workspace/f", b"content")
        found["file"] = (await runtime.files.read("f")).content
        await runtime.sessions.create(CreateSession(id="iso"))
        found["isolated"] = runtime.sessions.get("iso").isolated
        for language, code in {"python": "import pandas; 6 * 7", "javascript": "6 * 7", "typescript": "6 * 7"}.items():
            found[language] = (await runtime.code.run(RunCode(code=code, language=language))).text
        await runtime.processes.start(StartProcess(command="sleep 600"))
        found["hidden"] = await sh("pgrep -x sleep || echo none", session="iso")
    await registry.stop("mine")
    async with registry.use("mine") as runtime:
        found["after"] = (await runtime.files.read("f")).content
    await registry.destroy("mine")
    await registry.close()
    home = Path(sys.argv[1]) / "home"
    found["left"] = [p.name for d in ("sandboxes", "trash") for p in (home / d).iterdir()]
    print(json.dumps(found))

asyncio.run(main())
"""


@needs_root
@pytest.mark.parametrize("subids", [False, pytest.param(True, marks=needs_newuidmap)])
def test_sandboxes_work_for_an_ordinary_user(subids: bool) -> None:
    with place_of(USER) as place:
        found = json.loads(run_as_user(_PROGRAM, place, subids=subids))
    assert found["uid"] == USER
    assert found["users"] == ("subids" if subids else "single")
    assert found["useradd"] == ("bob" if subids else "")
    for key, value in {"id": "0", "kept": "/tmp\n1", "file": "content", "after": "content", "left": []}.items():
        assert found[key] == value, key
    assert [found[language] for language in ("python", "javascript", "typescript")] == ["42"] * 3
    assert found["usr"].endswith("read-only")
    assert (found["isolated"], found["hidden"]) == (True, "none")
