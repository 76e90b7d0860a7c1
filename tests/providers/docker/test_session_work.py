"""Coding sessions in containers at real work: a repository that is fetched, pushed to, and asked for a pull request."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.agents.sessions.conftest import Desk, desk_of
from tests.agents.sessions.forge import Forge
from tests.agents.sessions.test_push import (  # noqa: F401 - the same, and its fixtures
    TOKEN,
    agent,
    begun,
    forge,
    session,
    test_a_pull_request_is_pushed_from_inside_and_opened_from_outside,
    test_after_a_restore_the_work_is_fetched_for_but_not_moved,
    test_no_token_is_inside,
    test_the_second_session_with_a_repository_finds_it_there,
    test_who_watches_sees_the_repository_fetched_and_the_agent_started,
)


@pytest.fixture(scope="module")
async def desk(settings: dict[str, object], forge: Forge) -> AsyncIterator[Desk]:  # noqa: F811
    home = Path(tempfile.mkdtemp(prefix="skerry-docker-sessions-"))
    there = {
        "forge_url": f"http://{forge.host}/api",
        "forge_git_url": f"http://{forge.host}/git",
        "forge_token": TOKEN,
    }
    async with desk_of(home, agent=agent, settings={**settings, **there}) as desk:
        yield desk
    shutil.rmtree(home)
