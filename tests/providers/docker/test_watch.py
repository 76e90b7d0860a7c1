"""Watching directories as in sandboxes of this machine, with the same tests."""

from __future__ import annotations

from tests.runtime.test_watch import *  # noqa: F403
