"""Several runs of pytest beside each other that share the tests: each takes the next file that none has taken yet.

``TESTS_TAKEN`` is the directory in which they note what they took; scripts/run_tests.py makes it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest

TAKEN = "TESTS_TAKEN"
# So that none of them is what all others wait for at the end.
LONGEST = (
    "egress/test_tunnels.py",
    "runtime/test_git.py",
    "providers/test_imported.py",
    "control/test_shipments.py",
    "egress/test_programs.py",
    "test_layer_faults.py",
    "cli/test_commands.py",
    "control/test_limits.py",
    "storage/test_backups.py",
    "providers/test_pool.py",
    "conformance/cloudflare/test_defects.py",
)


def pytest_configure(config: pytest.Config) -> None:
    if place := os.environ.get(TAKEN):
        config.pluginmanager.register(Share(Path(place)))


class Share:
    def __init__(self, place: Path) -> None:
        self._place = place

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        longest = {Path(__file__).parent / name: number for number, name in enumerate(LONGEST)}
        items.sort(key=lambda item: longest.get(item.path, len(LONGEST)))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            raise session.Interrupted("There were errors while tests were collected.")
        mine = self._mine(session.items)
        item = next(mine, None)
        while item is not None:
            following = next(mine, None)
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
            item = following
        return True

    def _mine(self, items: list[pytest.Item]) -> Iterator[pytest.Item]:
        for path, of_file in groupby(items, key=lambda item: item.path):
            if self._take(path):
                yield from of_file

    def _take(self, path: Path) -> bool:
        try:
            (self._place / "-".join(path.parts[1:])).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True
