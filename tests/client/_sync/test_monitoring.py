# Generated from tests/client/_async/test_monitoring.py by scripts/generate_sync.py; change that file and run it again.
"""What people build on streams: a build whose state is known while it runs, an alert for a line in a log."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from skerry import Sandbox


@pytest.fixture
def sandbox(home: Path) -> Iterator[Sandbox]:
    with Sandbox(f"watch-{secrets.token_hex(4)}", home=home, ephemeral=True) as sandbox:
        yield sandbox


@pytest.mark.parametrize(
    ("command", "last"), [("echo one; echo two >&2", "success"), ("echo one; echo two >&2; exit 3", "failed")]
)
def test_the_events_of_a_command_drive_the_state_of_a_build(sandbox: Sandbox, command: str, last: str) -> None:
    states, log = [], ""
    with sandbox.exec_stream(command) as events:
        for event in events:
            if event.type == "start":
                states.append("running")
            elif event.type in ("stdout", "stderr"):
                log += event.data or ""
            elif event.type == "complete":
                states.append("success" if event.exit_code == 0 else "failed")
    assert states == ["running", last]
    assert sorted(log.split()) == ["one", "two"]


def test_a_line_in_a_log_raises_an_alert_while_the_program_runs_on(sandbox: Sandbox) -> None:
    sandbox.write_file("/tmp/app.log", "INFO started\n")
    process = sandbox.start_process("exec tail -f /tmp/app.log")
    alerts = []
    with sandbox.stream_process_logs(process.id) as events:
        for event in events:
            if event.type == "stdout" and "INFO started" in (event.data or ""):
                sandbox.exec("echo ERROR disk is full >> /tmp/app.log")
            if event.type == "stdout" and "ERROR" in (event.data or ""):
                alerts.append(event.data)
                break
    assert alerts == ["ERROR disk is full\n"]
    assert (process.refresh()).status == "running"
    process.kill()
