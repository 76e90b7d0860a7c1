"""Buckets in containers: those tests of buckets that depend on where they are mounted."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from skerry.control.open import open_registry
from skerry.control.registry import Registry
from skerry.settings import Settings
from tests.s3 import bucket_table
from tests.storage.mounting import mounted, place  # noqa: F401 - fixtures
from tests.storage.test_mount_hostile import (  # noqa: F401 - the same
    test_read_only_holds_against_root_inside,
    test_the_sandbox_sees_its_prefix_and_nothing_else,
)
from tests.storage.test_mount_life import (  # noqa: F401 - the same
    test_a_destroyed_sandbox_leaves_nothing_of_its_mounts,
    test_a_mount_comes_back_when_the_sandbox_wakes,
    test_a_mount_is_not_mounted_on_even_by_another_name,
    test_a_mount_that_is_in_use_can_be_taken_away,
    test_a_sandbox_that_is_killed_leaves_nothing_either,
    test_directories_made_for_a_mount_that_fails_are_taken_back,
    test_unmounting_leaves_an_empty_directory_and_nothing_behind,
)
from tests.storage.test_mounts import (  # noqa: F401 - the same
    test_every_way_of_writing_a_file,
    test_isolated_sessions_and_terminals_see_it,
    test_the_file_api_works_on_it,
    test_what_is_written_is_in_the_bucket_when_close_returns,
)


@pytest.fixture(scope="module")
async def mounting_registry(settings: dict[str, object], request: pytest.FixtureRequest) -> AsyncIterator[Registry]:
    home = Path(tempfile.mkdtemp(prefix="skerry-docker-mounts-"))
    table = bucket_table("directory", home, request)
    registry = await open_registry(Settings(home=home / "home", buckets=table, mount_timeout=3.0, **settings))  # type: ignore[arg-type]
    yield registry
    await registry.close()
    shutil.rmtree(home)
