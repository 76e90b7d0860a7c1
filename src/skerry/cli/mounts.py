"""Buckets in sandboxes: mount, unmount, mounts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from skerry.cli.context import target_of
from skerry.cli.output import AsJson, print_json, print_table, somebody_looks

if TYPE_CHECKING:
    from skerry import MountInfo

Name = Annotated[str, typer.Argument(help="The sandbox.")]
Where = Annotated[str, typer.Argument(help="The directory inside.")]


def register(app: typer.Typer) -> None:
    app.command()(mount)
    app.command()(unmount)
    app.command()(mounts)


def mount(
    context: typer.Context,
    sandbox: Name,
    bucket: Annotated[str, typer.Argument(help="One that the server knows; `default` is its own directory.")],
    path: Where = "/persist",
    prefix: Annotated[str | None, typer.Option(help="What of it is shown [default: /projects/SANDBOX/].")] = None,
    read_only: Annotated[bool, typer.Option("--read-only", help="Nothing inside can change it.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the files of a bucket in a sandbox."""
    with target_of(context).sandbox(sandbox) as machine:
        done = machine.mount_bucket(bucket, path, prefix, read_only)
    print_json(done) if as_json else _print([done])


def unmount(context: typer.Context, sandbox: Name, path: Where = "/persist", as_json: AsJson = False) -> None:
    """Take a mounted bucket away; its files stay in it."""
    with target_of(context).existing(sandbox) as machine:
        gone = machine.unmount_bucket(path)
    print_json(gone) if as_json else print(gone.mount_path)


def mounts(context: typer.Context, sandbox: Name, as_json: AsJson = False) -> None:
    """List the buckets that are mounted in a sandbox."""
    with target_of(context).existing(sandbox) as machine:
        found = machine.list_mounts()
    if not found and not as_json and somebody_looks():
        return print(
            f"Nothing is mounted in {sandbox}. `skerry mount {sandbox} default` shows the default bucket there."
        )
    print_json(found) if as_json else _print(found)


def _print(found: list[MountInfo]) -> None:
    rows = [
        (one.mount_path, one.bucket, one.prefix, "read-only" if one.read_only else "writable", one.state, one.error)
        for one in found
    ]
    print_table(("PATH", "BUCKET", "PREFIX", "ACCESS", "STATE", "ERROR"), rows)
