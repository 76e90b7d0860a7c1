from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import warm

RUN = "import sys; sys.argv[0] = 'skerry'; from skerry.cli.main import main; main()"
Skerry = Callable[..., "subprocess.CompletedProcess[bytes]"]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    home = tmp_path_factory.mktemp("cli-home")
    mine = {name: value for name, value in os.environ.items() if not name.startswith("SKERRY_")}
    yield mine | {"SKERRY_HOME": str(home), "SKERRY_POOL_SIZE": "256M"}
    shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(scope="session")
def program() -> list[str]:
    return [sys.executable, "-m", "skerry.cli.main"]


@pytest.fixture(scope="module")
def skerry(environment: dict[str, str]) -> Skerry:
    def skerry(*arguments: str | Path, stdin: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
        line = map(str, arguments)
        return warm.run(RUN, *line, input=stdin, env=environment, timeout=100)

    return skerry
