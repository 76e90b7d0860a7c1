"""Copying: cp."""

from __future__ import annotations

import os
import posixpath
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skerry.cli.context import Target, place, target_of
from skerry.cli.progress import progress_bar

if TYPE_CHECKING:
    from skerry import Sandbox, Transfer


def register(app: typer.Typer) -> None:
    app.command()(cp)


def cp(
    context: typer.Context,
    paths: Annotated[
        list[str], typer.Argument(metavar="SOURCE... TARGET", help="Local paths, or SANDBOX:PATH like demo:/workspace.")
    ],
) -> None:
    """Copy files and directories into a sandbox, or out of it."""
    if len(paths) < 2:
        raise typer.BadParameter("Give at least a source and a target.", param_hint="SOURCE... TARGET")
    *sources, last = paths
    there = place(last)
    origins = [place(source) for source in sources]
    if there is not None and any(origin is not None for origin in origins):
        raise typer.BadParameter("One side must be local; copy through a local directory.", param_hint="TARGET")
    if there is None and any(origin is None for origin in origins):
        raise typer.BadParameter("One side must be in a sandbox, written SANDBOX:PATH.", param_hint="SOURCE")
    target = target_of(context)
    if there is not None:
        _upload(target, [Path(source) for source in sources], *there)
    else:
        for origin in origins:
            assert origin is not None
            _download(target, *origin, Path(last))


def _upload(target: Target, sources: list[Path], name: str, remote: str) -> None:
    from skerry.client.archive import measure

    for source in sources:
        source.lstat()  # a missing source is said before a sandbox is made
    with target.sandbox(name) as sandbox:
        into = remote.endswith("/") or _is_directory(sandbox, remote)
        for source in sources:
            goal = posixpath.join(remote, source.resolve().name) if into or len(sources) > 1 else remote
            with progress_bar(source.name, measure(source)) as progress:
                sandbox.upload(source, goal, progress=progress)


def _download(target: Target, name: str, remote: str, local: Path) -> None:
    with target.existing(name) as sandbox:
        file = sandbox.stat(remote)
        into = local.is_dir() or str(local).endswith(os.sep)
        leaf = posixpath.basename(posixpath.normpath(remote)) or name
        goal = local / leaf if into else local
        with progress_bar(goal.name, None if file.type == "directory" else file.size) as progress:
            _report(sandbox.download(remote, goal, progress=progress))


def _report(done: Transfer) -> None:
    for reason in done.skipped:
        print(f"skipped {reason}", file=sys.stderr)


def _is_directory(sandbox: Sandbox, path: str) -> bool:
    from skerry import FileNotFoundInSandboxError

    try:
        return sandbox.stat(path).type == "directory"
    except FileNotFoundInSandboxError:
        return False
