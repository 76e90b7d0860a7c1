"""The disks of homes that nobody uses any more.

Each holds a gigabyte, and there are dozens in a run, whose directories stay until it ends.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import suppress
from pathlib import Path

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, None, None]:
    yield
    if nextitem is None or nextitem.path != item.path:
        _remove_unused(item.config._tmp_path_factory.getbasetemp())  # type: ignore[attr-defined]


def _remove_unused(base: Path) -> None:
    used = set()
    for file in Path("/sys/block").glob("loop*/loop/backing_file"):
        with suppress(OSError):  # it is just let go of
            used.add(file.read_text().strip())
    for home in ("*", "*/*"):
        for disk in base.glob(f"{home}/pool.img"):
            if str(disk.resolve()) not in used:  # pytest makes links to the directories, too
                disk.unlink(missing_ok=True)
