"""The real OpenCode in a container: the same task and team as on this machine, from the clone to the diff."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from skerry.control.open import open_registry
from skerry.control.registry import Registry
from skerry.settings import Settings
from tests import warm
from tests.agents.conftest import KEY, model, scripted  # noqa: F401 - fixtures
from tests.agents.forge import Forge
from tests.agents.model import Model, config
from tests.agents.tasks.test_opencode_tasks import (  # noqa: F401 - the same, and its fixtures
    TOKEN,
    forge,
    real,
    repository,
    script,
    test_a_task_clones_edits_tests_and_brings_back_the_diff,
    test_a_team_of_three_costs_one_clone_and_one_that_fails_fails_alone,
    workforce,
)

RUN = "import sys; sys.argv[0] = 'skerry'; from skerry.cli.main import main; main()"


@pytest.fixture(scope="module")
async def agency(settings: dict[str, object]) -> AsyncIterator[Registry]:
    home = Path(tempfile.mkdtemp(prefix="skerry-docker-agency-"))
    registry = await open_registry(Settings(home=home, **settings))  # type: ignore[arg-type]
    yield registry
    await registry.close()
    shutil.rmtree(home)


def test_the_same_from_the_command_line(
    settings: dict[str, object],
    model: Model,  # noqa: F811
    forge: Forge,  # noqa: F811
    repository: str,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Without a server, as one who has built the image and says `--provider docker`."""
    script(model)
    (tmp_path / "config.json").write_text(json.dumps(config(model, key=KEY)))
    env = {name: value for name, value in os.environ.items() if not name.startswith("SKERRY_")} | {
        "SKERRY_HOME": str(tmp_path / "home"),
        "SKERRY_PROVIDER": "docker",
        "SKERRY_DOCKER_SOCKET": str(settings["docker_socket"]),
        "SKERRY_DOCKER_IMAGE": str(settings["docker_image"]),
    }
    address = repository.replace("://", f"://x-access-token:{TOKEN}@")
    doors = [word for url in (forge.url, model.url) for word in ("--allow", url.removeprefix("http://"))]
    line = ["task", "Fix the failing test.", "--repo", address, "--provider", "docker", "--afterwards", "destroy"]
    done = warm.run(RUN, *line, "--config", str(tmp_path / "config.json"), *doors, env=env, timeout=100)
    out, err = done.stdout.decode(), done.stderr.decode()
    assert done.returncode == 0, err
    assert out.startswith("The sum was a difference; it passes now.\ndiff --git a/adding.py b/adding.py\n")
    assert "-    return a - b\n+    return a + b\n" in out
    assert "▸ bash: python3 -B test_adding.py" in err
    assert "completed" in err
    assert "1 file changed (+1 -1)" in err
    assert KEY not in out + err
    assert TOKEN not in out + err
