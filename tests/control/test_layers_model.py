"""Any sequence of writing, snapshotting, forking, rolling back and deleting leaves every sandbox and every snapshot as
plain dictionaries say it must be."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    multiple,
    rule,
    run_state_machine_as_test,
)

from skerry.control.open import open_registry
from skerry.control.registry import Registry
from skerry.models import CreateSandbox, CreateSnapshot, ExecRequest, ForkSandbox, RollbackSandbox
from skerry.settings import Settings

SOAK = bool(os.environ.get("SKERRY_SOAK"))

T = TypeVar("T")
Files = dict[str, str]

NAMES = st.sampled_from(["a", "b", "d/a", "d/b", "d/e/a", "x y", "ö", "/etc/hosts", "/etc/motd", "/usr/local/share/n"])
CONTENTS = st.text("abc", max_size=6)

# Runs inside: one operation on a file, or a listing of all that the model knows.
_ACT = """
import json, os, shutil, sys
kind, name, content = json.loads(sys.argv[1])
path = os.path.join("/workspace", name)
if kind == "write":
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        file.write(content)
elif kind == "append" and os.path.exists(path):
    with open(path, "a") as file:
        file.write(content)
elif kind == "delete" and os.path.lexists(path):
    os.unlink(path)
elif kind == "clear":
    shutil.rmtree("/workspace/d", ignore_errors=True)
elif kind == "list":
    found = {}
    for name in json.loads(content):
        try:
            with open(os.path.join("/workspace", name)) as file:
                found[name] = file.read()
        except FileNotFoundError:
            pass
    print(json.dumps(found))
"""


class Layers(RuleBasedStateMachine):
    """``registry`` and ``loop`` are given by the test."""

    registry: Registry
    loop: asyncio.AbstractEventLoop
    image: Files

    sandboxes: Bundle[str] = Bundle("sandboxes")
    snapshots: Bundle[str] = Bundle("snapshots")

    def __init__(self) -> None:
        super().__init__()
        self.now: dict[str, Files] = {}
        self.kept: dict[str, Files] = {}

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def act(self, id: str, kind: str, name: str = "", content: str = "") -> str:
        async def act() -> str:
            async with self.registry.use(id) as runtime:
                argument = shlex.quote(json.dumps([kind, name, content]))
                command = f"python3 -c {shlex.quote(_ACT)} {argument}"
                result = await runtime.exec(ExecRequest(command=command, session=None))
                assert result.exit_code == 0, result
                return result.stdout

        return self.do(act())

    @initialize(target=sandboxes)
    def first(self) -> str:
        id = self.do(self.registry.create(CreateSandbox())).id
        self.now[id] = dict(self.image)
        return id

    @rule(id=sandboxes, name=NAMES, content=CONTENTS)
    def write(self, id: str, name: str, content: str) -> None:
        self.act(id, "write", name, content)
        self.now[id][name] = content

    @rule(id=sandboxes, name=NAMES, content=CONTENTS)
    def append(self, id: str, name: str, content: str) -> None:
        self.act(id, "append", name, content)
        if name in self.now[id]:
            self.now[id][name] += content

    @rule(id=sandboxes, name=NAMES)
    def delete(self, id: str, name: str) -> None:
        self.act(id, "delete", name)
        self.now[id].pop(name, None)

    @rule(id=sandboxes)
    def clear(self, id: str) -> None:
        self.act(id, "clear")
        self.now[id] = {name: text for name, text in self.now[id].items() if not name.startswith("d/")}

    @rule(id=sandboxes)
    def sleep(self, id: str) -> None:
        self.do(self.registry.stop(id))

    @rule(target=snapshots, id=sandboxes)
    def snapshot(self, id: str) -> str:
        taken = self.do(self.registry.snapshots.create(id, CreateSnapshot()))
        self.kept[taken.id] = dict(self.now[id])
        return taken.id

    @rule(target=sandboxes, id=sandboxes, count=st.integers(1, 2))
    def fork(self, id: str, count: int) -> Any:
        forks = self.do(self.registry.snapshots.fork(id, ForkSandbox(count=count))).sandboxes
        for info in forks:
            self.now[info.id] = dict(self.now[id])
        return multiple(*(info.id for info in forks))

    @rule(target=sandboxes, snapshot=snapshots)
    def from_snapshot(self, snapshot: str) -> str:
        id = self.do(self.registry.create(CreateSandbox(snapshot=snapshot))).id
        self.now[id] = dict(self.kept[snapshot])
        return id

    @rule(id=sandboxes, snapshot=snapshots)
    def rollback(self, id: str, snapshot: str) -> None:
        self.do(self.registry.snapshots.rollback(id, RollbackSandbox(snapshot=snapshot)))
        self.now[id] = dict(self.kept[snapshot])

    @rule(snapshot=consumes(snapshots))
    def forget(self, snapshot: str) -> None:
        self.do(self.registry.snapshots.delete(snapshot, force=True))
        del self.kept[snapshot]

    @rule(id=sandboxes)
    def look(self, id: str) -> None:
        assert self.seen(id) == self.now[id]

    @rule(id=sandboxes, snapshot=snapshots)
    def compare(self, id: str, snapshot: str) -> None:
        async def changes() -> dict[str, str]:
            async with self.registry.snapshots.sandbox_diff(id, snapshot) as found:
                return {one.path: str(one.change) for one in (await found.list_(1000))[0] if one.type == "file"}

        before, after = self.kept[snapshot], self.now[id]
        found = self.do(changes())
        for name in before.keys() | after.keys():
            path = name if name.startswith("/") else f"/workspace/{name}"
            if name not in before:
                assert found[path] == "added"
            elif name not in after:
                # Of a directory that is gone, only the directory is told.
                assert found.get(path, "deleted") == "deleted"
            elif before[name] != after[name]:
                assert found[path] == "changed"
            else:
                assert found.get(path, "changed") == "changed"  # written anew with the same content

    def seen(self, id: str) -> Files:
        known = [*self.now.values(), *self.kept.values(), self.image]
        names = json.dumps(sorted({name for files in known for name in files}))
        return dict(json.loads(self.act(id, "list", content=names)))

    def teardown(self) -> None:
        for id, files in self.now.items():
            assert self.seen(id) == files
        for snapshot, files in self.kept.items():
            id = self.do(self.registry.create(CreateSandbox(snapshot=snapshot))).id
            assert self.seen(id) == files
            self.do(self.registry.destroy(id))
            self.do(self.registry.snapshots.delete(snapshot, force=True))
        for id in self.now:
            self.do(self.registry.destroy(id))


@pytest.mark.parametrize("kind", ["instant", "copy"])
async def test_every_sequence_does_to_the_layers_what_it_does_to_plain_dictionaries(kind: str, tmp_path: Path) -> None:
    registry = await open_registry(Settings(home=tmp_path / "home", pool_size=0 if kind == "copy" else None))
    try:
        assert registry.provider.capabilities().snapshots == kind
        info = await registry.create(CreateSandbox())

        class Case(Layers):
            pass

        Case.registry, Case.loop, Case.image = registry, asyncio.get_running_loop(), {}
        async with registry.use(info.id) as runtime:
            hosts = await runtime.exec(ExecRequest(command="cat /etc/hosts", session=None))
        Case.image = {"/etc/hosts": hosts.stdout}
        await registry.destroy(info.id)
        bounds = settings(
            max_examples=60 if SOAK else 4,
            stateful_step_count=20,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            database=None,
        )
        await asyncio.to_thread(run_state_machine_as_test, Case, settings=bounds)
    finally:
        await registry.close()
