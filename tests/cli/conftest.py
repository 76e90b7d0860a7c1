from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Skerry = Callable[..., "subprocess.CompletedProcess[bytes]"]


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    home = tmp_path_factory.mktemp("cli-home")
    mine = {name: value for name, value in os.environ.items() if not name.startswith("SKERRY_")}
    return mine | {"SKERRY_HOME": str(home)}


@pytest.fixture(scope="session")
def program() -> list[str]:
    return [sys.executable, "-m", "skerry.cli.main"]


@pytest.fixture(scope="session")
def skerry(environment: dict[str, str], program: list[str]) -> Skerry:
    def skerry(*arguments: str | Path, stdin: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [*program, *map(str, arguments)],
            capture_output=True,
            env=environment,
            timeout=100,
            check=False,
            **({"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}),  # type: ignore[call-overload]
        )

    return skerry
