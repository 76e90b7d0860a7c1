"""Running code in a machine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from skerry.models import Execution, RunCode
from skerry.runtime.runtime import Runtime

Run = Callable[..., Awaitable[Execution]]


@pytest.fixture
def run(runtime: Runtime) -> Run:
    async def run(code: str, **options: object) -> Execution:
        return await runtime.code.run(RunCode(code=code, **options))  # type: ignore[arg-type]

    return run
