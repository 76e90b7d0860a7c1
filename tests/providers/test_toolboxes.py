"""Programs of the host that sandboxes are shown: installed once, whole or not at all, and read-only inside."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from skerry.control.open import open_registry
from skerry.control.registry import Registry
from skerry.errors import (
    InvalidRequestError,
    ToolboxInstallError,
    ToolboxInUseError,
    ToolboxMissingError,
    ToolboxUnreachableError,
)
from skerry.models import CreateSandbox, CreateSnapshot, ExecRequest, ForkSandbox, SleepSandbox
from skerry.providers import toolboxes
from skerry.providers.toolboxes import KITS, PLACE, Kit, Toolboxes
from skerry.settings import Settings

# npm, as far as these tests need one: it counts how often it is run, and puts a script where a program should be.
NPM = """
import json, os, sys, time
from pathlib import Path
arguments = sys.argv[1:]
prefix = Path(arguments[arguments.index("--prefix") + 1])
with open(os.environ["NPM_RUNS"], "a") as runs:
    runs.write("x")
time.sleep(float(os.environ.get("NPM_TAKES", "0")))
if os.environ.get("NPM_SAYS"):
    print(os.environ["NPM_SAYS"])
    raise SystemExit(1)
package, _, version = arguments[-1].rpartition("@")
place = prefix / "node_modules" / package / "bin"
place.mkdir(parents=True)
(place / "greet").write_text(f"#!/bin/sh\\necho greet {os.environ.get('NPM_BRINGS', version)}\\n")
"""


@pytest.fixture
def npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    kit = Kit("greeter", "1.2.3", "1.2.0", {"x86_64": "greet", "aarch64": "greet"}, {"greet": "bin/greet"})
    monkeypatch.setitem(KITS, kit.name, kit)
    monkeypatch.setattr(toolboxes, "_npm", lambda: [sys.executable, "-c", NPM])
    monkeypatch.setenv("NPM_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


@pytest.fixture
def boxes(tmp_path: Path, npm: Path) -> Toolboxes:
    return Toolboxes(tmp_path / "cache")


async def test_one_is_installed_once_whoever_asks_for_it(boxes: Toolboxes, npm: Path, tmp_path: Path) -> None:
    os.environ["NPM_TAKES"] = "0.3"
    try:
        said: list[str] = []
        others = [Toolboxes(tmp_path / "cache").install("greeter", progress=said.append) for _ in range(3)]
        places = await asyncio.gather(boxes.install("greeter"), *others)
    finally:
        del os.environ["NPM_TAKES"]
    assert len(set(places)) == 1
    assert npm.read_text() == "x"
    assert "waiting for another installation" in said
    assert [(each.name, each.version) for each in boxes.list_()] == [("greeter", "1.2.3")]
    assert (places[0] / "bin" / "greet").stat().st_mode & 0o777 == 0o755
    assert await boxes.ensure("greeter") == places[0]


@pytest.mark.parametrize(
    ("variable", "value", "error"),
    [
        ("NPM_SAYS", "npm error code ENOTFOUND", ToolboxUnreachableError),
        ("NPM_SAYS", "npm error code E404", ToolboxInstallError),
        ("NPM_BRINGS", "9.9.9", ToolboxInstallError),
    ],
)
async def test_what_goes_wrong_is_said_and_leaves_nothing(
    boxes: Toolboxes, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, error: type[Exception]
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(error) as raised:
        await boxes.install("greeter")
    if error is ToolboxUnreachableError:
        assert "skerry toolbox install greeter" in str(raised.value)
    assert boxes.find("greeter") is None
    assert [path.name for path in (boxes.directory / "greeter").iterdir()] == []


async def test_who_gives_up_leaves_nothing(boxes: Toolboxes, monkeypatch: pytest.MonkeyPatch, npm: Path) -> None:
    monkeypatch.setenv("NPM_TAKES", "60")
    installing = asyncio.create_task(boxes.install("greeter"))
    while not npm.exists():
        await asyncio.sleep(0.02)
    installing.cancel()
    await asyncio.gather(installing, return_exceptions=True)
    assert list((boxes.directory / "greeter").iterdir()) == []


@pytest.mark.parametrize("version", ["1.1.9", "../../etc", "latest", ""])
async def test_versions_that_do_not_do_are_refused(boxes: Toolboxes, version: str) -> None:
    with pytest.raises(InvalidRequestError):
        await boxes.install("greeter", version or "x")


def test_opencode_is_new_enough_for_ids_that_wrapped_around() -> None:
    assert KITS["opencode"].least == "1.18.15"
    assert toolboxes._number(KITS["opencode"].version) >= (1, 18, 15)


@pytest_asyncio.fixture
async def server(tmp_path: Path, npm: Path) -> AsyncIterator[Registry]:
    registry = await open_registry(Settings(home=tmp_path / "home", cache=tmp_path / "cache", warm_pool=1))
    yield registry
    await registry.close()


async def run(registry: Registry, id: str, command: str) -> str:
    async with registry.use(id) as runtime:
        done = await runtime.exec(ExecRequest(command=command))
        return done.stdout + done.stderr


async def test_a_sandbox_that_asks_has_it_for_life_and_others_have_not(server: Registry, npm: Path) -> None:
    """Through a warm pool, sleep, snapshots and forks."""
    while not server.population()[0]:
        await asyncio.sleep(0.05)
    made = await server.create(CreateSandbox(id="asks", toolboxes=["greeter"]))
    assert made.toolboxes == ["greeter"]
    assert npm.read_text() == "x"
    assert await run(server, "asks", "greet") == "greet 1.2.3\n"
    assert server.population()[0] == 1, "the machine that waits has no toolbox, so it still waits"
    assert "not found" in await run(server, "does-not", "greet")
    assert "Read-only" in await run(server, "asks", f"touch {PLACE}/greeter/bin/x")
    await server.sleep("asks", SleepSandbox())
    assert await run(server, "asks", "greet") == "greet 1.2.3\n"
    snapshot = await server.snapshots.create("asks", CreateSnapshot())
    await server.create(CreateSandbox(id="from-snapshot", snapshot=snapshot.id))
    await server.snapshots.fork("asks", ForkSandbox(ids=["forked"]))
    for id in ("from-snapshot", "forked"):
        assert await run(server, id, "greet") == "greet 1.2.3\n"
    with pytest.raises(ToolboxInUseError):
        await Toolboxes(server.settings.cache or Path()).remove("greeter")


async def test_one_that_was_removed_is_there_again_when_a_sandbox_starts(server: Registry, npm: Path) -> None:
    boxes = Toolboxes(server.settings.cache or Path())
    await server.create(CreateSandbox(id="asks", toolboxes=["greeter"]))
    assert await boxes.remove("greeter") == ["1.2.3"]
    with pytest.raises(ToolboxMissingError):
        await boxes.remove("greeter")
    assert await run(server, "asks", "greet") == "greet 1.2.3\n"
    assert npm.read_text() == "xx"


async def test_one_that_there_is_not_is_refused_and_no_sandbox_made(server: Registry) -> None:
    with pytest.raises(InvalidRequestError, match="There is no toolbox 'nothing'"):
        await server.create(CreateSandbox(id="asks", toolboxes=["nothing"]))
    assert json.loads((await server.list()).model_dump_json())["sandboxes"] == []
