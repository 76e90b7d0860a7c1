"""Sessions, processes, files and git as in sandboxes of this machine, with the same tests."""

from __future__ import annotations

from tests.runtime.test_files import *  # noqa: F403
from tests.runtime.test_git import *  # noqa: F403
from tests.runtime.test_processes import *  # noqa: F403
from tests.runtime.test_sessions import *  # noqa: F403
