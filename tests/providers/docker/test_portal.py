"""What every portal promises, of one that leads into a container."""

from __future__ import annotations

from tests.portal.test_contract import *  # noqa: F403
