"""Background processes: ps, logs."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from skerry.cli.context import target_of
from skerry.cli.output import AsJson, print_json, print_table

Name = Annotated[str, typer.Argument(help="The sandbox.")]


def register(app: typer.Typer) -> None:
    app.command()(ps)
    app.command()(logs)


def ps(context: typer.Context, sandbox: Name, as_json: AsJson = False) -> None:
    """List the background processes of a sandbox."""
    with target_of(context).existing(sandbox) as machine:
        found = [process.info for process in machine.list_processes()]
    if as_json:
        return print_json(found)
    rows = [(one.id, one.pid, one.status, one.exit_code, one.start_time, one.command) for one in found]
    print_table(("ID", "PID", "STATUS", "EXIT", "STARTED", "COMMAND"), rows)


def logs(
    context: typer.Context,
    sandbox: Name,
    process: Annotated[str, typer.Argument(help="The id or the pid of the process.")],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the process ends.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what a background process has written."""
    with target_of(context).existing(sandbox) as machine:
        if as_json and not follow:
            return print_json(machine.get_process_logs(process))
        with machine.stream_process_logs(process, follow=follow) as events:
            for event in events:
                if as_json:
                    print(event.model_dump_json(by_alias=True, exclude_none=True), flush=True)
                elif event.type in ("stdout", "stderr"):
                    stream = sys.stdout if event.type == "stdout" else sys.stderr
                    stream.write(event.data or "")
                    stream.flush()
