"""The real OpenCode in a container: the same task as on this machine, from the clone to the diff."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from skerry.control.open import open_registry
from skerry.control.registry import Registry
from skerry.settings import Settings
from tests.agents.conftest import model, scripted  # noqa: F401 - fixtures
from tests.agents.tasks.test_opencode_tasks import (  # noqa: F401 - the same, and its fixtures
    forge,
    real,
    repository,
    test_a_task_clones_edits_tests_and_brings_back_the_diff,
    workforce,
)


@pytest.fixture(scope="module")
async def agency(settings: dict[str, object]) -> AsyncIterator[Registry]:
    home = Path(tempfile.mkdtemp(prefix="skerry-docker-agency-"))
    registry = await open_registry(Settings(home=home, **settings))  # type: ignore[arg-type]
    yield registry
    await registry.close()
    shutil.rmtree(home)
