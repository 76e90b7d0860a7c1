"""Workspaces in buckets: sync, workspaces."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from skerry.cli.context import target_of
from skerry.cli.output import AsJson, counted, print_json, print_table, size_text, somebody_looks


def register(app: typer.Typer) -> None:
    app.command()(sync)
    app.command()(workspaces)


def sync(
    context: typer.Context,
    sandbox: Annotated[str, typer.Argument(help="The sandbox.")],
    pull: Annotated[bool, typer.Option("--pull", help="Bring what is stored into the sandbox instead.")] = False,
    directory: Annotated[str, typer.Option("--dir", help="The directory.")] = "/workspace",
    exclude: Annotated[list[str] | None, typer.Option(help="A pattern as in .gitignore; may be repeated.")] = None,
    everything: Annotated[
        bool, typer.Option("--everything", help="Also node_modules, .git, build and their like.")
    ] = False,
    bucket: Annotated[str | None, typer.Option(help="A bucket of `skerry buckets`.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be pushed.")] = False,
    as_json: AsJson = False,
) -> None:
    """Keep a copy of a sandbox's workspace in a bucket; only what differs is moved."""
    with target_of(context).existing(sandbox) as machine:
        done = machine.sync(
            "pull" if pull else "push",
            dir=directory,
            excludes=exclude,
            everything=everything,
            bucket=bucket,
            dry_run=dry_run,
        )
    if as_json:
        print_json(done)
    else:
        for error in done.errors:
            print(error, file=sys.stderr)
        moved = f"{counted(done.synced_files, 'file')} synced"
        stored = f"{size_text(done.total_size)} in bucket {done.bucket}"
        print(moved, f"{done.skipped_files} unchanged", f"{done.deleted_files} deleted", stored, sep="\t")
    if not done.ok:
        raise typer.Exit(1)


def workspaces(
    context: typer.Context,
    delete: Annotated[list[str] | None, typer.Option(help="Delete what is stored of this sandbox instead.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the workspaces that are stored in buckets, or delete some."""
    with target_of(context).client() as client:
        if delete:
            for id in delete:
                client.delete_workspace(id)
                if not as_json:
                    print(id)
            return print_json(delete) if as_json else None
        found = client.list_workspaces()
    if as_json:
        return print_json(found)
    if not found.workspaces and somebody_looks():
        return print("No workspace is stored yet. `skerry sync demo` stores sandbox demo's.")
    rows = [
        (one.sandbox_id, one.owner, one.files, size_text(one.size), one.bucket, one.workspace_synced_at)
        for one in found.workspaces
    ]
    print_table(("SANDBOX", "OWNER", "FILES", "SIZE", "BUCKET", "SYNCED"), rows)
