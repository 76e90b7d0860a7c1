"""Frozen, hibernated and awake again: those tests of sleep that ask what a machine does."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from skerry.control.open import open_registry
from skerry.control.registry import Registry
from skerry.settings import Settings
from tests.control.test_sleep import (  # noqa: F401 - the same
    test_a_command_in_a_frozen_sandbox_is_told_when_it_is_destroyed,
    test_a_command_in_progress_hears_sigterm_and_is_answered,
    test_a_frozen_sandbox_hibernates_politely,
    test_a_hundred_requests_at_once_wake_it_once,
    test_a_session_that_is_asked_for_just_before_a_freeze_does_not_keep_it_from_being_destroyed,
    test_an_open_terminal_does_not_use_up_the_grace,
    test_isolated_sessions_are_frozen_too,
    test_isolated_sessions_hear_sigterm_too,
    test_no_time_passes_for_a_command_while_it_is_frozen,
    test_one_that_will_not_end_is_killed_when_its_time_is_up_and_the_record_says_so,
    test_processes_hear_sigterm_and_have_time_to_write_their_state,
    test_sessions_that_are_made_while_it_is_frozen_and_thawed_get_their_machine,
    test_sessions_variables_and_code_outlive_a_freeze,
    test_sleep_and_use_at_the_same_time_lose_nothing,
    test_what_is_under_way_when_it_is_frozen_ends_after_it_was_thawed,
    test_without_grace_nothing_is_asked,
)


@pytest.fixture(scope="module")
async def registry(settings: dict[str, object]) -> AsyncIterator[Registry]:
    with tempfile.TemporaryDirectory(prefix="skerry-docker-sleep-") as home:
        registry = await open_registry(Settings(home=Path(home), **settings))  # type: ignore[arg-type]
        yield registry
        await registry.close()
