"""Snapshots: snapshot, snapshots, fork, rollback, diff."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skerry.cli.context import pairs, target_of
from skerry.cli.output import AsJson, print_json, print_table, size_text, somebody_looks
from skerry.cli.sandboxes import Name

if TYPE_CHECKING:
    from skerry import LayerChange, SandboxInfo, SnapshotInfo

_SIGNS = {"added": "A", "changed": "C", "deleted": "D"}


def register(app: typer.Typer) -> None:
    for command in (snapshot, snapshots, fork, rollback, diff):
        app.command()(command)


def snapshot(
    context: typer.Context,
    name: Name,
    called: Annotated[str | None, typer.Argument(metavar="[AS]", help="A name to find it by.")] = None,
    option: Annotated[str | None, typer.Option("--name", help="The same.")] = None,
    label: Annotated[list[str] | None, typer.Option("--label", "-l", help="KEY=VALUE; may be given again.")] = None,
    as_json: AsJson = False,
) -> None:
    """Keep the files of a sandbox as they are now; what runs in it goes on. Prints the snapshot's id."""
    if called and option and called != option:
        raise typer.BadParameter("Two different names were given.", param_hint="--name")
    with target_of(context).existing(name) as sandbox:
        taken = sandbox.snapshot(called or option, labels=pairs(label, "--label") or None)
    print_json(taken) if as_json else print(taken.id)


def snapshots(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="Only those of this sandbox.")] = None,
    tree: Annotated[bool, typer.Option("--tree", help="Show what came from what.")] = False,
    remove: Annotated[list[str] | None, typer.Option("--rm", help="Delete this one; may be given again.")] = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Also one that sandboxes were made from.")] = False,
    as_json: AsJson = False,
) -> None:
    """List snapshots, or delete some."""
    with target_of(context).client() as client:
        if remove:
            for each in remove:
                client.delete_snapshot(each, force=force)
                if not as_json:
                    print(each)
            return print_json(remove) if as_json else None
        found = client.list_snapshots(name)
        if tree and not as_json:
            for line in _tree(found, list(client.sandboxes())):
                print(line)
            return
    if as_json:
        return print_json(found)
    if not found and somebody_looks():
        return print("There are no snapshots yet. `skerry snapshot demo` takes one of sandbox demo.")
    rows = [(one.id, one.name, one.sandbox_id, one.image, one.created_at, len(one.sandboxes)) for one in found]
    print_table(("ID", "NAME", "SANDBOX", "IMAGE", "TAKEN", "USED BY"), rows)


def _tree(found: list[SnapshotInfo], sandboxes: list[SandboxInfo]) -> Iterator[str]:
    """Images, the snapshots over them, and the sandboxes that are at each."""
    known = {one.id for one in found}
    below: dict[str, list[tuple[str, str]]] = {}
    for one in found:
        text = f"{one.name or one.id} (of {one.sandbox_id})"
        below.setdefault(one.parent if one.parent in known else f"image {one.image}", []).append((one.id, text))
    for sandbox in sandboxes:
        origin = f", forked from {sandbox.forked_from}" if sandbox.forked_from else ""
        where = sandbox.base if sandbox.base in known else f"image {sandbox.image}"
        below.setdefault(where, []).append((f"sandbox {sandbox.id}", f"[{sandbox.id}{origin}]"))

    def lines(key: str, indent: str) -> Iterator[str]:
        children = below.get(key, [])
        for index, (child, text) in enumerate(children):
            last = index == len(children) - 1
            yield f"{indent}{'└─' if last else '├─'} {text}"
            yield from lines(child, indent + ("   " if last else "│  "))

    for top in sorted(key for key in below if key.startswith("image ")):
        yield top.removeprefix("image ")
        yield from lines(top, "")


def fork(
    context: typer.Context,
    name: Name,
    names: Annotated[list[str] | None, typer.Argument(metavar="[NEW]...", help="The names of the new ones.")] = None,
    count: Annotated[int, typer.Option("--count", "-n", min=1, max=100, help="How many, if not named.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Make new sandboxes that are what this one is now."""
    with target_of(context).existing(name) as sandbox:
        forks = sandbox.fork(count, ids=names or None)
        if as_json:
            return print_json([each.info() for each in forks])
    for each in forks:
        print(each.id)


def rollback(
    context: typer.Context,
    name: Name,
    snapshot: Annotated[str, typer.Argument(help="The id or name of a snapshot.")],
    as_json: AsJson = False,
) -> None:
    """Make the files of a sandbox what they were; what runs in it ends."""
    with target_of(context).existing(name) as sandbox:
        back = sandbox.rollback(snapshot)
    if as_json:
        return print_json(back)
    if not somebody_looks():
        return print(back.id, back.base, back.state, sep="\t")
    print(f"{back.id} is as it was at snapshot {snapshot}. What ran in it has ended; the next command wakes it.")


def diff(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="SANDBOX|SNAPSHOT", help="What to look at.")],
    to: Annotated[str | None, typer.Argument(metavar="[TO]", help="With a snapshot first: the snapshot after.")] = None,
    since: Annotated[str | None, typer.Option(help="Of a sandbox: since this snapshot, not since the image.")] = None,
    tar: Annotated[Path | None, typer.Option("--tar", "-o", help="Write the changed files to a tar.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the files that were added (A), changed (C) and deleted (D)."""
    from skerry import SandboxNotFoundError

    target = target_of(context)
    with target.client() as client:
        sandbox = client.sandbox(name)
        try:
            if to is not None:
                raise SandboxNotFoundError("Two names are two snapshots.")
            sandbox.info()
        except SandboxNotFoundError:
            if tar is not None:
                return print(tar, size_text(client.download_diff(tar, name, to)), sep="\t")
            found = client.diff(name, to)
        else:
            if tar is not None:
                return print(tar, size_text(sandbox.download_diff(tar, since)), sep="\t")
            found = sandbox.diff(since)
    print_json(found) if as_json else _print_changes(found)


def _print_changes(found: list[LayerChange]) -> None:
    if not found and somebody_looks():
        print("Nothing has changed.")
    for one in found:
        print(f"{_SIGNS[one.change]} {one.path}{'/' if one.type == 'directory' else ''}")
