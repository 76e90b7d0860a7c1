"""Terminals as in sandboxes of this machine, with the same tests."""

from __future__ import annotations

from tests.runtime.test_terminals import *  # noqa: F403
