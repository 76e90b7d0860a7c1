"""The same contexts over every portal: the runtime does not know where it runs."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from skerry.models import CreateContext, RunCode
from skerry.portal.contract import Portal
from skerry.runtime.interpreter.contexts import Contexts
from skerry.runtime.interpreter.pool import Provision


@pytest_asyncio.fixture
async def contexts(portal: Portal) -> AsyncIterator[Contexts]:
    contexts = Contexts(portal, {"PATH": os.environ["PATH"], "HOME": "/tmp"}, Provision())
    yield contexts
    await contexts.close()


@pytest.mark.parametrize(
    ("language", "busy", "fatal"),
    [("python", "while True: pass", "import os; os._exit(3)"), ("typescript", "while (true);", "process.exit(3)")],
)
async def test_contexts_work(contexts: Contexts, language: str, busy: str, fatal: str) -> None:
    await contexts.create(CreateContext(id="a", language=language, cwd="/tmp"))
    await contexts.run(RunCode(code="x = 41", context="a"))
    assert (await contexts.run(RunCode(code="x + 1", context="a"))).text == "42"
    assert (await contexts.run(RunCode(code=busy, context="a", timeout=300))).timed_out
    died = await contexts.run(RunCode(code=fatal, context="a"))
    assert died.error is not None
    assert "status 3" in died.error.message
    assert "status 3" in (await contexts.run(RunCode(code="1", context="a"))).notices[0]
    await contexts.delete("a")
