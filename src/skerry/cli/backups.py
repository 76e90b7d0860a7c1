"""Backups: backup, restore, backups, buckets."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from skerry.cli.context import target_of
from skerry.cli.output import AsJson, counted, print_json, print_table, size_text, somebody_looks
from skerry.cli.progress import progress_bar

if TYPE_CHECKING:
    from skerry import BackupEvent

SandboxName = Annotated[str, typer.Argument(help="The sandbox.")]
BucketOption = Annotated[str | None, typer.Option("--bucket", help="A bucket of `skerry buckets`.")]


def register(app: typer.Typer) -> None:
    app.command()(backup)
    app.command()(restore)
    app.command()(backups)
    app.command()(buckets)


def backup(
    context: typer.Context,
    sandbox: SandboxName,
    directory: Annotated[str, typer.Argument(metavar="DIR", help="What to ship; / is the whole machine.")] = (
        "/workspace"
    ),
    name: Annotated[str | None, typer.Option(help="A name to find it by.")] = None,
    ttl: Annotated[str | None, typer.Option(help="How long it is kept: seconds, 12h, 30d.")] = None,
    gitignore: Annotated[bool, typer.Option("--gitignore", help="Leave out what git would ignore.")] = False,
    exclude: Annotated[list[str] | None, typer.Option(help="A pattern as in .gitignore; may be repeated.")] = None,
    compression: Annotated[str, typer.Option(help="zstd or none.")] = "zstd",
    level: Annotated[int, typer.Option(min=1, max=19, help="How hard zstd tries.")] = 2,
    bucket: BucketOption = None,
    as_json: AsJson = False,
) -> None:
    """Ship a directory of a sandbox to a bucket, and print the id it is restored by."""
    if compression not in ("zstd", "none"):
        raise typer.BadParameter("It is zstd or none.", param_hint="--compression")
    kind: Literal["zstd", "none"] = "none" if compression == "none" else "zstd"
    with target_of(context).existing(sandbox) as machine, _watched(f"backup of {directory}") as on_progress:
        done = machine.backup(
            directory,
            name=name,
            ttl=ttl,
            gitignore=gitignore,
            excludes=exclude,
            compression=kind,
            level=level,
            bucket=bucket,
            on_progress=on_progress,
        )
    if as_json:
        return print_json(done)
    for what, count in done.left_out.items():
        if what != "excluded":
            print(f"{what}: {count} ({', '.join(done.examples.get(what, ())[:3])})", file=sys.stderr)
    shipped = f"{size_text(done.size)} in bucket {done.bucket}"
    print(done.id, counted(done.files, "file"), size_text(done.bytes), shipped, sep="\t")


def restore(
    context: typer.Context,
    sandbox: SandboxName,
    backup: Annotated[str, typer.Argument(help="Its id, or - for a handle (the JSON of `backup --json`) on stdin.")],
    directory: Annotated[str | None, typer.Argument(metavar="[DIR]", help="Where to; where it came from.")] = None,
    bucket: BucketOption = None,
    as_json: AsJson = False,
) -> None:
    """Bring a backup back into a sandbox, all of it or nothing."""
    handle = _handle(sys.stdin.read()) if backup == "-" else backup
    with target_of(context).sandbox(sandbox) as machine, _watched(f"restore of {backup}") as on_progress:
        done = machine.restore(handle, directory, bucket=bucket, on_progress=on_progress)
    print_json(done) if as_json else print(f"{done.dir}\t{counted(done.files, 'file')}\t{size_text(done.bytes)}")


def backups(
    context: typer.Context,
    sandbox: Annotated[str | None, typer.Option(help="Only those of this sandbox.")] = None,
    name: Annotated[str | None, typer.Option(help="Only those of this name.")] = None,
    bucket: BucketOption = None,
    delete: Annotated[list[str] | None, typer.Option(help="Delete this one instead; may be repeated.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the backups, or delete some."""
    with target_of(context).client() as client:
        if delete:
            for id in delete:
                client.delete_backup(id, bucket=bucket)
                if not as_json:
                    print(id)
            return print_json(delete) if as_json else None
        found = client.list_backups(sandbox=sandbox, name=name, bucket=bucket)
    if as_json:
        return print_json(found)
    for unreachable in found.unreachable:
        print(f"bucket {unreachable} does not answer", file=sys.stderr)
    if not found.backups and somebody_looks():
        return print("There are no backups yet. `skerry backup demo` makes one of sandbox demo's /workspace.")
    rows = [
        (one.id, one.name, one.sandbox_id, one.dir, one.files, size_text(one.size), one.bucket, one.created_at)
        for one in found.backups
    ]
    print_table(("ID", "NAME", "SANDBOX", "DIR", "FILES", "SIZE", "BUCKET", "CREATED"), rows)


def buckets(context: typer.Context, as_json: AsJson = False) -> None:
    """List the buckets that are configured."""
    with target_of(context).client() as client:
        found = client.buckets()
    if as_json:
        return print_json(found)
    print_table(("NAME", "KIND", "WHERE"), [(one.name, one.kind, one.location) for one in found])


def _handle(text: str) -> dict[str, Any] | str:
    try:
        found = json.loads(text)
    except ValueError:
        return text.strip()
    if not isinstance(found, dict):
        raise typer.BadParameter("It is not the handle of a backup.", param_hint="BACKUP")
    return found


@contextmanager
def _watched(title: str) -> Iterator[Callable[[BackupEvent], None]]:
    """Events moved into a bar, which wants to know how much more there is each time."""
    with progress_bar(title, None, stays=False) as bar:
        seen = 0

        def on_progress(event: BackupEvent) -> None:
            nonlocal seen
            if event.total:
                bar.expect(event.total)
            if event.bytes is not None and event.bytes > seen:
                bar(event.bytes - seen)
                seen = event.bytes

        yield on_progress
