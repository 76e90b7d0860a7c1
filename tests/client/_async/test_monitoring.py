"""What people build on streams: a build whose state is known while it runs, an alert for a line in a log."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from skerry import AsyncSandbox


@pytest.fixture
async def sandbox(home: Path) -> AsyncIterator[AsyncSandbox]:
    async with AsyncSandbox(f"watch-{secrets.token_hex(4)}", home=home, ephemeral=True) as sandbox:
        yield sandbox


@pytest.mark.parametrize(
    ("command", "last"), [("echo one; echo two >&2", "success"), ("echo one; echo two >&2; exit 3", "failed")]
)
async def test_the_events_of_a_command_drive_the_state_of_a_build(
    sandbox: AsyncSandbox, command: str, last: str
) -> None:
    states, log = [], ""
    async with sandbox.exec_stream(command) as events:
        async for event in events:
            if event.type == "start":
                states.append("running")
            elif event.type in ("stdout", "stderr"):
                log += event.data or ""
            elif event.type == "complete":
                states.append("success" if event.exit_code == 0 else "failed")
    assert states == ["running", last]
    assert sorted(log.split()) == ["one", "two"]


async def test_a_line_in_a_log_raises_an_alert_while_the_program_runs_on(sandbox: AsyncSandbox) -> None:
    await sandbox.write_file("/tmp/app.log", "INFO started\n")
    process = await sandbox.start_process("exec tail -f /tmp/app.log")
    alerts = []
    async with sandbox.stream_process_logs(process.id) as events:
        async for event in events:
            if event.type == "stdout" and "INFO started" in (event.data or ""):
                await sandbox.exec("echo ERROR disk is full >> /tmp/app.log")
            if event.type == "stdout" and "ERROR" in (event.data or ""):
                alerts.append(event.data)
                break
    assert alerts == ["ERROR disk is full\n"]
    assert (await process.refresh()).status == "running"
    await process.kill()
