"""Coding sessions in containers with the real OpenCode and the real Claude Code, driven by a model with a script."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from skerry.agents.sessions.programs import command
from tests.agents.conftest import model, scripted  # noqa: F401 - fixtures
from tests.agents.sessions.conftest import Desk, desk_of

# In this order: the last looks at what the others did.
# isort: off
from tests.agents.sessions.test_agents import (  # noqa: F401 - the same, and its fixtures
    kind,
    session,
    test_what_is_two_and_two,
    test_three_prompts_one_after_the_other,
    test_restored_after_a_stop_it_knows_what_was_said,
)
# isort: on


@pytest.fixture(scope="module")
async def desk(settings: dict[str, object]) -> AsyncIterator[Desk]:
    home = Path(tempfile.mkdtemp(prefix="skerry-docker-sessions-"))
    async with desk_of(home, agent=command, settings=settings) as desk:
        yield desk
    shutil.rmtree(home)
