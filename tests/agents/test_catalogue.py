"""What a task's OpenCode is told of models: read from the program, without running it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skerry.agents.contract import Setup
from skerry.agents.desk import Desk
from skerry.agents.opencode.agent import OpenCode
from skerry.agents.opencode.catalogue import VARIABLE, Catalogue, read_catalogue
from skerry.agents.opencode.running import RunningOpenCode
from skerry.agents.task_models import CreateTask
from skerry.agents.tasks import Tasks
from skerry.control.registry import Registry
from tests.agents.conftest import sandbox_request
from tests.agents.model import Model
from tests.agents.tasks.scripted import ScriptedAgent, script

CODE = rb"""b=n.fn("ModelsDev.fetchApi")(function*(){return 1}),p=n.sync(()=>({
deepinfra:{id:"deepinfra",env:["DEEPINFRA_API_KEY"],models:
{"a/b:c":{name:"One \"1\" {\xe9\u{1F600}",free:!0,open:!1,cost:.5}}},
"other-one":{id:"other-one",env:['OTHER_KEY'],models:{x:{name:'it\'s',"y":[1e3,-2]}}},
opencode:{id:"opencode",env:[],models:{z:{}}}})),u=n.fn("more")({})"""
FOUND = {
    "deepinfra": {
        "id": "deepinfra",
        "env": ["DEEPINFRA_API_KEY"],
        "models": {"a/b:c": {"name": 'One "1" {é😀', "free": True, "open": False, "cost": 0.5}},
    },
    "other-one": {"id": "other-one", "env": ["OTHER_KEY"], "models": {"x": {"name": "it's", "y": [1000, -2]}}},
    "opencode": {"id": "opencode", "env": [], "models": {"z": {}}},
}


def installed(cache: Path, code: bytes) -> Path:
    """A cache with an OpenCode in it whose program is this."""
    program = cache / "toolboxes" / "opencode" / "1.18.33" / "bin" / "opencode"
    program.parent.mkdir(parents=True)
    program.write_bytes(b"\x7fELF\0" * 1000 + code + b"\0" * 1000)
    return program


def test_the_providers_are_read_as_they_are_written_in_the_program(tmp_path: Path) -> None:
    assert read_catalogue(installed(tmp_path, CODE)) == FOUND


async def told(catalogue: Catalogue, *providers: str, **env: str) -> dict[str, Any]:
    found = await catalogue.file(providers, env)
    assert found is not None
    return dict(json.loads(found[1]))


async def test_a_task_is_told_of_the_providers_it_names_and_of_those_it_has_a_key_for(tmp_path: Path) -> None:
    program, catalogue = installed(tmp_path, CODE), Catalogue(tmp_path)
    assert await told(catalogue, "scripted") == {"opencode": FOUND["opencode"]}
    assert (await told(catalogue, "other-one"))["other-one"] == FOUND["other-one"]
    assert (await told(catalogue, OTHER_KEY="k")).keys() == {"opencode", "other-one"}
    # Once for all: another server finds what this one has read.
    program.write_bytes(b"")
    assert (await told(Catalogue(tmp_path), "deepinfra"))["deepinfra"] == FOUND["deepinfra"]


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(b"nothing of the kind", id="nothing"),
        pytest.param(CODE[:200], id="without an end"),
        pytest.param(CODE.replace(b"!0", b"f(1)"), id="more than values"),
        pytest.param(CODE.replace(b"models:{z:{}}", b""), id="something else"),
    ],
)
async def test_a_program_that_is_written_otherwise_is_left_to_know_all(code: bytes, tmp_path: Path) -> None:
    installed(tmp_path, code)
    assert await Catalogue(tmp_path).file(["deepinfra"], {}) is None


async def test_a_cache_that_was_emptied_meanwhile_is_filled_again(tmp_path: Path) -> None:
    installed(tmp_path, CODE)
    catalogue = Catalogue(tmp_path)
    await told(catalogue, "deepinfra")
    for path in (tmp_path / "models" / "opencode-1.18.33").iterdir():
        path.unlink()
    (tmp_path / "models" / "opencode-1.18.33").rmdir()
    assert await catalogue.file(["other-one"], {}) is None
    assert (await told(catalogue, "other-one")).keys() == {"opencode", "other-one"}


async def test_opencode_knows_what_it_was_told_of_until_somebody_needs_more(agency: Registry, scripted: Model) -> None:
    info = await agency.create(sandbox_request(scripted))
    assert agency.settings.cache is not None
    desk = Desk(agency, agency.tasks, {"opencode": OpenCode()}, lambda _: None, Catalogue(agency.settings.cache))
    agent, wide = OpenCode(), Setup()
    request = CreateTask.model_validate({"message": "-", "model": "anthropic/claude-opus-4-5"})
    narrow = await desk.narrowed(desk.prepared(request, request.model, "/home/user/workspace", None), {})
    try:
        async with agency.use(info.id) as runtime:
            first = await agent.start(runtime, narrow)
            assert await known(first) == {"anthropic", "opencode"}
            assert await agent.start(runtime, replace(narrow)) is first
            second = await agent.start(runtime, wide)
            assert not first.alive
            assert {"anthropic", "openai", "groq"} < await known(second)
            assert await agent.start(runtime, narrow) is second, "it knows of these, too"
            assert VARIABLE not in second.started_with
    finally:
        await agency.destroy(info.id)


class OpenCodeInName(ScriptedAgent):
    name = toolbox = "opencode"


@pytest.mark.parametrize(
    ("asked", "narrow"),
    [
        pytest.param({"model": "anthropic/claude-opus-4-5"}, True, id="one that names its model"),
        pytest.param({}, False, id="one that leaves the model to OpenCode"),
        pytest.param({"model": "groq/x", "secrets": {"api.groq.com": {"value": "k"}}}, False, id="one with keys"),
    ],
)
async def test_it_is_for_a_task_whose_model_is_known(asked: dict[str, Any], narrow: bool, agency: Registry) -> None:
    agent = OpenCodeInName()
    tasks = Tasks(agency, {"opencode": agent})
    await tasks.open()
    request = {"message": script({"say": "x"}), "agent": "opencode", "afterwards": "destroy", **asked}
    done = await tasks.wait((await tasks.create(CreateTask.model_validate(request))).id)
    await tasks.close()
    assert (done.status, done.error) == ("completed", None)
    (setup,) = agent.started
    assert (VARIABLE in setup.env, len(setup.files)) == (narrow, int(narrow))


async def known(running: RunningOpenCode) -> set[str]:
    return {provider["id"] for provider in (await running._ask("GET", "/provider"))["all"]}
