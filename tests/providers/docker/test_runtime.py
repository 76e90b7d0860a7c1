"""Sessions, processes, files and git as in sandboxes of this machine, with the same tests."""

from __future__ import annotations

from skerry.models import CreateSession, ExecRequest
from skerry.runtime.runtime import Runtime
from tests.runtime.test_files import *  # noqa: F403
from tests.runtime.test_git import *  # noqa: F403
from tests.runtime.test_processes import *  # noqa: F403
from tests.runtime.test_sessions import *  # noqa: F403


async def test_isolated_sessions_cannot_see_or_signal_each_other(runtime: Runtime) -> None:
    """Not here: they work without the wall, and say so."""
    info = await runtime.sessions.create(CreateSession(id="secret", env={"KEY": "sk-1"}))
    assert not info.isolated
    said = await runtime.exec(ExecRequest(command="echo $KEY $SESSION_ISOLATED", session="secret"))
    assert said.stdout == "sk-1 0\n"
