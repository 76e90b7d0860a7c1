"""What every provider promises, of containers."""

from __future__ import annotations

from tests.providers.test_contract import *  # noqa: F403
