"""AgentPod's worker API over containers: those tests of it that depend on where OpenCode runs."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from skerry.control.open import open_registry
from skerry.control.registry import Registry
from skerry.settings import Settings
from tests.agents.conftest import HOST, model, scripted  # noqa: F401 - fixtures
from tests.agents.test_worker import API_KEY, http, pod, worker  # noqa: F401 - fixtures
from tests.server.conftest import ServerProcess

# In this order: the last ends what all others use.
# isort: off
from tests.agents.test_worker import (  # noqa: F401 - the same
    test_what_is_two_and_two,
    test_the_key_of_the_configuration_stays_outside,
    test_a_message_may_be_heard_as_it_is_answered,
    test_websockets_pass_to_opencodes_terminals,
    test_a_browser_is_led_to_the_preview,
    test_the_workspace_is_kept_after_each_message,
    test_the_state_is_the_true_one_and_sessions_survive_sleep,
    test_one_whose_files_are_gone_gets_them_back_from_its_bucket,
    test_whoever_ends_the_sandbox_ends_the_message_and_it_stays_so,
    test_deleting_destroys,
)
# isort: on


@pytest.fixture(scope="module")
def served(settings: dict[str, object]) -> Iterator[ServerProcess]:
    with tempfile.TemporaryDirectory(prefix="skerry-docker-worker-") as home:
        allowed = ["registries", HOST]
        process = ServerProcess(Path(home), api_keys=[API_KEY], egress=allowed, worker_bucket="default", **settings)
        yield process
        assert process.stop() == 0


@pytest.fixture(scope="module")
async def agency(settings: dict[str, object]) -> AsyncIterator[Registry]:
    with tempfile.TemporaryDirectory(prefix="skerry-docker-agency-") as home:
        registry = await open_registry(Settings(home=Path(home), **settings))  # type: ignore[arg-type]
        yield registry
        await registry.close()
