"""Code contexts: those tests of them that depend on where the interpreters run."""

from __future__ import annotations

from tests.runtime.interpreter.conftest import run  # noqa: F401 - a fixture
from tests.runtime.interpreter.test_contexts import (  # noqa: F401 - the same
    test_a_context_keeps_its_state_and_shares_it_with_no_other,
    test_contexts_leave_nothing_behind,
    test_executors_can_be_had_ready_before_they_are_needed,
    test_without_a_context_each_language_has_one_of_its_own_that_is_kept,
)
from tests.runtime.interpreter.test_portals import contexts, test_contexts_work  # noqa: F401 - the same, and its fixture
