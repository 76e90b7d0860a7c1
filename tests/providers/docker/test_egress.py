"""The door of a container: those tests of it that depend on how its programs come there and whom they trust."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from skerry.control.registry import Registry
from skerry.control.store import Store
from skerry.providers.select import create_provider
from skerry.settings import Settings
from tests.egress.conftest import Names, World, make, names, world  # noqa: F401 - fixtures
from tests.egress.test_secrets import (  # noqa: F401 - the same, and its fixture
    test_an_answer_that_repeats_it_is_scrubbed,
    test_no_other_host_receives_it,
    test_streams_uploads_and_websockets_pass_while_it_is_added,
    test_the_certificate_is_one_that_the_sandbox_and_nobody_else_trusts,
    test_the_host_receives_what_the_sandbox_never_had,
    value,
)
from tests.egress.test_transparent import (  # noqa: F401 - the same
    test_a_program_that_knows_no_proxy_gets_out,
    test_names_are_looked_up_under_the_policy,
    test_none_is_none_for_them_too,
    test_other_name_servers_are_this_one,
    test_private_places_stay_out_of_reach,
    test_servers_inside_are_reached_as_ever,
    test_what_is_not_allowed_is_refused_at_once,
    test_what_is_not_led_to_the_door_fails_at_once,
)


@pytest.fixture(scope="module")
async def outward(
    world: World,  # noqa: F811
    names: Names,  # noqa: F811
    settings: dict[str, object],
) -> AsyncIterator[Registry]:
    with tempfile.TemporaryDirectory(prefix="skerry-docker-egress-") as home:
        there = Settings(home=Path(home), **settings)  # type: ignore[arg-type]
        os.environ["SSL_CERT_FILE"] = str(world.authority.certificate)
        try:
            registry = Registry(create_provider(there), Store(there.store_url), there, resolver=names)
            await registry.open()
        finally:
            del os.environ["SSL_CERT_FILE"]
        yield registry
        await registry.close()
