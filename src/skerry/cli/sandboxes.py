"""Sandboxes: create, ls, info, start, stop, rm."""

from __future__ import annotations

import sys
from functools import partial
from typing import Annotated, Any

import typer

from skerry.cli.context import Target, pairs, place, target_of
from skerry.cli.limits import takes_limits
from skerry.cli.output import AsJson, print_json, print_state, print_table
from skerry.cli.sleep import HibernateAfter, OnIdle

Name = Annotated[str, typer.Argument(help="The sandbox.")]


def register(app: typer.Typer) -> None:
    for command in (create, ls, info, start, stop, rm):
        app.command()(command)


@takes_limits
def create(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="Its name; one is made up without.")] = None,
    image: Annotated[str | None, typer.Option(help="The image to start from.")] = None,
    env: Annotated[list[str] | None, typer.Option("--env", "-e", help="NAME=VALUE; may be given again.")] = None,
    label: Annotated[list[str] | None, typer.Option("--label", "-l", help="KEY=VALUE; may be given again.")] = None,
    sleep_after: Annotated[str | None, typer.Option(help="Idle time before it sleeps: 30s, 10m, 1h, never.")] = None,
    keep_alive: Annotated[bool, typer.Option("--keep-alive", help="Never sleep for want of use.")] = False,
    on_idle: OnIdle = None,
    hibernate_after: HibernateAfter = None,
    ephemeral: Annotated[bool, typer.Option("--ephemeral", help="Forget every file when it sleeps.")] = False,
    snapshot: Annotated[str | None, typer.Option(help="The snapshot to start from, instead of an image.")] = None,
    toolbox: Annotated[
        list[str] | None, typer.Option("--toolbox", help="Programs of the host to show inside; may be given again.")
    ] = None,
    provider: Annotated[str | None, typer.Option(help="Where it is to live: local, docker.")] = None,
    limits: dict[str, Any] | None = None,
    as_json: AsJson = False,
) -> None:
    """Make a sandbox, without starting it yet."""
    from skerry import Sandbox

    target = target_of(context)
    make = Sandbox.create if snapshot is None else partial(Sandbox.from_snapshot, snapshot)
    sandbox = make(
        name,
        image=image,
        env=pairs(env, "--env") or None,
        labels=pairs(label, "--label") or None,
        sleep_after=sleep_after,
        keep_alive=keep_alive or None,
        on_idle=on_idle,
        hibernate_after=hibernate_after,
        ephemeral=ephemeral or None,
        toolboxes=toolbox or None,
        provider=provider,
        limits=limits,
        url=target.url,
        api_key=target.api_key,
        home=target.home,
    )
    try:
        print_json(sandbox.info()) if as_json else print(sandbox.id)
    finally:
        sandbox.close()


def ls(
    context: typer.Context,
    where: Annotated[str | None, typer.Argument(help="A directory in a sandbox: demo:/workspace.")] = None,
    state: Annotated[str | None, typer.Option(help="Only sandboxes in this state.")] = None,
    label: Annotated[list[str] | None, typer.Option("--label", "-l", help="Only with KEY=VALUE.")] = None,
    hidden: Annotated[bool, typer.Option("--all", "-a", help="Files whose names begin with a dot too.")] = False,
    recursive: Annotated[bool, typer.Option("--recursive", "-R", help="Files in directories below too.")] = False,
    everyone: Annotated[bool, typer.Option("--everyone", help="As an admin: sandboxes of all owners.")] = False,
    as_json: AsJson = False,
) -> None:
    """List sandboxes, or the files in one."""
    target = target_of(context)
    if where is not None:
        return _list_files(target, where, hidden, recursive, as_json)
    with target.client() as client:
        found = list(client.sandboxes(state=state, labels=pairs(label, "--label") or None, everyone=everyone))
    if as_json:
        return print_json(found)
    if not found and sys.stdout.isatty():
        return print("There are no sandboxes yet. `skerry exec demo -- uname -a` makes one.")
    rows = [(one.id, one.state, one.image, one.created_at, one.last_active_at) for one in found]
    if everyone:
        owned = [(one.owner, *row) for one, row in zip(found, rows, strict=True)]
        return print_table(("OWNER", "NAME", "STATE", "IMAGE", "CREATED", "LAST USED"), owned)
    print_table(("NAME", "STATE", "IMAGE", "CREATED", "LAST USED"), rows)


def _list_files(target: Target, where: str, hidden: bool, recursive: bool, as_json: bool) -> None:
    there = place(where)
    if there is None:
        raise typer.BadParameter(f"{where!r} is not SANDBOX:PATH, like demo:/workspace.", param_hint="WHERE")
    name, path = there
    with target.existing(name) as sandbox:
        files = sandbox.list_files(path, recursive=recursive, include_hidden=hidden)
    if as_json:
        return print_json(files)
    kinds = {"directory": "d", "symlink": "l"}
    rows = [
        (kinds.get(file.type, "-") + file.mode, file.size, file.modified_at, _shown(file.relative_path, file.target))
        for file in files
    ]
    print_table(("MODE", "SIZE", "MODIFIED", "NAME"), rows)


def _shown(name: str, target: str | None) -> str:
    return name if target is None else f"{name} -> {target}"


def info(context: typer.Context, name: Name, as_json: AsJson = False) -> None:
    """Show what is known about a sandbox, without waking it."""
    with target_of(context).sandbox(name) as sandbox:
        found = sandbox.info()
        events = sandbox.events(limit=20)
    if as_json:
        return print_json(found)
    fields = found.model_dump(mode="json", by_alias=True, exclude_none=True)
    print_table(("FIELD", "VALUE"), [(name, value) for name, value in fields.items() if value not in ({}, [])])
    if events and sys.stdout.isatty():
        print()
        print_table(("WHEN", "EVENT", ""), [(event.at, event.kind, event.message) for event in events])


def start(
    context: typer.Context,
    name: Name,
    fresh: Annotated[bool, typer.Option("--fresh", help="Should its files be missing, over an empty disk.")] = False,
    as_json: AsJson = False,
) -> None:
    """Start or wake a sandbox."""
    with target_of(context).sandbox(name) as sandbox:
        awake = sandbox.start(fresh=fresh)
    print_state(awake, as_json)


def stop(context: typer.Context, name: Name, as_json: AsJson = False) -> None:
    """Put a sandbox to sleep: its processes end, its files stay."""
    with target_of(context).sandbox(name) as sandbox:
        asleep = sandbox.stop()
    print_state(asleep, as_json)


def rm(
    context: typer.Context,
    names: Annotated[list[str], typer.Argument(help="The sandboxes.")],
    force: Annotated[bool, typer.Option("--force", "-f", help="A sandbox that does not exist is no error.")] = False,
) -> None:
    """Destroy sandboxes and every file in them."""
    from skerry import SandboxNotFoundError, SkerryError

    failed = False
    with target_of(context).client() as client:
        for name in names:
            try:
                client.sandbox(name).destroy()
            except SkerryError as error:
                if not (force and isinstance(error, SandboxNotFoundError)):
                    print(f"error: {error}", file=sys.stderr)
                    failed = True
            else:
                print(name)
    raise typer.Exit(1 if failed else 0)
