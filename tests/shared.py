"""Several runs of pytest beside each other that share the tests: each takes the next file that none has taken yet.

``TESTS_TAKEN`` is the directory in which they note what they took, ``TESTS_RECORD`` the one in which each notes how far
it is; scripts/run_tests.py makes them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

TAKEN, RECORD = "TESTS_TAKEN", "TESTS_RECORD"
# So that none of them is what all others wait for at the end.
LONGEST = (
    "egress/test_tunnels.py",
    "runtime/test_git.py",
    "providers/test_imported.py",
    "control/test_shipments.py",
    "egress/test_programs.py",
    "server/test_schemathesis.py",
    "agents/tasks/test_opencode_tasks.py",
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
    if place := os.environ.get(RECORD):
        config.pluginmanager.register(Record(Path(place)))


class Record:
    """What is under way and what has failed, for whoever must do without this run's own last words."""

    def __init__(self, place: Path) -> None:
        self._at, self._failed = place / "at", place / "failed"

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._at.write_text(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            with self._failed.open("a") as file:
                file.write(f"{report.nodeid}\n")


class Share:
    """What is in a file is collected when it is taken: to collect it all takes longer than to run most of it."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._files: list[pytest.Module] = []
        self._taken: pytest.Module | None = None
        self._broken = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> pytest.CollectReport | None:
        if not isinstance(collector, pytest.Module) or collector is self._taken:
            return None
        self._files.append(collector)
        return pytest.CollectReport(collector.nodeid, "passed", None, [])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._broken |= report.failed

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        mine = self._mine(session)
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

    def _mine(self, session: pytest.Session) -> Iterator[pytest.Item]:
        longest = {Path(__file__).parent / name: number for number, name in enumerate(LONGEST)}
        collected = 0
        for file in sorted(self._files, key=lambda file: longest.get(file.path, len(LONGEST))):
            if self._take(file.path):
                self._taken = file
                items = list(session.genitems(file))
                if self._broken:
                    break
                session.config.hook.pytest_collection_modifyitems(session=session, config=session.config, items=items)
                collected += len(items)
                yield from items
        session.testscollected = collected
        if self._broken:
            raise session.Interrupted("There were errors while tests were collected.")

    def _take(self, path: Path) -> bool:
        try:
            (self._place / "-".join(path.parts[1:])).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True
