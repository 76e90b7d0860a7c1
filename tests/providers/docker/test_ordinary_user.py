"""A server that is not root, of a user who may use the engine's socket: what works, and what is said not to."""

from __future__ import annotations

import json
import os

from tests.bench.engine import IMAGE, Engine
from tests.providers.users import USER, needs_root, place_of, run_as_user

_PROGRAM = """
import asyncio, json, os, sys
from pathlib import Path
from skerry.control.open import open_registry
from skerry.models import CreateSandbox, CreateSession, CreateSnapshot, ExecRequest, RunCode, SleepSandbox
from skerry.settings import Settings

async def main():
    home, socket, image = sys.argv[1:]
    settings = Settings(home=Path(home), provider="docker", docker_socket=socket, docker_image=image, egress=["none"])
    registry = await open_registry(settings)
    async def sh(id, command):
        async with registry.use(id) as runtime:
            return (await runtime.exec(ExecRequest(command=command))).stdout.strip()
    can = registry.provider.capabilities()
    found = {"uid": os.getuid(), "isolation": can.isolation, "mounts": can.mounts}
    found["kept"] = await sh("mine", "cd /tmp; export A=1; echo one > /workspace/f") + await sh("mine", "pwd; echo $A")
    async with registry.use("mine") as runtime:
        await runtime.sessions.create(CreateSession(id="apart"))
        found["isolated"] = runtime.sessions.get("apart").isolated
        found["code"] = (await runtime.code.run(RunCode(code="6 * 7"))).text
    found["refused"] = await sh("mine", "curl -s -o /dev/null -w '%{http_code}' http://example.com/")
    found["led"] = await sh("mine", "curl -s --noproxy '*' -m 10 -o /dev/null http://198.51.100.7/ || echo nowhere")
    await registry.sleep("mine", SleepSandbox(stage="freeze"))
    found["thawed"] = await sh("mine", "echo thawed")
    snapshot = await registry.snapshots.create("mine", CreateSnapshot())
    await registry.create(CreateSandbox(id="copy", snapshot=snapshot.id))
    found["copy"] = await sh("copy", "cat f")
    await registry.stop("mine")
    found["after"] = await sh("mine", "cat f")
    await registry.snapshots.delete(snapshot.id, force=True)
    for id in ("mine", "copy"):
        await registry.destroy(id)
    await registry.close()
    print(json.dumps(found))

asyncio.run(main())
"""


@needs_root
def test_a_member_of_the_engines_group_has_all_but_what_takes_root(engine: Engine) -> None:
    os.chown(engine.socket, 0, USER)
    with place_of(USER) as place:
        found = json.loads(run_as_user(_PROGRAM, place, engine.socket, IMAGE))
    assert found == {
        "uid": USER,
        "isolation": False,
        "mounts": False,
        "kept": "/tmp\n1",
        "isolated": False,
        "code": "42",
        "refused": "403",
        "led": "nowhere",
        "thawed": "thawed",
        "copy": "one",
        "after": "one",
    }
