"""bootstrap: a sandbox made ready for a project."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from skerry.cli.context import target_of
from skerry.cli.output import AsJson, print_json

if TYPE_CHECKING:
    from skerry import BootstrapEvent, BootstrapStep


def register(app: typer.Typer) -> None:
    app.command()(bootstrap)


def bootstrap(
    context: typer.Context,
    sandbox: Annotated[str, typer.Argument(help="The sandbox.")],
    repo: Annotated[str | None, typer.Argument(help="The repository to clone.")] = None,
    branch: Annotated[str | None, typer.Option(help="A branch or tag.")] = None,
    depth: Annotated[int, typer.Option(min=0, help="Commits of its history; 0 for all.")] = 1,
    target: Annotated[str, typer.Option(help="Where to.")] = "/workspace/repo",
    setup: Annotated[list[str] | None, typer.Option(help="A command to run in it; may be repeated.")] = None,
    bucket: Annotated[str | None, typer.Option(help="A bucket to mount; `default` is the server's own.")] = None,
    mount_path: Annotated[str, typer.Option(help="Where to mount it.")] = "/persist",
    prefix: Annotated[str | None, typer.Option(help="What of it is shown [default: /projects/SANDBOX/].")] = None,
    as_json: AsJson = False,
) -> None:
    """Mount a bucket, clone a repository and run setup commands, each unless it is done already."""
    with target_of(context).sandbox(sandbox) as machine:
        done = machine.bootstrap(
            repo,
            branch=branch,
            depth=depth or None,
            target_dir=target,
            setup=setup or (),
            bucket=bucket,
            mount_path=mount_path,
            prefix=prefix,
            on_event=None if as_json else _say,
        )
    if as_json:
        print_json(done)


def _say(event: BootstrapEvent) -> None:
    if event.step is not None:
        print(f"{event.step.type}\t{_about(event.step)}\t{'done' if event.step.changed else 'was done already'}")
        for text in (event.step.stdout, event.step.stderr):
            if text:
                print(text.rstrip("\n"), file=sys.stderr)
    elif event.data and sys.stderr.isatty():
        print(event.data, file=sys.stderr)


def _about(step: BootstrapStep) -> str:
    return step.mount_path or step.target_dir or step.command or step.path or ""
