"""Coding sessions in containers: supervisor, bridge, snapshots, and what becomes of them, with a scripted agent."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.agents.sessions.conftest import Desk, desk_of
from tests.agents.sessions.test_life_cycle import (  # noqa: F401 - the same
    TIMES,
    agent,
    test_a_sandbox_that_dies_is_noticed_at_once,
    test_a_silent_sandbox_is_given_up_and_the_session_goes_on_in_another,
    test_an_agent_that_cannot_start_is_tried_three_times_and_no_more,
    test_an_archived_session_has_no_sandbox,
    test_what_nobody_uses_is_put_away_and_comes_back_as_it_was,
    test_without_snapshots_a_session_begins_anew,
)
from tests.agents.sessions.test_session import (  # noqa: F401 - the same, and its fixture
    session,
    test_a_cut_connection_loses_no_event,
    test_a_deleted_session_leaves_nothing_behind,
    test_a_killed_agent_fails_its_prompt_and_is_started_again,
    test_a_killed_bridge_loses_no_event,
    test_a_prompt_starts_a_sandbox_and_is_answered,
    test_a_sandbox_reaches_nothing_of_the_server_but_its_own_session,
    test_a_stopped_prompt_fails_and_the_next_one_is_worked_at,
    test_only_the_sessions_own_sandbox_is_let_in,
    test_prompts_are_worked_at_strictly_one_at_a_time,
    test_typing_starts_a_sandbox_before_anything_is_asked,
)


@pytest.fixture(scope="module")
async def desk(settings: dict[str, object]) -> AsyncIterator[Desk]:
    home = Path(tempfile.mkdtemp(prefix="skerry-docker-sessions-"))
    async with desk_of(home, TIMES, agent=agent, settings=settings) as desk:
        yield desk
    shutil.rmtree(home)
